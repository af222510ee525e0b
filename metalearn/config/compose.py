"""From the command line to checked config.

Imports no torch: a misspelt key or an unknown choice is answered before anything heavy is loaded.
"""

import difflib
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from metalearn.errors import ConfigError

CONF = Path(__file__).resolve().parents[2] / "conf"
NO_GROUPS = ("reproduce",)
"""Folders beside the groups' that hold something else."""

OPEN = "model.network."
"""Below this key stand the arguments of a network that is not ours."""

_LONGEST_FOLDER_NAME = 120

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
        hint = nearest(option, options)
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
    whole = nearest(key, [*sorted(known), *groups()])
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


def nearest(name: str, names: Sequence[str]) -> str:
    """A question that names what was perhaps meant, if anything is near."""
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


# Values


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
