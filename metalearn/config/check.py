"""Checks of the keys that belong to no component: the program's own, the number of workers, the network."""

import os
import socket
from pathlib import Path

from omegaconf import DictConfig

from metalearn.checks import one_of, whole_number
from metalearn.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "float64", "tf32", "bf16")


def check_top_level(config: DictConfig) -> None:
    """Checks the keys that belong to no component.

    Raises:
        ConfigError: a value that is not allowed.
    """
    try:
        whole_number("seed", config.seed, at_least=0)
        whole_number("threads", config.threads, at_least=1)
        whole_number("launch.nnodes", config.launch.nnodes, at_least=1)
        whole_number("launch.node_rank", config.launch.node_rank, at_least=0)
        whole_number("launch.master_port", config.launch.master_port, at_least=0, at_most=65535)
        whole_number("launch.max_restarts", config.launch.max_restarts, at_least=0)
        one_of("device", config.device, DEVICES)
        one_of("precision", config.precision, PRECISIONS)
        if config.workers is not None:
            whole_number("workers", config.workers, at_least=1)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    run = str(config.run)
    if not run or run in (".", "..") or "/" in run:
        raise ConfigError(f"run={run!r}: must be the name of a folder; for example run=first")
    for key, words in (("init_from", [None]), ("resume", ["auto", "never"])):
        path = config[key]
        if path not in words and not (isinstance(path, str) and Path(path).is_dir()):
            allowed = "auto, never or " if key == "resume" else ""
            raise ConfigError(f"{key}={path}: must be {allowed}the folder of a checkpoint, such as …/checkpoints/best")


def started_as_rank() -> bool:
    """Whether this process is one of a world that is there already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_launcher() -> bool:
    """Whether `python train.py workers=N` has started this process as one of its ranks."""
    return "DISTRIBUTED_LAUNCHER_PID" in os.environ


def world_size(config: DictConfig, command: str) -> int:
    """The number of workers: what torchrun (or our launcher) gave, else `workers`, else 1. `command`, the program with
    its arguments, is for the message.

    Raises:
        ConfigError: they contradict each other, or cannot be divided among the hosts.
    """
    asked = config.workers
    if started_as_rank():
        given = os.environ["WORLD_SIZE"]
        if asked is not None and asked != int(given):
            raise ConfigError(
                f"workers={asked}, but torchrun started {given}. Type either\n"
                f"  torchrun --nproc_per_node={asked} {command}\n"
                f"or, without torchrun,\n  python {command}"
            )
        return int(given)
    workers = int(asked or 1)
    place = config.launch
    if workers % place.nnodes:
        raise ConfigError(f"workers={workers}: must be a multiple of launch.nnodes={place.nnodes}; it counts all hosts")
    if place.node_rank >= place.nnodes:
        raise ConfigError(f"launch.node_rank={place.node_rank}: must be below launch.nnodes={place.nnodes}")
    if place.nnodes > 1 and not place.master_port:
        raise ConfigError(
            f"launch.nnodes={place.nnodes}: several hosts need a port to meet at, and the network that they share; "
            "type launch.interface=eth0 launch.master_addr=ADDRESS_OF_HOST_0 launch.master_port=29500"
        )
    return workers


def check_network(config: DictConfig) -> None:
    """Checks the network interface that the workers are to use.

    Raises:
        ConfigError: this host does not have it; or there are several hosts, and none is named.
    """
    interface = config.launch.interface
    own = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in own:
        raise ConfigError(f"launch.interface={interface}: this host has no such interface; it has {', '.join(own)}")
    if started_as_rank():
        several = os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ["WORLD_SIZE"]
    else:
        several = config.launch.nnodes > 1
    named = interface is not None or {"TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= os.environ.keys()
    if several and not named:
        raise ConfigError(
            "launch.interface=null: workers on several hosts need the network that they share; type one of "
            + ", ".join(f"launch.interface={name}" for name in own if name != "lo")
        )
