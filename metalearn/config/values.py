"""Configs as plain values: their keys, their leaves, and what differs between two of them; the names of run folders;
and what else the yamls compute: the resolvers `${NAME:…}`."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from metalearn.errors import ConfigError

Config = dict[str, Any]


def quoted(value: object) -> str:
    """`value` as it must be written on the right of an override, with any signs in it escaped."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def as_typed(value: object) -> str:
    """A value as one types it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def keys_of(node: DictConfig, prefix: str = "") -> set[str]:
    """The dotted path of every node."""
    keys = set()
    for name in map(str, node):
        keys.add(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            keys |= keys_of(child, f"{prefix}{name}.")
    return keys


def to_container(config: DictConfig, *, resolve: bool = True) -> Config:
    """The config as plain dicts, with every interpolation replaced by its value if `resolve`."""
    return OmegaConf.to_container(config, resolve=resolve)  # type: ignore[return-value]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(old value, new value) of every leaf that differs between two configs, by its dotted key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    pairs = {key: (before.get(key, "absent"), after.get(key, "absent")) for key in sorted(before.keys() | after.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def is_below(key: str, names: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a config that is not a dict."""
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# Names of runs, and resolvers

DEFAULT = ("maml_glyphs", "maml", "glyphs")  # the default experiment, its algorithm and its dataset
AUTO = "auto"  # the value of `run` that stands for `run_name`
FREE_KEYS = (
    "run", "workers", "strategy", "partitioner", "launch", "resume", "resume_changes", "pause_after", "init_strict",
    "checkpoint", "logger", "dataset.root", "dataset.download", "trainer.steps", "trainer.patience",
    "trainer.draw_ahead", "plugins", "seen_classes", "algorithm.checkpoint_steps",
)  # fmt: skip
"""Keys that may differ when a run goes on: they change no number, or, as `trainer.steps`, say when it ends."""

FOLLOWS_WAYS = ("model.ways", "model.network.num_classes")  # keys that follow dataset.ways
SET_BY_TASKS = ("model.inputs", *FOLLOWS_WAYS)  # keys that the tasks may set after the config is composed
_LONGEST_FOLDER_NAME = 120  # the most bytes of a folder's name
UNNAMED = (*FREE_KEYS, "seed", "device", "threads", "experiment", "sweep", "hydra")
"""Keys that are in no name of a run. The seed and the experiment are in its path; if the processor or its threads
change, the same command is refused, and begins no other run."""

SEARCHED = "METALEARN_SEARCHED"
"""The environment variable that tells the jobs of a multirun, wherever they run, which keys have several values."""


def folder_name(overrides: str, first: str = "") -> str:
    """A folder's name for these overrides, with `-` for `/`. A long one is cut, and begins with `first`; a name that is
    changed is made unique by a digest."""
    name, digest = overrides.replace("/", "-"), hashlib.sha256(overrides.encode()).hexdigest()[:8]
    if name == overrides and len(name.encode()) <= _LONGEST_FOLDER_NAME:
        return name
    room = _LONGEST_FOLDER_NAME - 9
    if first and len(name.encode()) > room:
        name = f"{first},{name}".replace("/", "-")
    return f"{name.encode()[:room].decode(errors='ignore')}-{digest}"


def _trial_folder(number: int, study: str | None, typed: Sequence[str]) -> str:
    """The folder of a job of a multirun: its number where a study keeps the jobs' parameters, else what was typed, but
    for the experiment, which is in the path, and keys that may differ when a run goes on, if they have one value."""
    if study is not None:
        return f"trial_{number:04d}"
    keys = {text: text.partition("=")[0].lstrip("+~") for text in sorted(typed)}
    searched = os.environ.get(SEARCHED, "").split(",")
    first = ",".join(text for text in typed if text.partition("=")[0] in searched)
    free = (*FREE_KEYS, "experiment")
    named = [text for text, key in keys.items() if text.partition("=")[0] in searched or not is_below(key, free)]
    return folder_name(",".join(named) or f"job_{number}", first)


def run_name(seed: object, changed: Mapping[str, object]) -> str:
    """The name of a run: its seed, and what differs from the defaults, as multirun names its trials. A value with other
    signs than file names have everywhere is told apart by a digest."""
    typed = ",".join([f"seed{seed}", *(f"{key}={_as_name(changed[key])}" for key in sorted(changed))])
    plain = re.sub(r"[^\w./,=+~-]+", "-", typed, flags=re.ASCII)
    digest = "" if plain == typed else f"-{hashlib.sha256(typed.encode(errors='replace')).hexdigest()[:8]}"
    return folder_name(plain + digest)


def _as_name(value: object) -> str:
    return "+".join(map(_as_name, value)) if isinstance(value, list) else as_typed(value)


def run_group(experiment: str, algorithm: str, dataset: str) -> str:
    """The name of the folder that holds a run's folder: the experiment; ALGORITHM-DATASET where the default experiment
    runs with another algorithm or dataset than its own."""
    default, *parts = DEFAULT
    return f"{algorithm}-{dataset}" if experiment == default and [algorithm, dataset] != parts else experiment


def experiment_of(selected: Mapping[str, str]) -> str:
    """The `run_group` of the selected options: the name of the experiment in what a run says and writes."""
    return run_group(selected["experiment"], selected["algorithm"], selected["dataset"])


def _of_sagemaker(name: str) -> str | int | None:
    """The value of a key of launch=sagemaker, from the variables that the containers of Amazon SageMaker set:
    ENVIRONMENT_VARIABLES.md of https://github.com/aws/sagemaker-training-toolkit."""
    if name == "data":  # SM_CHANNEL_… name the folders of the input channels
        channels = {key: folder for key, folder in os.environ.items() if key.startswith("SM_CHANNEL_")}
        only = next(iter(channels.values())) if len(channels) == 1 else None
        return only or channels.get("SM_CHANNEL_TRAINING", "/opt/ml/input/data")
    for variable in ("SM_HOSTS", "SM_CURRENT_HOST"):
        if variable not in os.environ:
            raise ConfigError(
                f"launch=sagemaker: the environment variable {variable} is not set; SageMaker sets it in its training "
                "jobs. Anywhere else, type launch=default"
            )
    hosts = json.loads(os.environ["SM_HOSTS"])
    values: dict[str, str | int | None] = {
        "nnodes": len(hosts),
        "workers_per_host": max(int(os.environ.get("SM_NUM_GPUS", "0")), 1),
        "node_rank": hosts.index(os.environ["SM_CURRENT_HOST"]),
        "master_addr": hosts[0] if len(hosts) > 1 else "127.0.0.1",
        "interface": os.environ.get("SM_NETWORK_INTERFACE_NAME") if len(hosts) > 1 else None,
    }
    return values[name]


def _inner_rate(*, _root_: DictConfig) -> float:
    """The rate of inner steps that learns tasks of classes (by a network with norms), or of real numbers. A dataset of
    classes has `ways`, or `targets: classes` where the tasks of a table share them."""
    dataset = _root_.get("dataset") or {}
    return 1.0 if dataset.get("ways") is not None or dataset.get("targets") == "classes" else 0.01


RESOLVERS: dict[str, Callable[..., Any]] = {
    "folder_name": folder_name,
    "trial_folder": _trial_folder,
    # The folder of the study, if there is one, below the experiment's folder.
    "study_folder": lambda study: "" if study is None else f"/{study}",
    "run_group": run_group,
    "inner_rate": _inner_rate,
    "sagemaker": _of_sagemaker,
    # A port for a job of Slurm, so that two jobs on one host do not meet; 0, any free one, outside of Slurm.
    "slurm_port": lambda job: 20_000 + int(job) % 10_000 if int(job) else 0,
}
