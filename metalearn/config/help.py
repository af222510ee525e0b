"""What `metalearn train --help` and `metalearn help` print, from the comments of the yamls; the site has it too."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from metalearn.config.options import CONF, choice_hint, groups, text_of
from metalearn.errors import ConfigError, nearest


class Key(NamedTuple):
    """A key of the config, with its default and what it means."""

    name: str
    default: str
    meaning: str


def help_text() -> str:
    """The help: a summary of the program, then its groups with their options, then its keys."""
    lines = [
        "Trains meta-learners. Everything is chosen by config: GROUP=OPTION and KEY=VALUE.",
        "",
        "  python train.py                                  MAML on drawn characters, about a minute",
        "  python train.py workers=2 experiment=maml_omniglot",
        "  torchrun --nproc_per_node=2 train.py experiment=maml_omniglot trainer.steps=2000",
        "  python train.py --multirun algorithm.inner_lr=0.1,0.4",
        "",
        "Where the package is installed, type metalearn, or torchrun … -m metalearn.",
        "",
        "Groups and their options:",
    ]
    for group, options in groups().items():
        lines += [f"  {group}"]
        lines += [f"    {option:22} {summary(text_of(group, option))}" for option in options]
    for owner, keys in owners():
        lines += [f"Keys of {owner}:", *map(_line, keys)]
    lines += ["", "Hydra's own flags (--multirun, --cfg job, …): python train.py --hydra-help"]
    return "\n".join(lines)


def topic_text(topic: str, others: Collection[str] = ()) -> str:
    """What the yamls say of a group (`algorithm`), an option (`algorithm=maml`), a key (`trainer.steps`) or the keys
    below a name (`launch`). `others` are further topics, for the advice.

    Raises:
        ConfigError: there is nothing of this name; the message names the nearest.
    """
    group, _, option = topic.partition("=")
    options = groups().get(group, [])
    all_keys = [*owners()]
    keys = [key for _, own in all_keys for key in own if key.name == topic or key.name.startswith(f"{topic}.")]
    if (option and option not in options) or not (options or keys):
        known = {*groups(), *(key.name for _, own in all_keys for key in own), *others}
        known |= {f"{group}={name}" for name in options}
        hint = choice_hint(topic) or nearest(topic, sorted(known))
        raise ConfigError(f"help {topic}: is no command, group, option or key{hint}; type metalearn help")
    if not options:
        return "\n".join(dict.fromkeys(_line(key) for key in keys))
    shown = [option] if option else options
    lines = [f"{group}={name:22} {summary(text_of(group, name))}" for name in shown]
    for owner, own in all_keys:
        if owner in {f"{group}={name}" for name in shown}:
            lines += ["", f"Keys of {owner}:", *map(_line, own)]
    lines += [_line(key) for _, own in all_keys[:1] for key in own if key.name.startswith(f"{group}.") and not option]
    return "\n".join(lines)


PROGRAM = "the program"


def owners() -> Iterator[tuple[str, list[Key]]]:
    """The program's own keys, then those of every option that has keys."""
    yield PROGRAM, _keys((CONF / "config.yaml").read_text(encoding="utf-8"), "")
    for group, options in groups().items():
        for option in options if group != "experiment" else ():
            keys = _keys(text_of(group, option), f"{group}.")
            if keys:
                yield f"{group}={option}", keys


def _line(key: Key) -> str:
    return f"  {key.name + '=' + key.default:52} {key.meaning}"


def summary(text: str) -> str:
    """The first comment of a yaml that is not a directive to Hydra."""
    comments = (line[1:].strip() for line in text.splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def _keys(text: str, prefix: str) -> list[Key]:
    """The lines of a yaml that have a comment behind them."""
    keys = []
    section = ""
    for line in text.splitlines():
        setting, _, meaning = line.partition("  # ")
        key, _, value = setting.partition(":")
        if line and not line.startswith((" ", "#")):
            section = "" if meaning else f"{key}."
        if meaning and key.strip():
            name = f"{prefix}{section}{key.strip()}" if line.startswith(" ") else f"{prefix}{key}"
            keys.append(Key(name, value.strip(), meaning))
    return keys
