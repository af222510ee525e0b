"""Settings of priors that are one value, or a range of which each draw takes one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from metalearn.checks import Invalid, real_number, whole_number

Whole = int | Sequence[int]
"""A whole number, or the fewest and the most."""

Real = float | Sequence[float]
"""A number, or the smallest and the largest."""


def check_whole(name: str, value: Whole, *, at_least: int) -> None:
    """Raises Invalid for what is neither a whole number nor a range of such."""
    _check(name, value, lambda end: whole_number(name, end, at_least=at_least))


def check_real(name: str, value: Real, *, at_least: float | None = None) -> None:
    """Raises Invalid for what is neither a number above 0, or of at least so much, nor a range of such."""
    _check(name, value, lambda end: real_number(name, end, above=0 if at_least is None else None, at_least=at_least))


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
    fewest = rows if isinstance(rows, int) else rows[0]
    if most(known) >= fewest:
        raise Invalid("known", known, f"must leave a row to predict of rows={rows}", f"type KEY={fewest - 1} or less")


def most(value: Whole) -> int:
    """The most of a range."""
    return value if isinstance(value, int) else value[1]


def draw_whole(rng: np.random.Generator, value: Whole) -> int:
    """A whole number of the range."""
    return value if isinstance(value, int) else int(rng.integers(value[0], value[1] + 1))


def draw_real(rng: np.random.Generator, value: Real) -> float:
    """A number of the range, evenly in its logarithm."""
    if isinstance(value, int | float):
        return float(value)
    return math.exp(rng.uniform(math.log(value[0]), math.log(value[1])))
