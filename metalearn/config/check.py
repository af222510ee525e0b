"""Checks of the keys that belong to no component: the program's own, the number of workers, the network."""

import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, ListConfig, OmegaConf

from metalearn.config.compose import check_key
from metalearn.config.saved import check_checkpoint
from metalearn.config.values import FREE_KEYS, SET_BY_TASKS, Config, differences, is_below, keys_of, to_container
from metalearn.errors import ConfigError, as_typed, one_of, real_number, switches, typed_program, whole_number
from metalearn.storage.files import read_json

PRECISIONS = ("float32", "float64", "tf32", "bf16")
LOCK = ".lock"  # the name of the lock in a run folder


def check_top_level(config: DictConfig) -> None:
    """Checks the keys that belong to no component. Raises ConfigError for a value that is not allowed."""
    for key in OmegaConf.missing_keys(config):
        if "." not in key or key.startswith("launch."):
            raise ConfigError(f"{key}=???: needs a value; type {key}=VALUE")
    launch = config.launch
    try:
        whole_number("seed", config.seed, at_least=0)
        whole_number("threads", config.threads, at_least=1, at_most=1024)
        for key, least, most in (
            ("nnodes", 1, 2**31), ("workers_per_host", 1, 2**31), ("node_rank", 0, 2**31), ("master_port", 0, 65535),
            ("max_restarts", 0, 2**31),
        ):  # fmt: skip
            whole_number(f"launch.{key}", launch[key], at_least=least, at_most=most)
        for key in ("pause_after", "workers"):
            if config[key] is not None:
                whole_number(key, config[key], at_least=1)
        switches(**{"launch.mixed": launch.mixed, "init_strict": config.init_strict})
        one_of("seen_classes", config.seen_classes, ("refuse", "report"))
        one_of("device", config.device, ("auto", "cpu", "cuda"))
        one_of("precision", config.precision, PRECISIONS)
        if not isinstance(launch.isolate, bool) and launch.isolate != "auto":  # nor the text "true", which is no bool
            raise ConfigError(
                f"launch.isolate={launch.isolate!r}: must be auto, true or false; type launch.isolate=auto"
            )
        if launch.ray is not None:
            _check_ray(launch)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for key, example in (("data", "data"), ("outputs", "outputs"), ("model", "best")):
        if not (isinstance(launch[key], str) and launch[key]) and (key, launch[key]) != ("model", None):
            advice = f"(is a variable of the shell not set?); type launch.{key}={example}"
            raise ConfigError(f"launch.{key}={launch[key]!r}: must be a folder {advice}")
    run = str(config.run)
    if config.run is None or not run or run in (".", "..") or "/" in run:
        raise ConfigError(f"run={run!r}: must be the name of a folder; for example run=first")
    if config.resume not in ("auto", "never"):
        check_checkpoint("resume", config.resume, published=False)
    changes = config.resume_changes
    if not isinstance(changes, ListConfig):
        raise ConfigError(f"resume_changes={changes}: must be a list of keys; type 'resume_changes=[optimizer.lr]'")
    for name in changes:
        try:
            check_key(str(name), keys_of(config))
        except ConfigError as error:
            raise ConfigError(f"resume_changes=[{name}]: {error}") from error
    if "precision" in changes:
        raise ConfigError(
            "resume_changes=[precision]: a checkpoint goes on in its own precision; type init_from=PATH in place of "
            "resume=PATH, to begin with its parameters alone"
        )
    if changes and config.resume in ("auto", "never"):
        raise ConfigError(
            f"resume_changes=[{','.join(changes)}]: needs the checkpoint to begin from; type resume=PATH, such as "
            "…/checkpoints/last of another run"
        )
    reptile = OmegaConf.select(config, "algorithm._target_") == "metalearn.algorithms.reptile.reptile"
    counted, tasks = (OmegaConf.select(config, key) for key in ("algorithm.meta_batch", "trainer.meta_batch_size"))
    if reptile and counted != tasks:
        raise ConfigError(
            f"algorithm.meta_batch={counted}: must be trainer.meta_batch_size={tasks}, the tasks of a meta-step; leave "
            "it out, and it follows that"
        )


def _check_ray(launch: DictConfig) -> None:
    """Checks the keys of launch=ray, and that the package is there."""
    ray = launch.ray
    if not isinstance(ray, DictConfig):
        raise ConfigError(f"launch.ray={ray}: is a group of keys; type launch=ray")
    real_number("launch.ray.cpus", ray.cpus, above=0)
    real_number("launch.ray.wait", ray.wait, above=0)
    if ray.gpus != "auto":
        real_number("launch.ray.gpus", ray.gpus, at_least=0)
    switches(**{"launch.ray.spread": ray.spread, "launch.ray.grows": ray.grows})
    if ray.address not in (None, "auto") and not re.fullmatch(r"[\w.-]+:\d{1,5}", str(ray.address)):
        raise ConfigError(
            f"launch.ray.address={ray.address}: must be HOST:PORT, auto, or null for a cluster of this host alone; "
            "through ray://… a run cannot be started, so start it on a host of the cluster, or by ray job submit"
        )
    if launch.nnodes != 1 or launch.isolate is True:
        key = "nnodes" if launch.nnodes != 1 else "isolate"
        raise ConfigError(f"launch.{key}={launch[key]}: launch=ray places the workers itself; leave launch.{key} out")
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("launch=ray: the package ray is not installed; type pip install ray, or pip install '.[ray]'")


# Environment variables that torchrun sets for a rank, and those of them that need each other
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
_TOGETHER = {"RANK": "WORLD_SIZE", "WORLD_SIZE": "RANK", "MASTER_ADDR": "MASTER_PORT", "MASTER_PORT": "MASTER_ADDR"}


def check_rank_variables() -> None:
    """Raises ConfigError if the environment variables of a rank have a wrong value, or are not all set."""
    for name, value in ((name, os.environ[name]) for name in RANK_VARIABLES if name in os.environ):
        if name != "MASTER_ADDR" and not (value.isascii() and value.isdecimal()):
            _refuse_variable(name, "must be a whole number from 0")
        if name in _TOGETHER and _TOGETHER[name] not in os.environ:
            _refuse_variable(name, f"{_TOGETHER[name]} is not set")
    if started_as_rank() and int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        _refuse_variable("RANK", f"must be below WORLD_SIZE={os.environ['WORLD_SIZE']}")


def _refuse_variable(name: str, reason: str) -> NoReturn:
    raise ConfigError(
        f"{name}={os.environ[name]!r:.60}: {reason}; type torchrun --nproc_per_node=N …, which sets all of them, or "
        f"unset {name} for a run without torchrun"
    )


def started_as_rank() -> bool:
    """Whether this process is a rank of a world that has been started already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_launcher() -> bool:
    """Whether our launcher, for `workers=N`, has started this process as one of its ranks."""
    return "DISTRIBUTED_LAUNCHER_PID" in os.environ


def computes_elsewhere(config: DictConfig) -> bool:
    """Whether this process only starts ranks on a cluster. Its hosts may have GPUs where this one has none."""
    return config.launch.ray is not None and not started_as_rank()


def job_id() -> str:
    """The name of the Slurm job, or of torchrun's world. A restart keeps it; without them it is empty."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")


def restarted() -> bool:
    """Whether torchrun has started this world again after a failure, or Slurm this job after it was queued again."""
    return any(int(os.environ.get(f"{name}_RESTART_COUNT") or 0) > 0 for name in ("TORCHELASTIC", "SLURM"))


def is_new_run(run_dir: Path, resume: str) -> bool:
    """Whether a run begins in this folder; what this takes needs no torch. Raises ConfigError if it is no folder, holds
    something that is no run, or is not empty although `resume` is `never`."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"hydra.run.dir={run_dir}: is no folder; type run=NAME, or another hydra.run.dir")
    empty = not run_dir.exists() or {entry.name for entry in run_dir.iterdir()} <= {LOCK, ".hydra"}
    if not empty and resume == "never" and not restarted():  # a restarted job finds its own files
        raise ConfigError(f"resume=never: {run_dir} is not empty; type run=NAME for another folder, or resume=auto")
    if not empty and not (run_dir / ".hydra").is_dir():
        raise ConfigError(f"{run_dir} is not empty and holds no run; type run=NAME for another folder")
    return empty


def check_folder(run_dir: Path, config: DictConfig) -> None:
    """Refuses a run folder as far as that needs no torch, whose import takes seconds. Raises ConfigError as
    `is_new_run`; or if the last checkpoint there was made with another config."""
    if not is_new_run(run_dir, config.resume) and config.resume == "auto":
        last = read_json(run_dir / "checkpoints/last/meta.json")
        refuse_changes(run_dir, last.get("config", {}), to_container(config), SET_BY_TASKS)


def refuse_changes(
    place: Path, old: Mapping[str, Any], new: Config, free: Sequence[str] = (), named: Sequence[str] | None = None
) -> None:
    """Compares the config of the run in `place` with the one that is asked for. Keys below `FREE_KEYS`, `free` and
    `named`, which `resume_changes` has, may differ; and an empty config, of which nothing is known, in everything.
    Raises ConfigError if another key differs, or the optimizer."""
    changes = differences(old, new) if old else {}
    refused = {key: pair for key, pair in changes.items() if not is_below(key, (*FREE_KEYS, *free, *(named or ())))}
    if refused:
        all_named = f"'resume_changes=[{','.join([*(named or ()), *refused])}]'"
        begin = f"the same values, or {all_named} to begin from it with these"
        raise ConfigError(
            f"{place} holds a run with another config:\n"
            + "\n".join(f"  {key}: {before} → {after}" for key, (before, after) in refused.items())
            + f"\ntype {'run=NAME to keep both, or the same values to go on' if named is None else begin}"
        )
    if "optimizer._target_" in changes:
        raise ConfigError(
            f"resume={place}: holds the state of another optimizer, which this one cannot take over; type the same "
            f"optimizer, or init_from={place}, which takes the parameters alone"
        )


def world_size(config: DictConfig, command: str) -> int:
    """The number of workers: as torchrun (or our launcher) has started them, else `workers`, else those of all hosts.
    Raises ConfigError if `workers` contradicts torchrun, or cannot be divided by the number of hosts; or what the
    environment says of ranks is not whole. Messages have the `command`, the program with its arguments."""
    check_rank_variables()
    launch, workers = config.launch, config.workers
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not started_as_rank() and "SLURM_PROCID" in os.environ and tasks not in ("1", str(launch.nnodes)):
        raise ConfigError(
            f"SLURM_PROCID={os.environ['SLURM_PROCID']}: srun has started {tasks} tasks, and each would train the "
            "whole run; type srun --ntasks-per-node=1 with launch=slurm and workers=N, which starts the workers, or "
            "unset SLURM_PROCID for runs of their own"
        )
    if started_as_rank():
        started = os.environ["WORLD_SIZE"]
        if workers is not None and workers != int(started):
            raise ConfigError(
                f"workers={workers}, but torchrun started {started}. Type either\n"
                f"  torchrun --nproc_per_node={workers} {command}\n"
                f"or, without torchrun,\n  {as_typed(command)}"
            )
        return int(started)
    workers = int(workers or launch.nnodes * launch.workers_per_host)
    if workers % launch.nnodes:
        raise ConfigError(
            f"workers={workers}: must be a multiple of launch.nnodes={launch.nnodes}; it counts those of all hosts; "
            f"type workers={-(-workers // launch.nnodes) * launch.nnodes}"
        )
    if launch.node_rank >= launch.nnodes:
        raise ConfigError(
            f"launch.node_rank={launch.node_rank}: must be below launch.nnodes={launch.nnodes}; type "
            "launch.node_rank=0 on the first host, 1 on the next"
        )
    if launch.nnodes > 1 and not launch.master_port:
        raise ConfigError(
            f"launch.nnodes={launch.nnodes}: several hosts need one port, and the network interface that they share; "
            "type launch.interface=eth0 launch.master_addr=ADDRESS_OF_HOST_0 launch.master_port=29500"
        )
    interface = launch.interface or os.environ.get("TP_SOCKET_IFNAME", "")
    if launch.nnodes > 1 and _is_loopback(launch.master_addr) and not interface.startswith("lo"):
        raise ConfigError(
            f"launch.master_addr={launch.master_addr}: no other host reaches this address; type "
            "launch.master_addr=ADDRESS_OF_HOST_0, or, to try it on this host alone, launch.interface=lo"
        )
    return workers


def _is_loopback(address: str) -> bool:
    """Whether this is an address of the host itself, whichever that is."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    return parsed.is_loopback or parsed.is_unspecified


def on_several_hosts(config: DictConfig) -> bool:
    """Whether the workers are on several hosts, which may have no disk in common."""
    if started_as_rank():
        if "LOCAL_WORLD_SIZE" not in os.environ and _is_loopback(os.environ.get("MASTER_ADDR", "")):
            return False  # started by hand: no other host reaches this address
        return os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ["WORLD_SIZE"]
    return bool(config.launch.nnodes > 1)


def check_network(config: DictConfig) -> None:
    """Checks the network interface of the workers, and whether they can be isolated. Raises ConfigError for one that
    this host does not have, or that several hosts need; and if a rank cannot be isolated, or find the others."""
    if config.launch.isolate is True and started_as_rank() and not started_by_launcher():
        raise ConfigError(
            "launch.isolate=true: torchrun has started this process in the host's network. Type\n"
            f"  {typed_program()} workers={os.environ['WORLD_SIZE']} launch.isolate=true …\n"
            "without torchrun, or launch.isolate=auto"
        )
    if started_as_rank() and os.environ["WORLD_SIZE"] != "1" and "MASTER_ADDR" not in os.environ:
        _refuse_variable("WORLD_SIZE", "MASTER_ADDR and MASTER_PORT are not set")
    interface = config.launch.interface
    present = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in present:
        raise ConfigError(f"launch.interface={interface}: this host has no such interface; it has {', '.join(present)}")
    named = interface is not None or {"TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= os.environ.keys()
    if on_several_hosts(config) and not named:
        raise ConfigError(
            "launch.interface=null: workers on several hosts need the network interface that they share; type one "
            "of " + ", ".join(f"launch.interface={name}" for name in present if name != "lo")
        )
