"""metrics.jsonl: a line for each logged step, and for each validation and test. Every run has it."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metalearn.reporting.loggers.protocol import Values, Window
from metalearn.runs.metrics import jsonable
from metalearn.storage.files import logged_lines, write_atomically, writing

METRICS = "metrics.jsonl"
"""The file of a run folder."""

Row = dict[str, Any]

log = logging.getLogger("metalearn")


def rows_of(run_dir: Path) -> Iterator[Row]:
    """The complete lines of metrics.jsonl: a running program may be writing the last one.

    Raises:
        FileNotFoundError: the folder holds no run.
        ValueError: a line is no JSON.
    """
    path = run_dir / METRICS
    if not path.exists():
        raise FileNotFoundError(f"{run_dir}: holds no {METRICS}; type the folder of a run that has begun")
    with path.open(encoding="utf-8") as file:
        try:
            yield from (json.loads(line) for line in file if line.endswith("\n"))
        except ValueError as error:
            raise ValueError(f"{path}: has a line that is no JSON ({error})") from error


class Lines:
    """The file of a run that logs. If a run continues, the lines of what it will do again are removed."""

    def __init__(self, folder: Path, window: Window) -> None:
        self._path = folder / METRICS
        kept = []
        for line in logged_lines(self._path):
            try:
                row = json.loads(line)
                if window.keeps(row["split"], row["step"]):
                    kept.append(line.decode())
            except (ValueError, KeyError, TypeError):
                continue  # it is damaged, which the digest shows
        self._digest = hashlib.sha256("".join(kept).encode())
        if window.digest not in (None, self.digest()):
            log.warning("%s: its lines up to step %d are not those that this run has written", self._path, window.done)
        write_atomically(self._path, "".join(kept))
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, split: str, values: Values) -> None:
        line = json.dumps(jsonable({"step": step, "split": split, **values})) + "\n"
        with writing(self._path):
            self._file.write(line)
            self._file.flush()
        self._digest.update(line.encode())

    def digest(self) -> str:
        """The SHA-256 of all lines so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        with writing(self._path), self._file:
            os.fsync(self._file.fileno())
