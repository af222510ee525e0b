"""What a sweep is asked for: by the task function, and by the overrides of the command line."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import TaskFunction

from hydra_async_sweeper.space import Space, as_overrides, dimension_of


class TaskTraits(NamedTuple):
    """What a task function says of itself, by attributes of these names; all may be absent.

    `objective` is the field of the returned mapping that is searched for by default; `maximized` the names of fields of
    which more is better, beside accuracies; `preload` the modules that its trials need; `free_keys` the keys that may
    differ when a sweep resumes; `program` the command that runs it; `groups_of_sweeps` the config groups that say
    nothing about a single run; and `best_run` the overrides that the command of the best configuration has, too.
    `segment(round, rounds, parent, keys)` gives the overrides of a trial that trains one of several rounds: from the
    checkpoint in the folder `parent`, if it is not None, with other values of `keys`.
    """

    objective: str | None
    maximized: Sequence[str]
    preload: Sequence[str]
    free_keys: Sequence[str]
    program: str
    groups_of_sweeps: Sequence[str]
    best_run: Sequence[str]
    segment: Callable[[int, int, Path | None, Sequence[str]], list[str]] | None

    @classmethod
    def of(cls, function: TaskFunction | None) -> "TaskTraits":
        get = partial(getattr, function)
        return cls(
            get("objective", None), get("maximized", ()), get("preload", ()), get("free_keys", ()),
            get("program", sys.argv[0]), get("groups_of_sweeps", ()), get("best_run", ()), get("segment", None),
        )  # fmt: skip


class SweepPlan(NamedTuple):
    """The space, and the overrides of a trial: the fixed ones as they are, and the key where a parameter stands; and
    those of the command line."""

    space: Space
    template: list[tuple[str, bool]]
    arguments: list[str]

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """A trial's overrides, in the order of the command line."""
        chosen = dict(zip(params, as_overrides(params), strict=True))
        return [chosen[text] if searched else text for text, searched in self.template]


def plan_of(arguments: Sequence[str], params: Mapping[str, Any], options: Callable[[str], Sequence[str]]) -> SweepPlan:
    """What the overrides on the command line, and those of `hydra.sweeper.params`, ask for.

    Args:
        arguments: overrides of the command line; they come before `params` of the same key.
        params: key → value or sweep, as text.
        options: from the name of a config group to its options.

    Raises:
        SpaceError: a sweep that describes no space.
    """
    parser = OverridesParser.create()
    given = parser.parse_overrides(list(arguments))
    own = {override.get_key_element() for override in given}
    more = parser.parse_overrides([f"{key}={value}" for key, value in params.items() if key not in own])
    space: Space = {}
    template: list[tuple[str, bool]] = []
    for override in (*more, *given):
        key = override.get_key_element()
        if override.is_sweep_override():
            space[key] = dimension_of(override, options)
            template.append((key, True))
        else:
            template.append((str(override.input_line), False))
    return SweepPlan(space, template, list(arguments))
