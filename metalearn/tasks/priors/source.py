"""From the rule of a prior to tasks.

Tasks come in groups: those of a group share their shape, so that they stack without padding. The shape of a group is
drawn by (seed, split, group), a task by (seed, split, number). So any worker can make any task, alone or with others.
"""

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from metalearn.errors import DataError, Invalid, real_number, whole_number
from metalearn.tasks.common.episodes import SeededTasks, Seeds
from metalearn.types import Batch, Episode

Whole = int | Sequence[int]  # a whole number, or the fewest and the most

Real = float | Sequence[float]  # a number, or the smallest and the largest


def check_whole(name: str, value: Whole, *, at_least: int) -> None:
    """Raises Invalid for what is neither a whole number nor a range of such."""
    _check(name, value, lambda end: whole_number(name, end, at_least=at_least))


def check_real(name: str, value: Real, *, at_least: float | None = None) -> None:
    """Raises Invalid for what is neither a number above 0 (or of at least `at_least`), nor a range of such."""
    _check(name, value, lambda end: real_number(name, end, above=0 if at_least is None else None, at_least=at_least))


def check_part(name: str, value: Real) -> None:
    """Raises Invalid for what is neither a part of the rows, between 0 and 1, nor a range of such."""
    check_real(name, value)
    if (value if isinstance(value, int | float) else value[1]) >= 1:
        raise Invalid(name, value, "is a part of the rows, below 1", "type KEY=[0.3,0.8]")


def _check(name: str, value: object, check: Callable[[Any], None]) -> None:
    if not isinstance(value, list | tuple):
        check(value)
        return
    if len(value) != 2:
        raise Invalid(name, list(value), "must be a number, or the smallest and the largest", "type KEY=[1,5]")
    for end in value:
        check(end)
    if value[0] > value[1]:
        raise Invalid(name, value, "must begin with the smallest", f"type KEY=[{value[1]},{value[0]}]")


def check_rows(rows: Whole, known: Whole) -> None:
    """Raises Invalid unless there are known rows, and others to predict, in every table."""
    check_whole("rows", rows, at_least=2)
    check_whole("known", known, at_least=1)
    fewest, most = rows if isinstance(rows, int) else rows[0], known if isinstance(known, int) else known[1]
    if most >= fewest:
        raise Invalid("known", known, f"must leave a row to predict of rows={rows}", f"type KEY={fewest - 1} or less")


def draw_whole(rng: np.random.Generator, value: Whole) -> int:
    """A whole number of the range."""
    return value if isinstance(value, int) else int(rng.integers(value[0], value[1] + 1))


def draw_real(rng: np.random.Generator, value: Real, *, evenly: bool = False) -> float:
    """A number of the range, evenly in its logarithm, or else `evenly`."""
    if isinstance(value, int | float):
        return float(value)
    if evenly:
        return rng.uniform(value[0], value[1])
    return math.exp(rng.uniform(math.log(value[0]), math.log(value[1])))


_SHAPE = 4  # the purpose of the generator of a group's shape


class Shape(NamedTuple):
    """The shape of the tables of a group.

    `rows` rows, of which the first are `known`: a whole number of them, or the part of all. `features` columns. The
    targets are one of `classes` classes, or real numbers if that is None. `missing`: cells may be NaN. `part` is the
    number of the rule that draws the tables, where there are several.
    """

    rows: int
    known: float
    features: int
    classes: int | None = None
    missing: bool = False
    part: int = 0

    @property
    def support(self) -> int:
        """The number of known rows."""
        if isinstance(self.known, int | np.integer):
            return int(self.known)
        return min(max(1, round(self.rows * self.known)), self.rows - 1)


Tables = tuple[NDArray[Any], NDArray[Any]]


class Prior(NamedTuple):
    """A rule that draws tables; errors name it by `name`.

    `shape(rng)` draws the shape of a group. `tables(rngs, shape)` draws a table by each generator: x [t, rows,
    features], and y [t, rows], of classes 0, 1, … or of real numbers. It may depend on nothing else, and a table not on
    those beside it.
    """

    name: str
    shape: Callable[[np.random.Generator], Shape]
    tables: Callable[[Sequence[np.random.Generator], Shape], Tables]


def one_by_one(table: Callable[[np.random.Generator, Shape], Any]) -> Callable[..., Any]:
    """The `tables` of a rule that draws one table, x [rows, features] and y [rows]."""

    def tables(rngs: Sequence[np.random.Generator], shape: Shape) -> Any:
        return tuple(map(np.stack, zip(*(table(rng, shape) for rng in rngs), strict=True)))

    return tables


class PriorTasks(SeededTasks):
    """The tasks of a prior: a `metalearn.types.TaskSource` that comes in groups. `shape(split, group)` is the shape of
    a group."""

    def __init__(self, prior: Prior, classes: int | None, group: int, seeds: Seeds) -> None:
        super().__init__(seeds)
        self.prior, self._classes, self._group, self._checked = prior, classes, group, False
        self.shape = functools.lru_cache(4096)(self._shape)  # every chunk of a group asks for it

    def classes(self, split: str) -> int | None:
        return self._classes

    def group(self, split: str) -> int:
        return self._group

    def cells(self, split: str, index: int) -> int:
        shape = self.shape(split, index // self._group)
        return shape.rows * (shape.features + 1)

    def episodes(self, split: str, indices: Tensor) -> Any:
        numbers = indices.tolist()
        if not self._checked:
            self.check(split, numbers[0])
            self._checked = True
        groups = [number // self._group for number in numbers]
        if len(set(groups)) == 1:
            return self._of(split, groups[0], numbers)
        return [self._of(split, group, [number]) for group, number in zip(groups, numbers, strict=True)]

    def check(self, split: str, index: int) -> None:
        """Checks on one task that the prior keeps its promise: the same number gives the same task, another number
        another one. Raises DataError if it does not."""
        group = index // self._group
        one, again, other = (self._of(split, n // self._group, [n]) for n in (index, index, index + 1))
        if self._shape(split, group) != self._shape(split, group) or _bits(one) != _bits(again):
            raise self._wrong(
                f"two calls for task {index} of {split} differ; let it draw from `rng` alone, and not from the clock, "
                "a global generator or what an earlier call has left"
            )
        if _bits(one) == _bits(other):
            raise self._wrong(f"tasks {index} and {index + 1} of {split} are alike; let it draw from `rng`")

    def _shape(self, split: str, group: int) -> Shape:
        shape = self.prior.shape(self._seeds.generator(split, group, _SHAPE))
        if not isinstance(shape, Shape):
            raise self._wrong(f"shape(rng) gives a {type(shape).__name__}; give a metalearn.tasks.priors.Shape")
        for name, least in (("rows", 2), ("features", 1), *([("classes", 2)] if shape.classes is not None else [])):
            value = getattr(shape, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise self._wrong(f"shape(rng) gives {name}={value!r}; give a whole number of at least {least}")
        if not 0 < shape.known < (shape.rows if isinstance(shape.known, int | np.integer) else 1):
            raise self._wrong(
                f"shape(rng) gives known={shape.known!r} of {shape.rows} rows; give a whole number from 1 to "
                f"{shape.rows - 1}, or a part of all rows, such as 0.6"
            )
        if (shape.classes is None) != (self._classes is None) or (shape.classes or 0) > (self._classes or 0):
            raise self._wrong(
                f"shape(rng) gives classes={shape.classes}, and dataset.classes={self._classes} is the most that the "
                f"model has outputs for; type dataset.classes={shape.classes}".replace("None", "null")
            )
        return shape

    def _of(self, split: str, group: int, numbers: Sequence[int]) -> Episode:
        """Tasks of one group."""
        shape = self.shape(split, group)
        drawn: Any = self.prior.tables([self._seeds.generator(split, number) for number in numbers], shape)
        x, y = self._validated(drawn, shape, split, numbers)

        def batch(rows: slice) -> Batch:
            targets = torch.from_numpy(y[:, rows].copy())
            features = torch.from_numpy(x[:, rows].copy())
            return Batch(features, targets.unsqueeze(2) if shape.classes is None else targets)

        return Episode(batch(slice(shape.support)), batch(slice(shape.support, None)))

    def _validated(self, drawn: Any, shape: Shape, split: str, numbers: Sequence[int]) -> Tables:
        """The tables of a rule as float32, and their targets as int64 or float32."""
        x, y = map(np.asarray, drawn)
        for name, values, expected in (("x", x, [shape.rows, shape.features]), ("y", y, [shape.rows])):
            if values.dtype.kind not in "biuf":
                advice = "give each text a number, and NaN where a value is missing"
                raise self._wrong(f"{name} holds {values.dtype}, and must hold numbers; {advice}")
            if list(values.shape) != [len(numbers), *expected]:
                raise self._wrong(f"{name} has the shape {list(values.shape[1:])}, and shape(rng) says {expected}")
        with np.errstate(over="ignore"):  # what float32 does not hold is infinite, and refused below
            x, y = x.astype(np.float32), y.astype(np.float32) if shape.classes is None else y
        bad_x = np.isinf(x) if shape.missing else ~np.isfinite(x)
        for name, values, bad in (("x", x, bad_x), ("y", y, ~np.isfinite(y))):
            if bad.any():
                task, advice = numbers[int(np.argwhere(bad)[0, 0])], "a missing cell of x needs Shape(…, missing=True)"
                raise self._wrong(f"{name} of task {task} of {split} has {values[bad][0]}; {advice}")
        if shape.classes is None:
            return x, y
        if y.dtype.kind == "f" or y.min() < 0 or y.max() >= shape.classes:
            raise self._wrong(
                f"y holds {y.dtype} from {y.min()} to {y.max()}; {shape.classes} classes are the whole numbers 0 to "
                f"{shape.classes - 1}"
            )
        return x, y.astype(np.int64)

    def _wrong(self, what: str) -> DataError:
        return DataError(f"prior {self.prior.name}: {what}")


def is_constant(task: Episode) -> bool:
    """Whether all targets of a task are alike."""
    values = torch.cat([task.support.y, task.query.y], dim=1)
    return bool((values == values[:, :1]).all())


def _bits(task: Episode) -> list[tuple[torch.Size, bytes]]:
    return [(values.shape, values.numpy().tobytes()) for batch in task for values in batch]


def tasks_of(prior: Prior, *, classes: int | None, group: int, seeds: Seeds) -> PriorTasks:
    """The tasks of a prior. `classes` are the most of a task; None: the targets are real numbers. `group` is how many
    tasks share a shape; a chunk is a part of a group. Raises ValueError for a number out of range, and DataError at the
    first task if the rule draws none, or breaks its promise."""
    if classes is not None:
        whole_number("classes", classes, at_least=2)
    whole_number("group", group, at_least=1)
    return PriorTasks(prior, classes, group, seeds)


def own_prior(*, prior: ModuleType, classes: int | None, group: int, seeds: Seeds) -> PriorTasks:
    """Tasks that a module draws. `shape(rng)` gives the `Shape` of a group of tasks, and `table(rng, shape)` the arrays
    x [rows, features] and y [rows] of a task. In place of it, `tables(rngs, shape)` may draw a table by each of several
    generators, x [t, rows, features] and y [t, rows], such that none depends on those beside it. Or the module has a
    `prior`, such as `mixture` makes it. Raises ValueError if it has no such functions."""
    rule = getattr(prior, "prior", None)
    if not isinstance(rule, Prior):
        parts: Any = (getattr(prior, name, None) for name in ("shape", "table", "tables"))
        shape, table, tables = parts
        if not callable(shape) or not (callable(table) or callable(tables)):
            missing = "table(rng, shape)" if callable(shape) else "shape(rng)"
            advice = "see docs/how-to/prior.md"
            raise Invalid("prior", prior.__name__, f"the module defines no {missing}", advice, quoted=False)
        rule = Prior(prior.__name__, shape, tables if callable(tables) else one_by_one(table))
    return tasks_of(rule, classes=classes, group=group, seeds=seeds)


def mixture(*parts: tuple[float, Prior]) -> Prior:
    """Each group of tasks is drawn by one of several priors, with a probability that is proportional to its weight.
    `parts` are the weight of each prior, above 0, and the prior. Raises ValueError for no prior, or a weight out of
    range."""
    for weight, _ in parts:
        real_number("weight", weight, above=0)
    if not parts:
        raise ValueError("parts: there are none; give mixture((3, one_prior), (1, another_prior))")
    priors, ends = [prior for _, prior in parts], np.cumsum([weight for weight, _ in parts])

    def shape(rng: np.random.Generator) -> Shape:
        number = int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
        inner = priors[number].shape(rng)
        # What is no Shape is refused where every shape is checked.
        return inner._replace(part=inner.part * len(priors) + number) if isinstance(inner, Shape) else inner

    def tables(rngs: Sequence[np.random.Generator], shape: Shape) -> Tables:
        inner, number = divmod(shape.part, len(priors))
        return priors[number].tables(rngs, shape._replace(part=inner))

    return Prior("mixture of " + ", ".join(prior.name for prior in priors), shape, tables)


def of_tables(*tables: tuple[ArrayLike, ArrayLike], rows: Whole = (30, 300), known: Real = (0.3, 0.8)) -> Prior:
    """Tasks of some rows and some columns of tables of one's own; each group of tasks is of one table. Training,
    validation and test draw from the same tables. Raises ValueError for no table, arrays that do not fit together, or a
    number out of range.

    Args:
        tables: of each the features x [n, d], where NaN is a missing value, and the targets y [n]: classes 0, 1, … or
            real numbers, the same kind in all tables.
        rows: of a task; a range: each group draws one. A table with fewer gives all of its rows.
        known: the part of them that is known; a range: each group draws one.
    """
    check_whole("rows", rows, at_least=2)
    check_part("known", known)
    arrays: list[tuple[NDArray[np.float32], NDArray[Any]]] = []
    for number, (features, targets) in enumerate(tables):
        x, y = np.asarray(features, np.float32), np.asarray(targets)
        if x.ndim != 2 or y.shape != x.shape[:1] or len(x) < 2 or not x.shape[1]:
            raise ValueError(
                f"tables[{number}]: x has the shape {list(x.shape)} and y {list(y.shape)}; give x [n, d] and y [n], of "
                "two rows or more"
            )
        if y.dtype.kind not in "biuf":
            raise ValueError(f"tables[{number}]: y holds {y.dtype}; give classes as 0, 1, …, or real numbers")
        arrays.append((x, y))
    if not arrays:
        raise ValueError("tables: there are none; give of_tables((x, y), (another_x, another_y))")

    def shape(rng: np.random.Generator) -> Shape:
        part = int(rng.integers(len(arrays)))
        x, y = arrays[part]
        count, columns = min(draw_whole(rng, rows), len(x)), int(rng.integers(1, x.shape[1] + 1))
        classes = None if y.dtype.kind == "f" else int(y.max()) + 1
        first = min(max(1, round(draw_real(rng, known) * count)), count - 1)
        return Shape(count, first, columns, classes, missing=bool(np.isnan(x).any()), part=part)

    def table(rng: np.random.Generator, shape: Shape) -> Tables:
        x, y = arrays[shape.part]
        order, columns = rng.permutation(len(x))[: shape.rows], rng.permutation(x.shape[1])[: shape.features]
        return x[np.ix_(order, columns)], y[order]

    return Prior("tables", shape, one_by_one(table))
