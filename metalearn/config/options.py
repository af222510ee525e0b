"""The yamls: where they lie, the config groups, the options that each group has, and what their comments explain.

A group is a folder with a yaml for each option, `conf/model/conv4.yaml`; or, where options are short, a table of them:
`conf/loss.yaml`, or several tables, `conf/experiment.omniglot.yaml`. In a table, below an option's name stands what a
yaml of its own would hold.
"""

import difflib
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from metalearn.config.values import keys_of
from metalearn.errors import ConfigError, nearest, typed_program

_PACKAGE = Path(__file__).resolve().parents[1]
# The folder of our yamls: inside the package where it is installed, beside it in a checkout
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
own_folders: list[Path] = []  # the folder of the user's own yamls, if `search` got one


def search(folder: str | None) -> None:
    """From now on this process finds the options of groups in `folder`, too: what `--config-dir` names. An option of
    ours cannot be replaced. Raises ConfigError if there is no such folder, or it has an option of ours."""
    own_folders.clear()
    if folder is None:
        return
    if not folder or not Path(folder).is_dir():
        raise ConfigError(f"--config-dir={folder}: must be a folder that holds yamls, such as algorithm/mine.yaml")
    for group, options in groups().items():
        for file in (Path(folder) / group / f"{option}.yaml" for option in options):
            if file.exists():
                raise ConfigError(f"--config-dir={folder}: {group}={file.stem} is an option of ours; rename {file}")
    own_folders.append(Path(folder).resolve())


def search_flags() -> list[str]:
    """The flags with which another process searches the same folders."""
    return [f"--config-dir={folder}" for folder in own_folders]


def groups() -> dict[str, list[str]]:
    """Every config group with its options."""
    folders = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {"reproduce"}  # which is no group
    names = sorted(folders | tables(CONF).keys())
    added = {name: [file.stem for place in own_folders for file in (place / name).glob("*.yaml")] for name in names}
    return {name: sorted([*shipped_names(name), *added[name]]) for name in names}


@cache
def tables(conf: Path) -> dict[str, dict[str, str]]:
    """The options in the tables of a folder: for each group, the yaml of each option by its name."""
    yamls: dict[str, dict[str, str]] = {}
    for file in sorted(conf.glob("*.yaml")):
        group = file.name.partition(".")[0]
        head, *parts = re.split(r"^(\w+):\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        directives = "".join(line for line in head.splitlines(keepends=True) if line.startswith("# @"))
        for name, body in zip(parts[::2], parts[1::2], strict=True) if group != "config" else ():
            yamls.setdefault(group, {})[name] = directives + textwrap.dedent(body)
    return yamls


def shipped_names(group: str) -> list[str]:
    """The options of a group, but for those of the user's own folder."""
    return sorted([*tables(CONF).get(group, ()), *(file.stem for file in (CONF / group).glob("*.yaml"))])


@cache
def shipped(group: str) -> dict[str, DictConfig]:
    """What the yamls of these options hold."""
    return {name: keys_in(group, name) for name in shipped_names(group)}


def text_of(group: str, option: str) -> str:
    """The yaml of an option."""
    if option in tables(CONF).get(group, {}):
        return tables(CONF)[group][option]
    files = (place / group / f"{option}.yaml" for place in (CONF, *own_folders))
    return next(file for file in files if file.exists()).read_text(encoding="utf-8")


@cache
def common() -> DictConfig:
    """What all runs have in common: config.yaml, but for Hydra's part and the defaults. A copy is the caller's work."""
    config = _from_yaml((CONF / "config.yaml").read_text(encoding="utf-8"))
    return OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "defaults")])


def keys_in(group: str, option: str) -> DictConfig:
    """What the yaml of an option holds."""
    return _from_yaml(text_of(group, option))


def all_keys_in(group: str, option: str) -> frozenset[str]:
    """The keys of an option, and of those that its own defaults name beside it."""
    keys, others = _keys_of_text(text_of(group, option), f"{group}.")
    return keys.union(*(all_keys_in(group, name) for name in others))


@cache
def _keys_of_text(text: str, prefix: str) -> tuple[frozenset[str], tuple[str, ...]]:
    config = _from_yaml(text)
    others = [name for name in config.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    return frozenset(keys_of(config, prefix)), tuple(others)


def _from_yaml(text: str) -> DictConfig:
    config = OmegaConf.create(text)
    assert isinstance(config, DictConfig)
    return config


def check_option(group: str, option: str) -> None:
    """Raises ConfigError for an option that its group does not have; the message names the nearest one."""
    options = groups()[group]
    if option not in options:
        hint = nearest(option, options)
        raise ConfigError(f"{group}={option}: there is no such choice{hint}; allowed: {', '.join(options)}")


def choice_hint(word: str) -> str:
    """A hint that asks for the choice that a bare word may stand for, in any letters; empty if there is none."""
    choices = {f"{group}={option}": option.lower() for group, options in groups().items() for option in options}
    if same := [choice for choice, option in choices.items() if option == word.lower()]:
        return f"; did you mean {' or '.join(same)}?"
    by_option = {option: choice for choice, option in choices.items()}
    close = difflib.get_close_matches(word.lower(), by_option, n=1, cutoff=0.75)
    return f"; did you mean {by_option[close[0]]}?" if close else ""


class TableSource(ConfigSource):
    """Hydra's way to the options in the tables of `conf/`, each as if it had a yaml in the folder of its group.
    ConfigStore would do the same, but it wants all options parsed at the start of every process (0.2 s). A source
    parses those that are chosen."""

    @staticmethod
    def scheme() -> str:
        return "tables"

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        text = text_of(group, name)
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(text), self._get_header_dict(text))

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in {"", *tables(CONF)}

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return name in tables(CONF).get(group, {})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        if group:
            return [] if results_filter is ObjectType.GROUP else sorted(tables(CONF).get(group, {}))
        return [] if results_filter is ObjectType.CONFIG else sorted(tables(CONF))


Plugins.instance().register(TableSource)


# A config without Hydra and without a command line: options of groups by their names, and settings of their keys


class Named(NamedTuple):
    """An option of a config group, such as `maml` of `algorithm`, and settings of its keys."""

    name: str
    settings: Mapping[str, Any]


def named(name: str, /, **settings: Any) -> Named:
    """An option of a config group by its name. Keys that are not in `settings` have the values of `conf/`."""
    return Named(name, settings)


def as_named(part: str | Named) -> Named:
    """The option of a name, with the settings of `conf/`, or with those that it has."""
    return part if isinstance(part, Named) else Named(part, {})


def plain_config(parts: Mapping[str, Named | Mapping[str, Any]], keys: Mapping[str, Any]) -> DictConfig:
    """The config that has these parts, and the default options of all other groups. A part is an option of its group,
    or keys that other groups take values from; `keys` belong to no group. Raises ConfigError for an unknown option."""
    config = _from_yaml((CONF / "config.yaml").read_text(encoding="utf-8"))
    del config["hydra"]
    for entry in config.pop("defaults"):
        group, option = next(iter(entry.items())) if isinstance(entry, DictConfig) else (entry, "")
        if group in groups() and group not in ("experiment", "sweep"):  # whose options change other groups
            part = parts.get(group, Named(str(option), {}))
            layers: list[Any] = [config.get(group, {}), part]
            if isinstance(part, Named):
                check_option(group, part.name)
                layers[1:] = keys_in(group, part.name), _without_arrays(part.settings)
            config[group] = OmegaConf.merge(*layers)
    return OmegaConf.merge(config, _without_arrays(keys))  # type: ignore[return-value]


def _without_arrays(value: Any) -> Any:
    """The value, with plain numbers and lists in place of numpy's and torch's, which a config cannot hold."""
    if isinstance(value, Mapping):
        return {name: _without_arrays(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value


# What `metalearn help` prints, from the comments of the yamls; the site has it too


class Key(NamedTuple):
    """A key of the config, with its default and what it means."""

    name: str
    default: str
    meaning: str


MOST_USED = (
    "run", "seed", "workers", "device", "resume", "pause_after", "trainer.steps", "trainer.val_every",
    "trainer.meta_batch_size", "optimizer.lr", "algorithm.inner_lr", "algorithm.inner_steps", "dataset.ways",
    "dataset.shots", "launch.outputs",
)  # fmt: skip
"""The keys that `metalearn train --help` explains."""


def short_help() -> str:
    """What `metalearn train --help` prints: how to type it, the groups with their options, and the most used keys."""
    program, explain = typed_program(), typed_program("help")
    lines = [
        f"usage: {program} [GROUP=OPTION …] [KEY=VALUE …]\n",
        "Trains meta-learners. Everything is chosen by config.\n",
        f"  {program} experiment=maml_glyphs            MAML on drawn characters, the default: about a minute",
        f"  {program} experiment=maml_omniglot workers=2",
        f"  {program} --multirun algorithm.inner_lr=0.1,0.4",
        f"  torchrun --nproc_per_node=2 {'train.py' if program == 'python train.py' else '-m metalearn train'}"
        " experiment=maml_omniglot\n",
        "Groups and their options:",
    ]
    for group, options in groups().items():
        lines += textwrap.wrap(", ".join(options), 118, initial_indent=f"  {group:12}", subsequent_indent=" " * 14)
    of_defaults = {PROGRAM, "trainer=default", "optimizer=adam", "algorithm=maml", "dataset=glyphs", "launch=default"}
    keys = {key.name: key.meaning for owner, several in owners() if owner in of_defaults for key in several}
    lines.append("\nThe most used keys:")
    lines += [f"  {name:24} {textwrap.shorten(keys[name], 92, placeholder=' …')}" for name in MOST_USED]
    lines += [
        f"\n{explain + ' algorithm':40} a group: its options and their keys",
        f"{explain + ' trainer.steps':40} a key, or all keys that begin so",
        f"{explain + ' train':40} all groups, options and keys",
        f"{program + ' --hydra-help':40} Hydra's own flags: --multirun, --cfg job, …",
    ]
    return "\n".join(lines)


def help_text() -> str:
    """What `metalearn help train` prints: all groups with their options, then all keys."""
    lines = ["Groups and their options:"]
    for group, options in groups().items():
        lines += [f"  {group}"]
        lines += [f"    {option:22} {summary(text_of(group, option))}" for option in options]
    for owner, keys in owners():
        lines += [f"Keys of {owner}:", *map(_line, keys)]
    return "\n".join(lines)


def topic_text(topic: str, others: Collection[str] = ()) -> str:
    """What the yamls say of a group (`algorithm`), an option (`algorithm=maml`), a key (`trainer.steps`) or the keys
    below a name (`launch`). `others` are further topics, for the advice. Raises ConfigError if there is nothing of this
    name; the message names the nearest."""
    group, _, option = topic.partition("=")
    options = groups().get(group, [])
    all_keys = [*owners()]
    keys = [key for _, several in all_keys for key in several if f"{key.name}.".startswith(f"{topic}.")]
    if (option and option not in options) or not (options or keys):
        topics = {*groups(), *(key.name for _, several in all_keys for key in several), *others}
        topics |= {f"{group}={name}" for name in options}
        hint = choice_hint(topic) or nearest(topic, sorted(topics))
        raise ConfigError(f"help {topic}: is no command, group, option or key{hint}; type {typed_program('help')}")
    if not options:
        return "\n".join(dict.fromkeys(_line(key) for key in keys))
    shown = [option] if option else options
    lines = [f"{group}={name:22} {summary(text_of(group, name))}" for name in shown]
    for owner, several in all_keys:
        if owner in {f"{group}={name}" for name in shown}:
            lines += ["", f"Keys of {owner}:", *map(_line, several)]
    if not option:  # keys of config.yaml that all options share
        lines += [_line(key) for key in all_keys[0][1] if key.name.startswith(f"{group}.")]
    return "\n".join(lines)


PROGRAM = "the program"


def owners() -> Iterator[tuple[str, list[Key]]]:
    """The program's own keys, then those of every option that has keys."""
    yield PROGRAM, _keys((CONF / "config.yaml").read_text(encoding="utf-8"), "")
    for group, options in groups().items():
        for option in options if group != "experiment" else ():
            if keys := _keys(text_of(group, option), f"{group}."):
                yield f"{group}={option}", keys


def _line(key: Key) -> str:
    return f"  {key.name + '=' + key.default:52} {key.meaning}"


def summary(text: str) -> str:
    """The first comment of a yaml that is not a directive to Hydra."""
    comments = (line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def _keys(text: str, prefix: str) -> list[Key]:
    """The lines of a yaml that have a comment behind them."""
    keys, section = [], ""
    for line in text.splitlines():
        setting, _, meaning = line.partition("  # ")
        key, _, value = setting.partition(":")
        if line and not line.startswith((" ", "#")):
            section = "" if meaning else f"{key}."
        if meaning and key.strip():
            name = f"{prefix}{section}{key.strip()}" if line.startswith(" ") else f"{prefix}{key}"
            keys.append(Key(name, value.strip(), meaning))
    return keys
