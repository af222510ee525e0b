"""metrics.csv: the figures of metrics.jsonl as a table, for a spreadsheet."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from metalearn.config.values import Config
from metalearn.reporting.loggers.protocol import Logger, Picture, Values, Window
from metalearn.reporting.loggers.to_jsonl import rows_of
from metalearn.runs.metrics import from_json
from metalearn.storage.files import write_atomically, writing

TABLE = "metrics.csv"


def csv_logger(folder: Path, window: Window) -> Logger:
    """A row for each line of metrics.jsonl, which the run has cut to the steps done. A new figure adds a column.

    Raises:
        RunError: it cannot be written.
    """
    table = _Table(folder)
    return Logger(_nothing, table.scalars, _nothing, table.close)


def _nothing(config: Config, more: Mapping[str, Picture] | Values) -> None:
    """The config is in the run folder already."""


class _Table:
    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / TABLE
        self._rewrite()

    def scalars(self, step: int, split: str, values: Values) -> None:
        row = {"step": step, "split": split, **values}
        if not row.keys() <= set(self._columns):
            self.close()
            self._rewrite()  # with this row: metrics.jsonl has it already
            return
        with writing(self._path):
            csv.DictWriter(self._file, self._columns, restval="").writerow(row)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        """Writes the table of all rows, and opens it for those to come."""
        rows = [from_json(row) for row in rows_of(self._folder)]
        self._columns = list(dict.fromkeys(["step", "split", *(name for row in rows for name in row)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._path, text.getvalue())
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8", newline="")
