"""Tasks of the rows of a table: those with the same value in one column are a task's, such as one shop's or patient's.

A task is to predict the target of some of its rows, the queries, from that of others, the support rows. They are drawn
by (seed, split, number).
"""

import csv
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from metalearn.errors import DataError, Invalid, one_of, true_or_false, whole_number
from metalearn.tasks.common.episodes import (
    SPLITS,
    SeededTasks,
    Seeds,
    Shots,
    are_fractions,
    by_fractions,
    check_shots,
    joined,
    most_shots,
    shots_of_task,
)
from metalearn.types import Batch, Episode, TaskSource

# Cells of a column of numbers without a value, in small letters. Of texts only the empty one: None is a name too.
MISSING = ("", "na", "nan", "null", "none")
_SHUFFLE = 64_16_21  # seeds the division of tasks by fractions, which is the same in every run


class Rows(NamedTuple):
    """A table: inputs `x` by name, each [n, …] in float32, where NaN is missing, int64 or bool, an only one by no name;
    targets `y` int64 [n] or float32 [n, d]; the number of `classes`, or None; and of each split the rows of each task,
    int64."""

    x: Mapping[str, NDArray[Any]]
    y: NDArray[Any]
    classes: int | None
    tasks: Mapping[str, Sequence[NDArray[np.int64]]]


class _RowTasks(SeededTasks):
    def __init__(self, read: Callable[[], Rows], shots: Shots, queries: int, seeds: Seeds) -> None:
        super().__init__(seeds)
        self._read, self._shots, self._queries = read, shots, queries

    @functools.cached_property
    def rows(self) -> Rows:
        """The table, which is read for the first task."""
        return self._read()

    def classes(self, split: str) -> int | None:
        return self.rows.classes

    def digest_of_all(self) -> bytes:
        """Of the whole table."""
        digest = hashlib.sha256()
        tasks = [task for split in SPLITS for task in self.rows.tasks[split]]
        for values in (*self.rows.x.values(), self.rows.y, *tasks):
            digest.update(f"{values.shape} {values.dtype}".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.digest()

    def episodes(self, split: str, indices: Tensor) -> Any:
        tasks = [self._task(split, index) for index in indices.tolist()]
        return joined(tasks, alike=isinstance(self._shots, int))

    def _task(self, split: str, index: int) -> Episode:
        rng, tasks = self._seeds.generator(split, index), self.rows.tasks[split]
        rows = tasks[int(rng.integers(len(tasks)))]
        shots = shots_of_task(self._shots, self._seeds, split, index)
        drawn = rng.permutation(rows)[: shots + self._queries]
        inputs = {name: values[drawn] for name, values in self.rows.x.items()}
        for name, values in inputs.items():
            if (gaps := np.isnan(values)).any():  # in their place comes the mean of the support set, or 0
                sums = np.where(gaps[:shots], 0, values[:shots]).sum(axis=0, dtype=np.float64)
                means = (sums / np.maximum((~gaps[:shots]).sum(axis=0), 1)).astype(np.float32)
                inputs[name] = np.where(gaps, means, values)

        def batch(part: slice) -> Batch:
            x: Any = {name: torch.from_numpy(values[part].copy()).unsqueeze(0) for name, values in inputs.items()}
            return Batch(x.get("", x), torch.from_numpy(self.rows.y[drawn][part].copy()).unsqueeze(0))

        return Episode(batch(slice(shots)), batch(slice(shots, None)))


def table(
    *, file: str, task: str, target: str, targets: str, features: Sequence[str] | None, split: Sequence[float] | str,
    missing: str, standardize: bool, shots: Shots, queries: int, seeds: Seeds,
) -> TaskSource:  # fmt: skip
    """Tasks of the rows of a file. A DataError at the first task names row and column of what is wrong."""
    for key, value in (("file", file), ("task", task), ("target", target)):
        if not isinstance(value, str) or not value:
            raise Invalid(key, value, "must be a name", "type KEY=NAME")
    if not file.endswith(".csv"):
        raise Invalid("file", file, "must end with .csv", "type KEY=PATH.csv; metalearn.arrays takes other tables")
    if features is not None and (isinstance(features, str) or not features):
        raise Invalid("features", features, "must be a list of columns, or null", "type KEY=[age,height]")
    one_of("targets", targets, ("numbers", "classes"))
    one_of("missing", missing, ("refuse", "mean"))
    true_or_false("standardize", standardize)
    _check_episode(shots, queries, split)
    path = Path(file)

    def read() -> Rows:
        table = _Cells(path)
        others = {task, target, split if isinstance(split, str) else task}
        names = [name for name in table.columns if name not in others] if features is None else list(map(str, features))
        if not names or others & set(names):
            raise DataError(
                f"dataset.features={names}: must be columns, without those of task, target and split; the table has "
                f"{', '.join(table.columns)}"
            )
        labels = table.texts(target)
        kinds = _ordered(labels) if targets == "classes" else None
        if kinds is None:
            y = table.numbers(target, "refuse", "take the row out", "type dataset.targets=classes")
            y = y[:, None].astype(np.float32)
        else:
            numbers = {kind: number for number, kind in enumerate(kinds)}
            y = np.array([numbers[label] for label in labels], np.int64)
        instead = "type dataset.features=[…], the columns of numbers"
        advice = "type dataset.missing=mean, or take the row out", instead
        x = np.column_stack([table.numbers(name, missing, *advice) for name in names])
        by, what = (table.texts(split), split) if isinstance(split, str) else (split, list(split))
        rows = _divided(
            table.texts(task), by, f"dataset.split={what}", task, shots, queries, f"{path}: the task {task}="
        )
        if standardize:
            x = _standardized(x, np.concatenate(rows["train"]))
        return Rows({"": x.astype(np.float32)}, y, None if kinds is None else len(kinds), rows)

    return _RowTasks(read, shots, queries, seeds)


def arrays(
    x: ArrayLike | Mapping[str, ArrayLike], y: ArrayLike, *, task: ArrayLike, shots: Shots, queries: int,
    split: Sequence[float] | Sequence[str] = (0.6, 0.2, 0.2), seed: int = 0, eval_seed: int = 20170309,
) -> TaskSource:  # fmt: skip
    """Tasks of the rows of arrays, for `metalearn.train`. Raises ValueError for arrays that do not fit together, or a
    task with too few rows.

    Args:
        x: inputs [n, …]; or several, by name. Whole numbers, such as ids of words, and truth values stay such. NaN is
            missing: the mean of the task's support rows takes its place.
        y: whole numbers [n] are classes 0, 1, …, which all tasks share; real numbers [n] or [n, d] are predicted.
        task: [n], the name or number of each row's task.
        shots, queries: support and query rows of a task; shots may be the fewest and the most.
        split: the fractions of the tasks that train, validate and test; or [n], of each row `train`, `val` or `test`.
        seed, eval_seed: training tasks are drawn from the one, validation and test tasks from the other.
    """
    inputs = {name: np.asarray(values) for name, values in (x if isinstance(x, Mapping) else {"": x}).items()}
    for name, values in inputs.items():
        inputs[name] = _typed(name or "x", values, {"i": np.int64, "u": np.int64, "b": np.bool_})
    targets = _typed("y", np.asarray(y), dict.fromkeys("iub", np.int64))
    names = np.asarray(task).astype(str).tolist()
    rows_of = {len(values) if values.ndim > (not name) else 0 for name, values in inputs.items()}
    if not rows_of == {len(targets)} == {len(names)}:
        shapes = ", ".join(str(list(values.shape)) for values in (*inputs.values(), targets))
        allowed = "give x [n, …], or several by name, y [n] or [n, d] and task [n]"
        raise DataError(f"x, y, task: have the shapes {shapes} and {len(names)}; {allowed}")
    marks = None if len(split) == 3 and not isinstance(split[0], str) else list(map(str, split))
    _check_episode(shots, queries, "split" if marks is not None else split)
    classes = None
    if targets.dtype.kind == "i" and targets.ndim == 1:
        classes = int(targets.max()) + 1
    else:
        targets = targets.astype(np.float32).reshape(len(targets), -1)
    if not np.isfinite(targets).all() or any(np.isinf(values).any() for values in inputs.values()):
        raise DataError("x, y: have numbers that are not finite; leave those rows out")
    rows = _divided(names, split if marks is None else marks, "split", "task", shots, queries, "task ")
    table = Rows(inputs, targets, classes, rows)
    return _RowTasks(lambda: table, shots, queries, Seeds(seed, eval_seed))


def _typed(name: str, values: NDArray[Any], types: Mapping[str, type]) -> NDArray[Any]:
    """The values in the type for their kind, else in float32."""
    try:
        return values.astype(types.get(values.dtype.kind, np.float32), copy=False)
    except (TypeError, ValueError) as error:
        advice = "texts become numbers by numpy.unique(values, return_inverse=True)[1]"
        raise DataError(f"{name}: must hold numbers ({error}); {advice}") from error


# Checks, and the division of tasks


def _check_episode(shots: Shots, queries: int, split: object) -> None:
    check_shots(shots)
    whole_number("queries", queries, at_least=1)
    if not (isinstance(split, str) and split) and not are_fractions(split):
        raise Invalid("split", split, "must be three fractions with the sum 1, or a column", "type KEY=[0.6,0.2,0.2]")


def _ordered(names: Any) -> list[str]:
    """Different names: as numbers if they all are, else as texts."""
    texts = sorted(set(names))
    try:
        numbers = {name: float(name) for name in texts}
    except ValueError:
        return texts
    ordered = not any(map(math.isnan, numbers.values()))
    return sorted(texts, key=numbers.__getitem__) if ordered else texts


def _divided(
    names: Sequence[str], split: Sequence[Any], what: str, task: str, shots: Shots, queries: int, place: str
) -> dict[str, list[NDArray[np.int64]]]:
    """The rows of each task of each split, divided by fractions, or by what each row says. `names` has each row's task,
    which messages call `place` and its name."""
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_of.setdefault(name, []).append(row)
    groups = {name: rows_of[name] for name in _ordered(rows_of)}
    if isinstance(split[0], str):
        parts: dict[str, list[str]] = {name: [] for name in SPLITS}
        for name, rows in groups.items():
            marks = {split[row] for row in rows}
            if len(marks) > 1 or not marks <= SPLITS.keys():
                raise DataError(
                    f"{what}: the task {name} has rows with the splits {', '.join(sorted(marks))}; all rows of a task "
                    "must have one of train, val, test"
                )
            parts[marks.pop()].append(name)
    else:
        parts = by_fractions(list(groups), split, _SHUFFLE)
    empty = [name for name, tasks in parts.items() if not tasks]
    if empty:
        raise DataError(f"{what}: of {len(groups)} tasks (by {task}) none is left for {' and '.join(empty)}")
    needed = most_shots(shots) + queries
    short = [name for tasks in parts.values() for name in sorted(tasks) if len(groups[name]) < needed]
    if short:
        name = min(short, key=lambda name: len(groups[name]))
        raise DataError(
            f"{place}{name} has {len(groups[name])} rows, and shots={shots} and queries={queries} need {needed} "
            f"({len(short)} tasks have too few); take smaller ones, or leave these tasks out of the table"
        )
    return {split: [np.array(groups[name], np.int64) for name in sorted(tasks)] for split, tasks in parts.items()}


def _standardized(x: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The features with mean 0 and variance 1 over some rows; one that is constant there is only shifted."""
    train = x[rows]
    filled = ~np.isnan(train)
    count = np.maximum(filled.sum(axis=0), 1)
    mean = np.where(filled, train, 0).sum(axis=0) / count
    width = np.sqrt(np.square(np.where(filled, train - mean, 0)).sum(axis=0) / count)
    scaled: NDArray[np.float64] = (x - mean) / np.where(width > 0, width, 1)
    return scaled


class _Cells:
    """The columns of a CSV file, in texts."""

    def __init__(self, file: Path) -> None:
        # Not pandas: it fills a short row with missing values, and plain installations have none.
        self._file = file
        try:
            with file.open(encoding="utf-8-sig", newline="") as text:
                reader = csv.reader(text, strict=True)
                names = [name.strip() for name in next(reader, [])]
                rows = [[cell.strip() for cell in row] for row in reader if row]
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"dataset.file={file}: is no CSV file in UTF-8 ({error})") from error
        if len(set(names)) != len(names) or not names:
            raise DataError(f"dataset.file={file}: its first line must name each column, and no two alike: {names}")
        for number, row in enumerate(rows, start=1):
            if len(row) != len(names):
                what = f"row {number} has {len(row)} cells, and the first line names {len(names)} columns"
                raise DataError(f"{file}: {what}")
        if not rows:
            raise DataError(f"dataset.file={file}: has no rows below its first line")
        self.columns = dict(zip(names, zip(*rows, strict=True), strict=True))

    def _of(self, name: str) -> Sequence[str]:
        if name not in self.columns:
            raise DataError(f"dataset.file={self._file}: has no column {name!r}; it has {', '.join(self.columns)}")
        return self.columns[name]

    def texts(self, name: str) -> Sequence[str]:
        """A column in which nothing is missing."""
        cells = self._of(name)
        if "" in cells:
            raise self._wrong(cells.index("") + 1, name, "is missing; take the row out")
        return cells

    def numbers(self, name: str, missing: str, where_missing: str, for_texts: str) -> NDArray[np.float64]:
        """A column of numbers [n]; NaN where they are missing, if that is allowed. The others say what to do for a cell
        that is missing, or is no number."""
        values = np.empty(len(self._of(name)))
        for row, cell in enumerate(self._of(name), start=1):
            if cell.lower() in MISSING:
                if missing == "refuse":
                    raise self._wrong(row, name, f"is missing; {where_missing}")
                values[row - 1] = math.nan
                continue
            try:
                values[row - 1] = float(cell)
            except ValueError:
                raise self._wrong(row, name, f"is {cell[:40]!r}, and must be a number; {for_texts}") from None
            if not math.isfinite(values[row - 1]):
                raise self._wrong(row, name, f"is {cell[:40]}, and must be finite")
        return values

    def _wrong(self, row: int, column: str, what: str) -> DataError:
        return DataError(f"{self._file}: row {row}, column {column!r}: {what}")
