"""From the command line to checked config.

Imports no torch: a misspelt key or an unknown choice is reported before anything heavy is loaded.
"""

import difflib
import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from metalearn.config import sagemaker
from metalearn.errors import ConfigError


def _conf() -> Path:
    """The folder of our yamls: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


CONF = _conf()
NO_GROUPS = ("reproduce",)
"""Folders of `conf` that are not config groups."""

SEVERAL = ("logger",)
"""Groups of which several options can be chosen together: `logger=[tensorboard,csv]`."""

OPEN = "model.network."
"""Below this key stand the arguments of a user's own network; any name is allowed there."""

LINK = re.compile(r"(?<!\\)\$\{(\w[\w.\[\]]*)\}")
"""`${KEY}` in a value: the value of another key."""

PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""The name of a package or module."""

DEFAULT = ("maml_glyphs", "maml", "glyphs")
"""The default experiment, its algorithm and its dataset."""

PROVIDER = "command-line"
"""What Hydra calls the place of a folder that `--config-dir` has named."""

_LONGEST_FOLDER_NAME = 120

_own: list[Path] = []
"""The folder of the user's own yamls, if `search` was told one."""

Config = dict[str, Any]


def folder_name(overrides: str) -> str:
    """The name of a multirun job's folder: its overrides. A long name is cut and made unique by a digest."""
    if len(overrides) <= _LONGEST_FOLDER_NAME:
        return overrides
    return f"{overrides[: _LONGEST_FOLDER_NAME - 9]}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


def trial_folder(overrides: str, number: int, study: str | None) -> str:
    """The folder of a job of a multirun: its number where a study keeps the jobs' parameters, else its overrides."""
    return folder_name(overrides) if study is None else f"trial_{number:04d}"


def study_folder(study: str | None) -> str:
    """What follows the experiment's folder: that of the study, if there is one."""
    return "" if study is None else f"/{study}"


def run_group(experiment: str, algorithm: str, dataset: str) -> str:
    """The name of the folder that holds a run's folder: the experiment.

    It is ALGORITHM-DATASET where the default experiment runs with another algorithm or dataset than its own.
    """
    default, *own = DEFAULT
    return f"{algorithm}-{dataset}" if experiment == default and [algorithm, dataset] != own else experiment


def slurm_port(job: str | int) -> int:
    """A port for a job of Slurm, so that two jobs on one host do not meet; 0, any free one, outside of Slurm."""
    return 20_000 + int(job) % 10_000 if int(job) else 0


OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
OmegaConf.register_new_resolver("trial_folder", trial_folder, replace=True)
OmegaConf.register_new_resolver("study_folder", study_folder, replace=True)
OmegaConf.register_new_resolver("run_group", run_group, replace=True)
OmegaConf.register_new_resolver("sagemaker", sagemaker.value, replace=True)
OmegaConf.register_new_resolver("slurm_port", slurm_port, replace=True)


def quoted(value: object) -> str:
    """`value` as it must be written on the right of an override, with any signs in it escaped."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


class Composed(NamedTuple):
    """The config, the folder of its run, the name of the experiment, and the `whole` that Hydra has composed, which has
    the config with its interpolations, and Hydra's own part."""

    config: DictConfig
    run_dir: Path
    experiment: str
    whole: DictConfig


class Link(NamedTuple):
    """A key with its value, in which `${target}` stands for the value of another key."""

    key: str
    value: str
    target: str


# Composing


def search(folder: str | None) -> None:
    """From now on this process finds the options of groups in `folder`, too: what `--config-dir` names. An option of
    ours cannot be replaced.

    Raises:
        ConfigError: there is no such folder, or it has an option of ours.
    """
    _own.clear()
    if folder is None:
        return
    if not folder or not Path(folder).is_dir():
        raise ConfigError(f"--config-dir={folder}: must be a folder that holds yamls, such as algorithm/mine.yaml")
    for group, options in groups().items():
        for file in (Path(folder) / group / f"{option}.yaml" for option in options):
            if file.exists():
                raise ConfigError(f"--config-dir={folder}: {group}={file.stem} is an option of ours; rename {file}")
    _own.append(Path(folder).resolve())


def search_flags() -> list[str]:
    """The flags that have another process search where this one does."""
    return [f"--config-dir={folder}" for folder in _own]


def composed_by_hydra(overrides: Sequence[str], **options: bool) -> DictConfig:
    """What Hydra composes for these overrides from all folders that are searched; nothing is checked."""
    places = [f"hydra.searchpath=[{quoted(f'file://{folder}')}]" for folder in _own]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*overrides, *places], **options)


def compose_config(overrides: Sequence[str]) -> Composed:
    """The config for these overrides.

    Raises:
        ConfigError: a key or a choice that does not exist, a value that cannot be read, or options of which one needs a
            key that another lacks.
    """
    all_overrides = parsed(overrides)
    for override in all_overrides:
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values need a multirun; type --multirun before them")
    try:
        choices, values = sorted_out(all_overrides)
        for override in choices:
            check_choice(override)
        try:
            whole = composed_by_hydra(overrides, return_hydra_config=True)
        except HydraException:  # a key may be the cause, which our message explains better
            only_choices = [override.input_line or "" for override in choices]
            _known_keys(composed_by_hydra(only_choices, return_hydra_config=True), values)
            raise
        known = _known_keys(whole, values)
        HydraConfig.instance().set_config(whole)
        chosen = {group: str(option) for group, option in whole.hydra.runtime.choices.items() if group in groups()}
        config = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
        for key in sorted(keys_of(config) - known):
            _check_key_of_experiment(key, known, chosen["experiment"])
        _check_links(config, chosen, {override.key_or_group for override in values})
        check_plugins(config, {override.key_or_group for override in values})
        run_dir = Path(whole.hydra.run.dir)
        OmegaConf.resolve(config)
    except InterpolationKeyError as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; type ${{KEY}} with a key that exists, or a value") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise own_error(error) from error
    return Composed(config, run_dir, chosen["experiment"], whole)


def own_error(error: Exception) -> ConfigError:
    """Hydra's error as ours; that of a `${RESOLVER:…}` of ours is ours already."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__ or cause.__context__
    return cause or ConfigError(_explained(error))


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of every job of a multirun: all combinations of the listed values.

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


def compose_sweeper(overrides: Sequence[str]) -> dict[str, Any]:
    """The keys below `hydra.sweeper` that the overrides ask for.

    Raises:
        ConfigError: an override that cannot be read, or a key that the sweeper does not have.
    """
    fixed = [str(override.input_line) for override in parsed(overrides) if not override.is_sweep_override()]
    try:
        return to_container(composed_by_hydra(fixed, return_hydra_config=True).hydra.sweeper)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explained(error)) from error


def _explained(error: Exception) -> str:
    """The message of an error of Hydra's or OmegaConf's, with its cause, or the key that it is about."""
    first = str(error).splitlines()[0]
    key = getattr(error, "full_key", None)
    if key:
        return f"{key}: {first}; type {key}=VALUE"
    if isinstance(error, InterpolationResolutionError):
        return f"{first}; type a value in place of ${{…}}"
    cause = error.__cause__
    lists = "python train.py --cfg hydra lists Hydra's keys"
    return f"{first.rstrip('.')}: {str(cause).splitlines()[0]}; {lists}" if cause else str(error)


def groups() -> dict[str, list[str]]:
    """Every config group with its options."""
    names = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name not in NO_GROUPS)
    places = (CONF, *_own)
    return {name: sorted(file.stem for place in places for file in (place / name).glob("*.yaml")) for name in names}


def yaml_of(group: str, option: str) -> Path:
    """The file of an option."""
    return next(file for place in (CONF, *_own) if (file := place / group / f"{option}.yaml").exists())


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
    """The overrides that choose a group's option, and those that set a key; Hydra checks those of its own keys."""
    ours = [o for o in parsed if not o.key_or_group.startswith(("hydra.", "hydra/"))]
    known = groups()
    return [o for o in ours if o.key_or_group in known], [o for o in ours if o.key_or_group not in known]


def check_choice(override: Override) -> None:
    """Raises ConfigError for an option that its group does not have."""
    group = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"~{group}: a group cannot be removed; type {group}=NAME")
    value = override.value()
    if isinstance(value, list) and group not in SEVERAL:
        raise ConfigError(f"{override.input_line}: takes one choice; type {group}=NAME")
    for option in value if isinstance(value, list) else [value]:
        _check_option(group, str(option))


def _check_option(group: str, option: str) -> None:
    options = groups()[group]
    if option not in options:
        hint = nearest(option, options)
        raise ConfigError(f"{group}={option}: there is no such choice{hint}; allowed: {', '.join(options)}")


def check_key(key: str, known: set[str]) -> None:
    """Raises ConfigError for a key that is not known; the message names the nearest one."""
    if key in known or (key.startswith(OPEN) and OPEN.rstrip(".") in known):
        return
    known = {name for name in known if not name.endswith("._target_")}
    last = {name.rpartition(".")[2]: name for name in sorted(known)}
    name = key.rpartition(".")[2]
    tail = [name] if name in last else difflib.get_close_matches(name, last, n=1, cutoff=0.75)
    by_tail = f"; did you mean {last[tail[0]]}?" if tail else ""
    whole = nearest(key, [*sorted(known), *groups()])
    hint = by_tail if name in last else whole or by_tail
    raise ConfigError(f"{key}: there is no such key{hint} (python train.py --help lists all)")


def _check_key_of_experiment(key: str, known: set[str], experiment: str) -> None:
    """As `check_key`, for a key that the experiment sets."""
    try:
        check_key(key, known)
    except ConfigError as error:
        group = key.partition(".")[0]
        raise ConfigError(
            f"{error}. experiment={experiment} sets it, so it does not go with this {group}; type another "
            f"experiment, one of {', '.join(groups()['experiment'])}"
        ) from error


def _check_links(config: DictConfig, chosen: Mapping[str, str], typed: set[str]) -> None:
    """Checks that the key in every `${KEY}` of a config exists.

    Args:
        config: not resolved yet.
        chosen: the option of every group.
        typed: the keys that overrides set.

    Raises:
        ConfigError: a key does not exist; the message names the options that need it.
    """
    missing = [link for link in _links_of(config) if not _exists(config, link.target)]
    if not missing:
        return
    first = missing[0]
    group, _, name = first.target.partition(".")
    if first.key in typed or group not in chosen:
        hint = nearest(first.target, sorted(keys_of(config)))
        raise ConfigError(f"{first.key}={first.value}: there is no key {first.target}{hint}")
    needs = {_origin(link, chosen): link for link in reversed(missing) if link.target == first.target}
    names = " and ".join(f"{by}={chosen[by]} ({link.key}={link.value})" for by, link in sorted(needs.items()))
    advice = ", and ".join(_another(by, config) for by in sorted(needs))
    raise ConfigError(
        f"{group}={chosen[group]} has no key {name}, which {names} need{'s' * (len(needs) == 1)}: these options do not "
        f"fit together; type {advice}, or another {group}"
    )


def check_plugins(config: DictConfig, typed: Collection[str]) -> None:
    """Raises ConfigError where a yaml admits packages, or where what was typed is no list of packages."""
    names = config.plugins
    if not isinstance(names, ListConfig) or not all(PACKAGE.fullmatch(str(name)) for name in names):
        raise ConfigError(f"plugins={names}: must be a list of packages; type 'plugins=[my_package]'")
    if names and "plugins" not in typed:
        raise ConfigError(
            f"plugins={names}: a yaml names packages, and only the command line may; type 'plugins=[{','.join(names)}]'"
        )


def _links_of(config: DictConfig) -> list[Link]:
    values = leaves(to_container(config, resolve=False))
    return [Link(key, str(value), target) for key, value in values for target in LINK.findall(str(value))]


def _links_in(group: str, option: str) -> list[Link]:
    """The links in an option's own file."""
    config = OmegaConf.load(yaml_of(group, option))
    assert isinstance(config, DictConfig)
    return _links_of(config)


def _exists(config: DictConfig, key: str) -> bool:
    if key in keys_of(config):
        return True
    absent = object()
    try:
        return OmegaConf.select(config, key, default=absent) is not absent  # an item of a list, or behind another link
    except OmegaConfBaseException:
        return True  # it is a link itself, and checked as such


def _origin(link: Link, chosen: Mapping[str, str]) -> str:
    """The group whose option has set a link: the one of its key, or `experiment`."""
    group, _, name = link.key.partition(".")
    by_option = group in chosen and link._replace(key=name) in _links_in(group, chosen[group])
    return group if by_option else "experiment"


def _another(group: str, config: DictConfig) -> str:
    """Advice to choose another option of a group; the example has no link to a missing key."""
    for option in groups()[group] if group != "experiment" else ():
        if all(_exists(config, link.target) for link in _links_in(group, option)):
            return f"another {group}, such as {group}={option}"
    return f"another {group}"


def nearest(name: str, names: Sequence[str]) -> str:
    """The question whether the nearest of the names was meant; empty where none is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _known_keys(whole: DictConfig, values: Sequence[Override]) -> set[str]:
    """The keys that exist with the options that `whole` has chosen.

    Raises:
        ConfigError: an override of another key.
    """
    known = keys_of(_without_experiment(whole.hydra.runtime.choices))
    for override in values:
        check_key(override.key_or_group, known)
    return known


def _without_experiment(chosen: DictConfig) -> DictConfig:
    """The chosen options as their own files have them, without the experiment: the keys that exist. Of a group with
    several options at once, which Hydra does not list, those of all its options."""
    known = groups()
    plain = [f"{group}={option}" for group, option in chosen.items() if group in known and option is not None]
    config = composed_by_hydra([*(p for p in plain if not p.startswith("experiment=")), "~experiment"])
    OmegaConf.set_struct(config, False)
    for group in known.keys() - chosen.keys():
        for option in known[group]:
            config.merge_with({group: OmegaConf.load(yaml_of(group, option))})
    return config


def keys_of(node: DictConfig, prefix: str = "") -> set[str]:
    """The dotted path of every node."""
    keys = set()
    for name in map(str, node):
        keys.add(f"{prefix}{name}")
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            keys |= keys_of(child, f"{prefix}{name}.")
    return keys


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
        raise own_error(error) from error
    return copy


def to_container(config: DictConfig, *, resolve: bool = True) -> Config:
    """The config as plain dicts, with every interpolation replaced by its value if `resolve`."""
    container = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(old value, new value) of every leaf that differs between two configs, by its dotted key."""
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
