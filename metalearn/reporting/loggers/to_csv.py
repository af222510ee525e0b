"""metrics.csv: the figures of metrics.jsonl as a table, for a spreadsheet."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metalearn.config.values import Config
from metalearn.errors import RunError
from metalearn.reporting.loggers.protocol import Logger, Picture, Values, Window
from metalearn.storage.files import logged_lines, write_atomically, writing

TABLE = "metrics.csv"

Row = dict[str, Any]


def csv_logger(folder: Path, window: Window) -> Logger:
    """A row for each logged step. A new figure adds a column. If the run goes on, the rows of what it will do again
    are removed.

    Raises:
        RunError: it cannot be written.
    """
    table = _Table(folder / TABLE, window)
    return Logger(_nothing, table.scalars, _nothing, table.close)


def _nothing(config: Config, more: Mapping[str, Picture] | Values) -> None:
    """The config is in the run folder already."""


class _Table:
    def __init__(self, path: Path, window: Window) -> None:
        self._path = path
        self._columns = ["step", "split"]
        rows = [row for row in _rows_of(path) if _stands(row, window)]
        self._rewrite(rows, [name for row in rows for name in row])

    def scalars(self, step: int, split: str, values: Values) -> None:
        row = {"step": step, "split": split, **values}
        if not row.keys() <= set(self._columns):
            self._file.close()
            self._rewrite(_rows_of(self._path), row)
        with writing(self._path):
            csv.DictWriter(self._file, self._columns, restval="").writerow(row)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: Sequence[Row], names: Any) -> None:
        """Writes the table with a column for each of `names` too, and opens it for the rows to come."""
        self._columns = list(dict.fromkeys([*self._columns, *names]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._path, text.getvalue())
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8", newline="")


def _rows_of(path: Path) -> list[Row]:
    """The complete rows of a table; none if there is no table.

    Raises:
        RunError: it cannot be read.
    """
    rows = csv.DictReader((line.decode(errors="replace") for line in logged_lines(path)), restval="")
    try:
        return [{name: value for name, value in row.items() if name is not None} for row in rows]
    except csv.Error as error:
        raise RunError(f"{path}: is no table ({error}); move it away, and the same command resumes the run") from error


def _stands(row: Row, window: Window) -> bool:
    try:
        return window.keeps(row["split"], int(row["step"]))
    except (KeyError, ValueError):
        return False  # it is not of this program
