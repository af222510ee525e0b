"""Pruning: reads the metrics that trials write, asks the pruner, and asks a trial to stop by a file in its folder."""

import json
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna

from hydra_async_sweeper.study import Study

STOP_FILE = "stop"
"""A run that finds this file in its folder saves, and stops as pruned. Remove it, and the same command resumes."""


class PruningWatch:
    """Looks at the trials under way.

    Args:
        study: gets the values that the trials report.
        pruner: decides.
        folder_of: from a trial's number to its folder.
        metric: a field of the validation lines in metrics.jsonl, such as `accuracy`.
        progress: is told each new value: number, step, value.
    """

    def __init__(
        self,
        study: Study,
        pruner: optuna.pruners.BasePruner | None,
        folder_of: Callable[[int], Path],
        metric: str,
        progress: Callable[[int, int, float], None],
    ) -> None:
        self._study, self._pruner, self._folder_of = study, pruner, folder_of
        self._metric, self._progress = metric, progress
        self._read: dict[int, tuple[int, int]] = {}  # a trial's file, by its inode, and how far it was read

    def start(self, number: int) -> None:
        """A trial is about to start: it must not find the request to stop of an earlier controller."""
        with suppress(FileNotFoundError, NotADirectoryError):
            (self._folder_of(number) / STOP_FILE).unlink()
        self._read[number] = (0, 0)

    def look(self, running: Collection[int]) -> None:
        """Gives the study what is new, and stops the trials that the pruner would stop."""
        for number in running:
            folder = self._folder_of(number)
            for step, value in self._new_values(number, folder):
                self._progress(number, step, value)
                if self._pruner is None:
                    continue
                self._study.report(number, step, value)
                if self._study.should_prune(number, self._pruner):
                    (folder / STOP_FILE).touch()

    def _new_values(self, number: int, folder: Path) -> list[tuple[int, float]]:
        """The validations that have been written whole since the last look; all, where a resumed trial has put another
        file in its place."""
        inode, at = self._read[number]
        try:
            with (folder / "metrics.jsonl").open("rb") as file:
                found = os.fstat(file.fileno())
                at = at if found.st_ino == inode and found.st_size >= at else 0
                file.seek(at)
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read[number] = (found.st_ino, at + len(whole))
        return [row for line in whole.splitlines() if (row := _validation(line, self._metric))]


def _validation(line: bytes, metric: str) -> tuple[int, float] | None:
    """The step and the value of a validation; None for another line, which may be of another program."""
    try:
        row: dict[str, Any] = json.loads(line)
        return (int(row["step"]), float(row[metric])) if row["split"] == "val" else None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
