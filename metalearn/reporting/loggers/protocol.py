"""The interface of every logger, and the data that it gets."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml  # type: ignore[import-untyped]
from numpy.typing import NDArray

from metalearn.config.values import Config, leaves
from metalearn.errors import RunError
from metalearn.storage.files import read_json, write_atomically

Values = dict[str, float]

Sums = dict[str, tuple[float, int]]
"""For each figure, its sum over some steps and the number of steps."""

Picture = NDArray[np.uint8]
"""Red, green and blue: [height, width, 3]."""

log = logging.getLogger("metalearn")


class Window(NamedTuple):
    """The steps to log: the last one that is `done`, the last one that is `validated`, their number, and the tasks (or
    samples: `unit`) of each. `pending` has the sums over steps that are done, but not in a line yet. `digest` is the
    digest of metrics.jsonl after the steps done, or None. Each `val_every` steps `val_tasks` are validated, and
    `test_tasks` at the end."""

    done: int
    validated: int
    steps: int
    meta_batch_size: int
    unit: str = "tasks"
    pending: Mapping[str, tuple[float, int]] = MappingProxyType({})
    digest: str | None = None
    val_every: int = 1
    val_tasks: int = 0
    test_tasks: int = 0

    def keeps(self, split: str, step: int) -> bool:
        """Whether a point of an earlier session stays, since this run will not compute it again."""
        return 0 < step <= {"train": self.done, "val": self.validated, "test": 0}[split]


class Logger(NamedTuple):
    """`start` gets the config and a few episodes as pictures by name; `scalars` the values of a step of a split;
    `result` the config and the final figures; `close` ends it."""

    start: Callable[[Config, Mapping[str, Picture]], None]
    scalars: Callable[[int, str, Values], None]
    result: Callable[[Config, Values], None]
    close: Callable[[], None]


OpenLogger = Callable[[Path, Window], Logger]


def flat(config: Config) -> dict[str, bool | int | float | str]:
    """The config by dotted keys, with plain values only: lists and None as text."""
    return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in leaves(config)}


def as_yaml(config: Config) -> str:
    """The config as text, in its own order."""
    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def run_name(folder: Path) -> str:
    """The name of a run elsewhere: its experiment and its name."""
    return f"{folder.parent.name}/{folder.name}"


class Sent:
    """A file in the run folder that notes the points sent to another program, which cannot take a point back.

    A run that goes on makes the steps after its checkpoint again, with the same values. They are not sent twice.
    `id` is the run's name in that program; None: it has nothing of this run yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = read_json(path)
        self.id: str | None = content.get("id")
        self._steps: dict[str, int] = content.get("steps", {})

    def keep(self, new_id: str) -> None:
        """Notes the run's name in the other program."""
        self.id = new_id
        self._save()

    def claim(self, split: str, step: int) -> bool:
        """Whether a point has not been sent yet; from now on it counts as sent."""
        if step <= self._steps.get(split, 0):
            return False
        self._steps[split] = step
        self._save()
        return True

    def _save(self) -> None:
        write_atomically(self._path, json.dumps({"id": self.id, "steps": self._steps}) + "\n")


def opened(name: str, open_it: Callable[[], Any]) -> Logger:
    """A logger that sends to another program. A failure after the start does not end the run: it is reported once, and
    the logger gets nothing more.

    Args:
        name: of its key in the group logger.
        open_it: gives an object with the methods of `Logger`.

    Raises:
        RunError: it cannot be opened.
    """
    try:
        logger = open_it()
    except Exception as error:  # of the other program's code: any type
        raise RunError(
            f"logger.{name}: cannot be opened: {error}; type logger.{name}=false to go on without"
        ) from error
    failed = False

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            nonlocal failed
            if not failed:
                try:
                    call(*arguments)
                except Exception as error:  # of the other program's code: any type
                    failed = True
                    log.warning("logger.%s: has failed and gets nothing more: %s", name, error)
                    log.debug("where logger.%s failed:", name, exc_info=True)  # for train.log

        return run

    return Logger(guarded(logger.start), guarded(logger.scalars), guarded(logger.result), guarded(logger.close))
