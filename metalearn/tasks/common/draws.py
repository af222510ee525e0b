"""Draws the numbers of many tasks at once, in C: numpy takes 90 µs for a task, this one."""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metalearn.storage.cache import library_of

SOURCE = Path(__file__).with_name("draws.c")

FLOYD = 10_000
"""Up to so many classes numpy chooses by Floyd's algorithm, as draws.c does."""

Numbers = NDArray[np.int64]


class TaskDraws(NamedTuple):
    """What tasks are drawn of: the seed, the number of the split, and the number of pictures of each class; and `ways`
    classes of a task, `per_class` pictures of each, and whether classes are turned."""

    root: int
    split: int
    sizes: Numbers
    ways: int
    per_class: int
    rotations: bool

    @property
    def firsts(self) -> Numbers:
        """The number of the first picture of each class."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)[:-1]])


def draw_one(draws: TaskDraws, index: int) -> Numbers:
    """A task by numpy: [ways, 1 + per_class], of each class the quarter turns, then the numbers of its pictures."""
    rng = np.random.default_rng((draws.root, draws.split, index))
    chosen = rng.choice(len(draws.sizes), draws.ways, replace=False)
    turns = rng.integers(0, 4, draws.ways) if draws.rotations else np.zeros(draws.ways, np.int64)
    firsts = draws.firsts
    pictures = [firsts[label] + rng.permutation(draws.sizes[label])[: draws.per_class] for label in chosen]
    return np.column_stack([turns, np.stack(pictures)])


def draw_many(draws: TaskDraws, indices: Numbers) -> Numbers:
    """The tasks with these numbers, [t, ways, 1 + per_class], as `draw_one` draws each."""
    function = _function()
    if function is None or len(draws.sizes) > FLOYD or draws.root >= 2**64 or not _is_right():
        return np.stack([draw_one(draws, int(index)) for index in indices])
    return _by(function, draws, indices)


def _by(function: "ctypes._NamedFuncPointer", draws: TaskDraws, indices: Numbers) -> Numbers:
    indices, sizes, firsts = (np.ascontiguousarray(part, np.int64) for part in (indices, draws.sizes, draws.firsts))
    result = np.empty((len(indices), draws.ways, 1 + draws.per_class), np.int64)
    failed = function(
        len(indices), indices.ctypes.data, draws.root, draws.split, len(sizes), draws.ways, draws.per_class,
        draws.rotations, sizes.ctypes.data, firsts.ctypes.data, int(sizes.max()), result.ctypes.data,
    )  # fmt: skip
    if failed:
        raise MemoryError("there is no memory to draw tasks")
    return result


@functools.cache
def _function() -> "ctypes._NamedFuncPointer | None":
    library = library_of("the drawing of tasks", "draws", [SOURCE])
    if library is None:
        return None
    number, unsigned, address = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    library.draw_tasks.argtypes = [
        number, address, unsigned, unsigned, number, number, number, number, address, address, number, address,
    ]  # fmt: skip
    library.draw_tasks.restype = number
    return library.draw_tasks


@functools.cache
def _is_right() -> bool:
    """Whether the C draws what this numpy draws. Numpy may change its streams; then it draws itself, and is slower."""
    function = _function()
    assert function is not None
    cases = (TaskDraws(0, 0, np.full(1100, 20), 5, 2, True), TaskDraws(2**63 + 7, 2, np.arange(3, 43), 20, 3, False))
    indices = np.array([0, 1, 2, 59_999, 2**33])
    return all(
        np.array_equal(_by(function, draws, indices), np.stack([draw_one(draws, int(index)) for index in indices]))
        for draws in cases
    )
