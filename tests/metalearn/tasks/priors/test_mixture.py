"""Mixtures of priors, and tables of one's own as a prior."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import metalearn
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors import Prior, mixture, of_tables
from metalearn.tasks.priors.source import own_prior

SINES, LINES = metalearn.prior("sine"), metalearn.prior("gp", features=2, rows=8, known=3)
SEEDS = Seeds(0, 1)


def source(prior: Prior, classes: int | None = None) -> Any:
    module = ModuleType("mine")
    vars(module)["prior"] = prior
    return own_prior(prior=module, classes=classes, group=4, seeds=SEEDS)


def test_groups_are_drawn_from_priors_by_weight() -> None:
    made, seen = source(mixture((1, SINES), (3, LINES))), []
    for group in range(400):
        shape = made.shape("train", group)
        seen.append(shape.features == 2)
    assert 0.68 < np.mean(seen) < 0.82
    first = {two: seen.index(two) for two in (False, True)}
    for prior, group in ((SINES, first[False]), (LINES, first[True])):
        shape = made.shape("train", group)
        rngs = [np.random.default_rng((0, 0, 4 * group + number)) for number in range(4)]
        x, _ = prior.tables(rngs, shape)
        together = made.episodes("train", torch.arange(4 * group, 4 * group + 4))
        assert np.array_equal(torch.cat([together.support.x, together.query.x], dim=1), x.astype(np.float32))


def test_a_mixture_of_mixtures_finds_its_parts() -> None:
    made = source(mixture((1, mixture((1, SINES), (1, LINES))), (2, mixture((1, LINES), (1, SINES)))))
    parts = set()
    for group in range(40):
        shape = made.shape("val", group)
        made.episodes("val", torch.tensor([4 * group]))  # which checks the shape
        parts.add((shape.part, shape.features))
    assert parts == {(0, 1), (2, 2), (1, 2), (3, 1)}


def test_rows_and_columns_are_those_of_the_tables() -> None:
    """Each cell says where it is from: its table, row and column are its digits."""
    tables = []
    for number, (rows, columns, classes) in enumerate(((50, 3, 2), (30, 6, 4))):
        x = 10_000 * number + 100 * np.arange(rows)[:, None] + np.arange(columns)
        tables.append((x, np.arange(rows) % classes))
    made, seen = source(of_tables(*tables, rows=(20, 40), known=0.5), classes=4), set()
    for group in range(12):
        shape, (support, query) = made.shape("train", group), made.episodes("train", torch.tensor([4 * group]))
        x, y = (torch.cat(pair, dim=1)[0].long().numpy() for pair in zip(support, query, strict=True))
        table, row, column = x // 10_000, x % 10_000 // 100, x % 100
        assert (table == table[0, 0]).all() and (row == row[:, :1]).all() and (column == column[:1]).all()
        assert len({*row[:, 0]}) == len(x) == shape.rows and len({*column[0]}) == shape.features
        np.testing.assert_array_equal(y, row[:, 0] % (2, 4)[table[0, 0]])
        assert len(support.x[0]) == round(0.5 * shape.rows)
        seen.add((table[0, 0], shape.features))
    assert len(seen) > 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mixture(), r"give mixture\(\(3, one_prior\)"),
        (lambda: mixture((0, SINES)), "weight=0: must be a finite number above 0"),
        (lambda: of_tables(), r"give of_tables\(\(x, y\)"),
        (lambda: of_tables((np.zeros((3, 2)), np.zeros(4))), r"tables\[0\]: x has the shape \[3, 2\] and y \[4\]"),
        (lambda: of_tables((np.zeros((3, 2)), np.array(["a", "b", "a"]))), r"tables\[0\]: y holds <U1; give classes"),
        (lambda: of_tables((np.zeros((3, 2)), np.zeros(3)), rows=1), "rows=1"),
        (lambda: of_tables((np.zeros((3, 2)), np.zeros(3)), known=20), "known=20: is a part of the rows, below 1"),
    ],
)
def test_what_cannot_be_mixed_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
