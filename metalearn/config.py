"""From the command line to checked config, and from config to objects.

Imports no torch: a misspelt key or an unknown choice is answered before anything heavy is loaded.
"""

import difflib
import hashlib
import inspect
import itertools
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from metalearn.checks import one_of, whole_number
from metalearn.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"
NO_GROUPS = ("reproduce",)
"""Folders beside the groups' that hold something else."""
OWN_PACKAGES = ("metalearn.", "distributed.")
PRECISIONS = ("float32", "float64", "tf32", "bf16")

OPEN = "model.network."
"""Below this key stand the arguments of a network that is not ours."""
DEVICES = ("auto", "cpu", "cuda")

_LONGEST_FOLDER_NAME = 120

_NOT_CHOSEN = {"inner": "metalearn.inner.sgd"}
"""Parts that an object may have no use for, and the target of the default of each."""

Config = dict[str, Any]


def folder_name(overrides: str) -> str:
    """The name of a multirun job's folder: its overrides, cut short and made unique by a digest if long."""
    if len(overrides) <= _LONGEST_FOLDER_NAME:
        return overrides
    return f"{overrides[: _LONGEST_FOLDER_NAME - 9]}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)


def quoted(value: object) -> str:
    """`value` as it must be written on the right of an override, whatever signs it holds."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Composed(NamedTuple):
    """The whole config, the folder of its run, and the name of the experiment."""

    config: DictConfig
    run_dir: Path
    experiment: str


class Job(NamedTuple):
    """One run: its config, folder and experiment, the command that repeats it, and its number of workers."""

    config: DictConfig
    run_dir: Path
    experiment: str
    overrides: list[str]
    workers: int


# Composing


def compose_config(overrides: Sequence[str]) -> Composed:
    """What the overrides ask for.

    Raises:
        ConfigError: a key or a choice that does not exist, or a value that cannot be read.
    """
    asked = parsed(overrides)
    for override in asked:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values need a multirun; type --multirun before them")
    try:
        choices, values = sorted_out(asked)
        for override in choices:
            check_choice(override)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            lines = [override.input_line or "" for override in choices]
            known = keys_of(_without_experiment(lines))
            for override in values:
                check_key(override.key_or_group, known)
            whole = compose("config", overrides=list(overrides), return_hydra_config=True)
            HydraConfig.instance().set_config(whole)
            run_dir = Path(whole.hydra.run.dir)
            experiment = str(whole.hydra.runtime.choices.experiment)
        config = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        for key in sorted(keys_of(config) - known):
            _check_own_key(key, known, experiment)
        OmegaConf.resolve(config)
    except InterpolationKeyError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {reason}: the options chosen do not fit together") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error
    return Composed(config, run_dir, experiment)


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job of a multirun: all combinations of what is listed.

    Raises:
        ConfigError: an override that cannot be read, or a sweep that is no list of values.
    """
    values: list[list[str]] = []
    for override in parsed(overrides):
        key = override.key_or_group
        if not override.is_sweep_override():
            values.append([override.input_line or ""])
            continue
        try:
            values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        except (HydraException, AssertionError) as error:  # a glob, or an interval without steps
            raise ConfigError(f"{override.input_line}: must list its values; type {key}=A,B") from error
    return [list(job) for job in itertools.product(*values)]


def groups() -> dict[str, list[str]]:
    """Every config group with its options."""
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir() and folder.name not in NO_GROUPS)
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides, read by Hydra.

    Raises:
        ConfigError: one that cannot be read.
    """
    parser = OverridesParser.create()
    parsed = []
    for override in overrides:
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as error:
            raise ConfigError(f"{override}: cannot be read: {str(error).splitlines()[0]}; type KEY=VALUE") from error
    return parsed


def sorted_out(parsed: Sequence[Override]) -> tuple[list[Override], list[Override]]:
    """Choices of a group's option, and values of keys; what concerns Hydra itself is left to Hydra."""
    ours = [o for o in parsed if not o.key_or_group.startswith(("hydra.", "hydra/"))]
    known = groups()
    return [o for o in ours if o.key_or_group in known], [o for o in ours if o.key_or_group not in known]


def check_choice(override: Override) -> None:
    """Raises ConfigError for an option that its group does not have."""
    group = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"~{group}: a group cannot be removed; type {group}=NAME")
    _check_option(group, str(override.value()))


def _check_option(group: str, option: str) -> None:
    options = groups()[group]
    if option not in options:
        hint = _nearest(option, options)
        raise ConfigError(f"{group}={option}: there is no such choice{hint}; allowed: {', '.join(options)}")


def check_key(key: str, known: set[str]) -> None:
    """Raises ConfigError for a key that is not known, naming the nearest."""
    if key in known or (key.startswith(OPEN) and OPEN.rstrip(".") in known):
        return
    known = {name for name in known if not name.endswith("._target_")}
    last = {name.rpartition(".")[2]: name for name in sorted(known)}
    own = key.rpartition(".")[2]
    tail = [own] if own in last else difflib.get_close_matches(own, last, n=1, cutoff=0.75)
    by_tail = f"; did you mean {last[tail[0]]}?" if tail else ""
    whole = _nearest(key, [*sorted(known), *groups()])
    hint = by_tail if own in last else whole or by_tail
    raise ConfigError(f"{key}: there is no such key{hint} (python train.py --help lists all)")


def _check_own_key(key: str, known: set[str], experiment: str) -> None:
    """As `check_key`, for a key that the experiment has set."""
    try:
        check_key(key, known)
    except ConfigError as error:
        group = key.partition(".")[0]
        raise ConfigError(
            f"{error}. experiment={experiment} sets it, so it does not go with this {group}; type another "
            f"experiment, one of {', '.join(groups()['experiment'])}"
        ) from error


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _without_experiment(choices: list[str]) -> DictConfig:
    """The config of the options chosen, as their own files have it: the keys that exist."""
    chosen = compose("config", overrides=choices, return_hydra_config=True).hydra.runtime.choices
    plain = [f"{group}={option}" for group, option in chosen.items() if group in groups() and group != "experiment"]
    return compose("config", overrides=[*plain, "~experiment"])


def keys_of(node: DictConfig, prefix: str = "") -> set[str]:
    """The dotted path of every node."""
    found = set()
    for name in map(str, node):
        found.add(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            found |= keys_of(child, f"{prefix}{name}.")
    return found


# Checking


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


def resolved(config: DictConfig) -> DictConfig:
    """The config with every interpolation replaced by its value.

    Raises:
        ConfigError: one that points nowhere.
    """
    copy = config.copy()
    try:
        OmegaConf.resolve(copy)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
    return copy


def to_container(config: DictConfig) -> Config:
    """The config as plain dicts, resolved."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(old value, new value) of every leaf in which two configs differ, by its dotted key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    pairs = {key: (before.get(key, "absent"), after.get(key, "absent")) for key in sorted(before.keys() | after.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a config that is not a dict."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Building


def build(config: DictConfig, group: str, **parts: Any) -> Any:
    """The object that a group of the config describes; `parts` are passed on beside its keys.

    Raises:
        ConfigError: a target outside our packages, a key that it does not take, a value that it refuses.
    """
    node = config[group]
    if not isinstance(node, DictConfig):
        raise ConfigError(f"{group}={node}: is a group of keys; type {group}.KEY=VALUE")
    target = str(node.get("_target_"))
    if not target.startswith(OWN_PACKAGES):
        raise ConfigError(f"{group}._target_={target}: must be in {' or '.join(OWN_PACKAGES)}")
    try:
        factory = get_object(target)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{group}._target_={target}: {error}") from error
    accepted = inspect.signature(factory).parameters
    parts = _wanted(config, group, parts, set(accepted))
    for key in map(str, node):
        if key != "_target_" and key not in accepted:
            raise ConfigError(f"{group}.{key}: {target} does not take it{_nearest(key, list(accepted))}")
    for name, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and name not in node and name not in parts:
            raise ConfigError(f"{group}.{name}: missing; {target} needs it; type {group}.{name}=VALUE")
    try:
        return instantiate(node, _convert_="all", _recursive_=False, **parts)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError):
            raise ConfigError(_with_group(group, list(map(str, node)), str(cause))) from cause
        raise


def _wanted(config: DictConfig, group: str, parts: Mapping[str, Any], accepted: set[str]) -> dict[str, Any]:
    """The parts that the object of a group takes.

    Raises:
        ConfigError: a part that it does not take was chosen, that is, is not the default.
    """
    for name in sorted(parts.keys() - accepted):
        target = config[name]._target_
        if target != _NOT_CHOSEN.get(name):
            raise ConfigError(f"{name}: {config[group]._target_} has no use for {target}; leave {name}=… out")
    return {name: part for name, part in parts.items() if name in accepted}


def _with_group(group: str, keys: Sequence[str], message: str) -> str:
    """A component's message about its argument, as one about the config's key: what it names and what it
    says to type get the group before them."""
    names = "|".join(map(re.escape, keys))
    return re.sub(rf"(^|type |for example )(?=(?:{names})(?:\.\w+)*=)", rf"\g<1>{group}.", message)


# Help


def help_text() -> str:
    """What the program does, its groups and keys; the explanations are the comments of the yaml files."""
    lines = [
        "Trains meta-learners. Everything is chosen by config: GROUP=OPTION and KEY=VALUE.",
        "",
        "  python train.py                                  MAML on drawn characters, about a minute",
        "  python train.py workers=2 experiment=maml_omniglot",
        "  torchrun --nproc_per_node=2 train.py experiment=maml_omniglot trainer.steps=2000",
        "  python train.py --multirun algorithm.inner_lr=0.1,0.4",
        "",
        "Groups and their options:",
    ]
    for group, options in groups().items():
        lines += [f"  {group}"]
        lines += [f"    {option:22} {_summary(CONF / group / f'{option}.yaml')}" for option in options]
    lines += ["", "Keys of the program:", *_explained(CONF / "config.yaml", "")]
    for group, options in groups().items():
        if group != "experiment":
            for option in options:
                explained = _explained(CONF / group / f"{option}.yaml", f"{group}.")
                lines += [f"Keys of {group}={option}:", *explained] if explained else []
    lines += ["", "Hydra's own flags (--multirun, --cfg job, …): python train.py --hydra-help"]
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """The first comment of a yaml file that is not a directive to Hydra."""
    comments = (line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def _explained(path: Path, prefix: str) -> list[str]:
    """`key=default  meaning` for every line of a yaml file that has a comment behind it."""
    lines = []
    section = ""
    for line in path.read_text().splitlines():
        setting, _, meaning = line.partition("  # ")
        key, _, value = setting.partition(":")
        if line and not line.startswith((" ", "#")):
            section = "" if meaning else f"{key}."
        if meaning:
            name = f"{prefix}{section}{key.strip()}" if line.startswith(" ") else f"{prefix}{key}"
            lines.append(f"  {name + '=' + value.strip():52} {meaning}")
    return lines
