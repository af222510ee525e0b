"""From the rule of a prior to tasks.

Tasks come in groups: those of a group share their shape, so that they stack without padding. The shape of a group is
drawn by (seed, split, group), a task by (seed, split, number). So any worker can make any task, alone or with others.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.checks import Invalid, whole_number
from metalearn.errors import DataError
from metalearn.tasks.common.episodes import SPLITS, Seeds, task_generator
from metalearn.types import Batch, Episode, Unit

_SHAPE = 4
"""The last number of the seed of a group's shape. Those of other generators differ from it."""


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

    @property
    def cells(self) -> int:
        """The cells of a table, with its targets."""
        return self.rows * (self.features + 1)


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
        drawn = [table(rng, shape) for rng in rngs]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in drawn):
            return drawn[0]
        try:
            return tuple(np.stack([np.asarray(values) for values in part]) for part in zip(*drawn, strict=True))
        except ValueError:  # of the wrong shape alone, so that the message names it
            wanted = [(shape.rows, shape.features), (shape.rows,)]
            wrong = next(pair for pair in drawn if [np.shape(values) for values in pair] != wanted)
            return tuple(np.asarray(values)[None] for values in wrong)

    return tables


class PriorTasks:
    """The tasks of a prior: a `metalearn.types.TaskSource` that comes in groups. `shape(split, group)` is the shape of
    a group."""

    def __init__(self, prior: Prior, classes: int | None, group: int, seeds: Seeds) -> None:
        self.prior, self._classes, self._group, self._seeds = prior, classes, group, seeds
        self._generator = task_generator(seeds)
        self._checked = False
        self.shape = functools.lru_cache(4096)(self._shape)

    def classes(self, split: str) -> int | None:
        return self._classes

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def group(self, split: str) -> int:
        return self._group

    def cells(self, split: str, index: int) -> int:
        return self.shape(split, index // self._group).cells

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
        another one.

        Raises:
            DataError: it does not.
        """
        group = index // self._group
        one, again = (self._of(split, group, [index]) for _ in range(2))
        if self._shape(split, group) != self._shape(split, group) or not _alike(one, again):
            raise self._wrong(
                f"two calls for task {index} of {split} differ; let it draw from `rng` alone, and not from the clock, "
                "a global generator or what an earlier call has left"
            )
        beside = index ^ 1  # of the same group, unless this is the last task of an odd one
        if beside // self._group == group:
            both = self._of(split, group, [index, beside])
            first, second = (Episode(*(Batch(x[n : n + 1], y[n : n + 1]) for x, y in both)) for n in range(2))
            if not _alike(one, first):
                raise self._wrong(f"task {index} of {split} differs where `tables` draws another one beside it")
        else:
            beside = index + 1
            first, second = one, self._of(split, group + 1, [beside])
        if _alike(first, second):
            raise self._wrong(f"tasks {index} and {beside} of {split} are alike; let it draw from `rng`")
        if is_constant(first) and is_constant(second):
            value = first.query.y.flatten()[0]
            raise self._wrong(f"the targets of task {index} of {split} are all {value:g}; nothing can be learned")

    def _shape(self, split: str, group: int) -> Shape:
        found = self.prior.shape(np.random.default_rng((self._seeds.of(split), SPLITS[split], group, _SHAPE)))
        if not isinstance(found, Shape):
            raise self._wrong(
                f"shape(rng) gives a {type(found).__name__}; give a metalearn.tasks.priors.Shape"
            )  # fmt: skip
        for name, least in (("rows", 2), ("features", 1), *([("classes", 2)] if found.classes is not None else [])):
            value = getattr(found, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise self._wrong(f"shape(rng) gives {name}={value!r}; give a whole number of at least {least}")
        known, is_count = found.known, isinstance(found.known, int | np.integer)
        is_part = isinstance(known, float | np.floating) and 0 < known < 1
        if not is_part and not (is_count and 1 <= known < found.rows):
            raise self._wrong(
                f"shape(rng) gives known={found.known!r} of {found.rows} rows; give a whole number from 1 to "
                f"{found.rows - 1}, or a part of all rows, such as 0.6"
            )
        if (found.classes is None) != (self._classes is None) or (found.classes or 0) > (self._classes or 0):
            right = "null" if found.classes is None else found.classes
            raise self._wrong(
                f"shape(rng) gives classes={found.classes}, and dataset.classes={self._classes} is the most that the "
                f"model has outputs for; type dataset.classes={right}".replace("None", "null")
            )
        return found

    def _of(self, split: str, group: int, numbers: Sequence[int]) -> Episode:
        """Tasks of one group."""
        shape = self.shape(split, group)
        given: Any = self.prior.tables([self._generator(split, number) for number in numbers], shape)
        x, y = self._right(given, shape, split, numbers)
        known = shape.support

        def batch(rows: slice) -> Batch:
            targets = torch.from_numpy(y[:, rows].copy())
            return Batch(
                torch.from_numpy(x[:, rows].copy()), targets.unsqueeze(2) if shape.classes is None else targets
            )

        return Episode(batch(slice(known)), batch(slice(known, None)))

    def _right(self, given: Any, shape: Shape, split: str, numbers: Sequence[int]) -> Tables:
        """The tables that the rule has given, as float32, and their targets as int64 or float32.

        Raises:
            DataError: they are not what the shape says.
        """
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise self._wrong(f"a table is a {type(given).__name__}; give the pair x, y")
        x, y, tasks = *map(np.asarray, given), len(numbers)
        for name, values, wanted in (("x", x, [shape.rows, shape.features]), ("y", y, [shape.rows])):
            if values.dtype.kind not in "biuf":
                cell = values.flat[0] if values.size else None
                raise self._wrong(
                    f"{name} holds {values.dtype} ({cell!r:.40}), and must hold numbers; give each text a number, and "
                    "NaN where a value is missing"
                )
            if list(values.shape) != [tasks, *wanted]:
                raise self._wrong(f"{name} has the shape {list(values.shape[1:])}, and shape(rng) says {wanted}")
        with np.errstate(over="ignore"):  # what float32 does not hold is infinite, and refused below
            x, y = x.astype(np.float32), y.astype(np.float32) if shape.classes is None else y
        bad = np.isinf(x) if shape.missing else ~np.isfinite(x)
        if bad.any():
            advice = "" if shape.missing else "; if it stands for a missing value, give Shape(…, missing=True)"
            raise self._wrong(f"x of task {numbers[int(np.argwhere(bad)[0, 0])]} of {split} has {x[bad][0]}{advice}")
        if shape.classes is None:
            if not np.isfinite(y).all():
                task = numbers[int(np.argwhere(~np.isfinite(y))[0, 0])]
                raise self._wrong(f"y of task {task} of {split} has numbers that are not finite")
            return x, y
        if y.dtype.kind == "f":
            raise self._wrong(f"y holds {y.dtype}, and classes={shape.classes} wants whole numbers; give y.astype(int)")
        if y.min() < 0 or y.max() >= shape.classes:
            raise self._wrong(
                f"y runs from {y.min()} to {y.max()}, and {shape.classes} classes are 0 to {shape.classes - 1}"
            )
        return x, y.astype(np.int64)

    def _wrong(self, what: str) -> DataError:
        return DataError(f"prior {self.prior.name}: {what}")


def is_constant(task: Episode) -> bool:
    """Whether all targets of a task are alike."""
    values = torch.cat([task.support.y, task.query.y], dim=1)
    return bool((values == values[:, :1]).all())


def _alike(one: Episode, other: Episode) -> bool:
    """Whether two episodes have the same bits."""
    pairs = [(a, b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return all(a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)


def tasks_of(prior: Prior, *, classes: int | None, group: int, seeds: Seeds) -> PriorTasks:
    """The tasks of a prior.

    Args:
        prior: the rule.
        classes: the most classes of a task; None: the targets are real numbers.
        group: how many tasks share a shape. A chunk is a part of a group.

    Raises:
        ValueError: a number out of range. At the first task: `DataError`, if the rule draws none, or breaks its
            promise.
    """
    if classes is not None:
        whole_number("classes", classes, at_least=2)
    whole_number("group", group, at_least=1)
    return PriorTasks(prior, classes, group, seeds)


def own_prior(*, prior: ModuleType, classes: int | None, group: int, seeds: Seeds) -> PriorTasks:
    """Tasks that a module draws.

    Args:
        prior: the module. `shape(rng)` gives the `Shape` of a group of tasks, and `table(rng, shape)` the arrays x
            [rows, features] and y [rows] of a task. In place of it, `tables(rngs, shape)` may draw a table by each of
            several generators, x [t, rows, features] and y [t, rows], such that none depends on those beside it. Or the
            module has a `prior`, such as `metalearn.tasks.priors.mixture` makes it.
        classes: the most classes of a task; None: the targets are real numbers.
        group: how many tasks share a shape.

    Raises:
        ValueError: the module has no such functions, or a number is out of range.
    """
    made = getattr(prior, "prior", None)
    if isinstance(made, Prior):
        return tasks_of(made, classes=classes, group=group, seeds=seeds)
    found: dict[str, Any] = {name: getattr(prior, name, None) for name in ("shape", "table", "tables")}
    if not callable(found["shape"]) or not (callable(found["table"]) or callable(found["tables"])):
        missing = "shape(rng)" if not callable(found["shape"]) else "table(rng, shape)"
        raise Invalid(
            "prior", prior.__name__, f"the module defines no {missing}", "see docs/how-to/prior.md", quoted=False
        )
    tables = found["tables"] if callable(found["tables"]) else one_by_one(found["table"])
    return tasks_of(Prior(prior.__name__, found["shape"], tables), classes=classes, group=group, seeds=seeds)
