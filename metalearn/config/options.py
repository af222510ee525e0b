"""The yamls: where they lie, the config groups, and the options that each group has.

A group is a folder with a yaml for each option, `conf/model/conv4.yaml`; or, where options are short, a table of them:
`conf/loss.yaml`, or several tables, `conf/experiment.omniglot.yaml`. In a table, below an option's name stands what a
yaml of its own would hold.
"""

import difflib
import re
import textwrap
from functools import cache
from pathlib import Path

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from metalearn.errors import ConfigError, nearest

_PACKAGE = Path(__file__).resolve().parents[1]

CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
"""The folder of our yamls: inside the package where it is installed, beside it in a checkout."""

NO_GROUPS = ("reproduce",)
"""Folders of `conf` that are not config groups."""

SOURCE = "tables://conf"
"""The name that `hydra.searchpath` in `conf/config.yaml` has for the tables; see `TableSource`."""

SEVERAL = ("logger",)
"""Groups that take several options together: `logger=[tensorboard,csv]`."""

_own: list[Path] = []
"""The folder of the user's own yamls, if `search` got one."""


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
    """The flags with which another process searches the same folders."""
    return [f"--config-dir={folder}" for folder in _own]


def own_folders() -> list[Path]:
    """The folders, besides ours, that this process searches for options."""
    return list(_own)


def groups() -> dict[str, list[str]]:
    """Every config group with its options."""
    folders = {folder.name for folder in CONF.iterdir() if folder.is_dir()} - {*NO_GROUPS}
    names = sorted(folders | tables(CONF).keys())
    files = {name: [file.stem for place in (CONF, *_own) for file in (place / name).glob("*.yaml")] for name in names}
    return {name: sorted([*tables(CONF).get(name, ()), *files[name]]) for name in names}


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
    table = tables(CONF).get(group, {})
    if option in table:
        return table[option]
    file = next(file for place in (CONF, *_own) if (file := place / group / f"{option}.yaml").exists())
    return file.read_text(encoding="utf-8")


@cache
def common() -> DictConfig:
    """What all runs have in common: config.yaml, but for Hydra's part and the defaults. A copy is the caller's work."""
    config = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(config, DictConfig)
    return OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "defaults")])


def keys_in(group: str, option: str) -> DictConfig:
    """What the yaml of an option holds."""
    return from_yaml(text_of(group, option))


def from_yaml(text: str) -> DictConfig:
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
    found = [choice for choice, option in choices.items() if option == word.lower()]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    by_option = {option: choice for choice, option in choices.items()}
    close = difflib.get_close_matches(word.lower(), by_option, n=1, cutoff=0.75)
    return f"; did you mean {by_option[close[0]]}?" if close else ""


class TableSource(ConfigSource):
    """Hydra's way to the options in the tables of `conf/`, each as if it had a yaml in the folder of its group.

    ConfigStore would do the same, but it wants all options parsed at the start of every process (0.2 s). A source
    parses those that are chosen.
    """

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
