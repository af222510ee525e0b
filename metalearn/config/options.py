"""The yamls: where they lie, the config groups, and the options that each group has."""

import difflib
from pathlib import Path

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
    names = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name not in NO_GROUPS)
    places = (CONF, *_own)
    return {name: sorted(file.stem for place in places for file in (place / name).glob("*.yaml")) for name in names}


def choice_hint(word: str) -> str:
    """A hint that asks for the choice that a bare word may stand for, in any letters; empty if there is none."""
    choices = {f"{group}={option}": option.lower() for group, options in groups().items() for option in options}
    found = [choice for choice, option in choices.items() if option == word.lower()]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    by_option = {option: choice for choice, option in choices.items()}
    close = difflib.get_close_matches(word.lower(), by_option, n=1, cutoff=0.75)
    return f"; did you mean {by_option[close[0]]}?" if close else ""


def yaml_of(group: str, option: str) -> Path:
    """The file of an option."""
    return next(file for place in (CONF, *_own) if (file := place / group / f"{option}.yaml").exists())
