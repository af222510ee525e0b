"""Priors made of others: a mixture of several, and tables of one's own, whose rows and columns are drawn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metalearn.checks import real_number
from metalearn.tasks.priors.ranges import Real, Whole, check_real, check_whole, draw_real, draw_whole
from metalearn.tasks.priors.source import Prior, Shape, Tables, one_by_one

Rng = np.random.Generator


def mixture(*parts: tuple[float, Prior]) -> Prior:
    """Each group of tasks is drawn by one of several priors, with a probability that is proportional to its weight.

    Args:
        parts: the weight of each prior, above 0, and the prior.

    Raises:
        ValueError: no prior, or a weight out of range.
    """
    for weight, _ in parts:
        real_number("weight", weight, above=0)
    if not parts:
        raise ValueError("parts: there are none; give mixture((3, one_prior), (1, another_prior))")
    priors, ends = [prior for _, prior in parts], np.cumsum([weight for weight, _ in parts])

    def shape(rng: Rng) -> Shape:
        chosen = int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
        inner = priors[chosen].shape(rng)
        # What is no Shape is refused where every shape is checked.
        return inner._replace(part=inner.part * len(priors) + chosen) if isinstance(inner, Shape) else inner

    def tables(rngs: Sequence[Rng], shape: Shape) -> Tables:
        inner, chosen = divmod(shape.part, len(priors))
        return priors[chosen].tables(rngs, shape._replace(part=inner))

    return Prior("mixture of " + ", ".join(prior.name for prior in priors), shape, tables)


def of_tables(*tables: tuple[ArrayLike, ArrayLike], rows: Whole = (30, 300), known: Real = (0.3, 0.8)) -> Prior:
    """Tasks of some rows and some columns of tables of one's own; each group of tasks is of one table.

    Training, validation and test draw from the same tables.

    Args:
        tables: of each the features x [n, d], where NaN is a missing value, and the targets y [n]: classes 0, 1, … or
            real numbers, the same kind in all tables.
        rows: of a task; a range: each group draws one. A table with fewer gives all of its rows.
        known: the part of them that is known; a range: each group draws one.

    Raises:
        ValueError: no table, arrays that do not fit together, or a number out of range.
    """
    check_whole("rows", rows, at_least=2)
    check_real("known", known)
    given = [_checked(number, *table) for number, table in enumerate(tables)]
    if not given:
        raise ValueError("tables: there are none; give of_tables((x, y), (another_x, another_y))")

    def shape(rng: Rng) -> Shape:
        part = int(rng.integers(len(given)))
        x, y = given[part]
        count, columns = min(draw_whole(rng, rows), len(x)), int(rng.integers(1, x.shape[1] + 1))
        classes = None if y.dtype.kind == "f" else int(y.max()) + 1
        first = min(max(1, round(draw_real(rng, known) * count)), count - 1)
        return Shape(count, first, columns, classes, missing=bool(np.isnan(x).any()), part=part)

    def table(rng: Rng, shape: Shape) -> Tables:
        x, y = given[shape.part]
        chosen, columns = rng.permutation(len(x))[: shape.rows], rng.permutation(x.shape[1])[: shape.features]
        return x[np.ix_(chosen, columns)], y[chosen]

    return Prior("tables", shape, one_by_one(table))


def _checked(number: int, x: ArrayLike, y: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.generic]]:
    features, targets = np.asarray(x, dtype=np.float32), np.asarray(y)
    if features.ndim != 2 or targets.shape != features.shape[:1] or len(features) < 2 or not features.shape[1]:
        raise ValueError(
            f"tables[{number}]: x has the shape {list(features.shape)} and y {list(targets.shape)}; give x [n, d] and "
            "y [n], of two rows or more"
        )
    if targets.dtype.kind not in "biuf":
        raise ValueError(f"tables[{number}]: y holds {targets.dtype}; give classes as 0, 1, …, or real numbers")
    return features, targets
