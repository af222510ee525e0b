"""Tables drawn from random structural causal models, as those of TabPFN (Hollmann et al. 2023, arXiv 2207.01848,
section 4.2) and TabICL (Qu et al. 2025, arXiv 2502.05564, section 4.3): each number of a row follows from others by a
random function; features and target are some of them.

Most functions are tame, noise is small, and features that go with the target are chosen more often: a prior of tasks
that cannot be learned teaches a model to guess. Real tables tell classes apart less well; `target_noise` is for them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metalearn.errors import Invalid, fraction, real_number, whole_number
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors.source import (
    Prior,
    PriorTasks,
    Real,
    Shape,
    Tables,
    Whole,
    check_part,
    check_real,
    check_whole,
    draw_real,
    draw_whole,
    one_by_one,
    tasks_of,
)

Array = NDArray[Any]
Rng = np.random.Generator

TWO = 0.45  # of groups have tasks of two classes; the others have 3 and more, evenly in the logarithm
UNSURE = 0.5  # of tasks have further noise on the target, so that its classes are weakly told apart
ROWS_PER_CLASS = 15  # at least
LEVELS = 8  # values of a column of categories, at most


# The nodes of a model: columns [rows, nodes], each with mean 0 and variance 1


def _normal(rng: Rng, *size: int) -> Array:
    return rng.standard_normal(size, np.float32)


def _scaled(values: Array) -> Array:
    centred = values - values.sum(axis=0) / np.float32(len(values))
    variance = np.einsum("nm,nm->m", centred, centred) / np.float32(len(values))
    return np.asarray(centred / np.sqrt(variance + np.float32(1e-9)))


def _roots(rng: Rng, rows: int, count: int) -> Array:
    """Causes that have no causes: even or normal, independent or in clusters."""
    kind = rng.random()
    if kind < 0.3:
        values: Array = rng.random((rows, count), np.float32)
    elif kind < 0.7:
        values = _normal(rng, rows, count)
    else:
        centres = _normal(rng, int(rng.integers(2, 9)), count)
        values = centres[rng.integers(len(centres), size=rows)] + rng.uniform(0.1, 0.6) * _normal(rng, rows, count)
    return _scaled(values)


# How often a layer bends its values, by which function.
_BENDS: tuple[tuple[float, Callable[[Array], Array]], ...] = (
    (6, np.tanh),
    (5, lambda z: z),
    (3, lambda z: np.maximum(z, 0)),
    (2, np.abs),
    (1, np.square),
    (1, lambda z: np.exp(-np.square(z))),
    (1, np.sin),
    (1, np.sign),
    (0.5, lambda z: np.sin(2.5 * z)),
    (0.5, np.floor),
)

_BEND_ENDS = np.cumsum([often for often, _ in _BENDS]) / sum(often for often, _ in _BENDS)


def _bent(rng: Rng, values: Array) -> Array:
    """Values of a layer, each half of its nodes bent by a function."""
    half = values.shape[1] // 2
    shifted = _scaled(values) + 0.5 * _normal(rng, values.shape[1])
    first, second = (_BENDS[int(np.searchsorted(_BEND_ENDS, rng.random()))][1] for _ in range(2))
    return np.concatenate([first(shifted[:, :half]), second(shifted[:, half:])], axis=1)


def _network(rng: Rng, nodes: Array, width: int) -> Array:
    """A layer of a neural network, in which a few inputs count most."""
    importance = np.exp(rng.uniform(0.5, 2) * _normal(rng, nodes.shape[1]))
    return _bent(rng, nodes @ (importance[:, None] * _normal(rng, nodes.shape[1], width)))


def _graph(rng: Rng, nodes: Array, width: int) -> Array:
    """Each node has one to three parents, and adds them up."""
    parents = rng.integers(nodes.shape[1], size=(3, width))
    weights = _normal(rng, 3, width) * (rng.random(size=(3, width)) < [[1.0], [0.7], [0.4]])
    return _bent(rng, (nodes[:, parents] * weights).sum(axis=1))


def _products(rng: Rng, nodes: Array, width: int) -> Array:
    """Each node is the product of two parents, and something of a third one."""
    first, second, third = rng.integers(nodes.shape[1], size=(3, width))
    return np.asarray(nodes[:, first] * nodes[:, second] + _normal(rng, width) * nodes[:, third])


def _trees(rng: Rng, nodes: Array, width: int) -> Array:
    """Each node is a tree that asks up to three questions; rows with the same answers have the same value."""
    depth = int(rng.integers(1, 4))
    asked = rng.integers(nodes.shape[1], size=(depth, width))
    cuts = nodes[rng.integers(len(nodes), size=(depth, width)), asked]
    leaf = ((nodes[:, asked] > cuts) << np.arange(depth)[:, None]).sum(axis=1)
    values = _normal(rng, width, 2**depth)
    return np.asarray(values[np.arange(width), leaf])


FUNCTIONS: dict[str, Callable[[Rng, Array, int], Array]] = {
    "network": _network, "graph": _graph, "products": _products, "trees": _trees
}  # fmt: skip


def _model(
    rng: Rng, shape: Shape, functions: list[str], ends: Array, noise: float
) -> tuple[Array, Array, Array]:  # fmt: skip
    """A model's nodes without its last layer; that layer; and its first node without noise."""
    width = max(4, shape.features // 2) + int(rng.integers(0, 8))
    nodes = _roots(rng, shape.rows, int(rng.integers(2, max(3, shape.features) + 1)))
    depth = int(np.searchsorted([0.6, 0.9], rng.random()))
    for deeper in range(depth, -1, -1):
        name = functions[int(np.searchsorted(ends, rng.random()))]
        clean = _scaled(FUNCTIONS[name](rng, nodes, width))
        layer = clean + noise * _normal(rng, shape.rows, width)
        if deeper:
            nodes = np.concatenate([nodes, layer], axis=1)
    return nodes, layer, clean[:, 0]


# From nodes to a table


def _features(rng: Rng, candidates: Array, target: Array, count: int) -> Array:
    """Some of the nodes, those that go with the target more often than others; noise where there are too few."""
    scaled = (target - target.mean()) / (target.std() + 1e-6)
    both = np.abs(scaled @ candidates), 0.7 * np.abs(scaled @ np.square(candidates))
    strength = np.maximum(*both).astype(float) / len(target)
    keys = rng.random(len(strength)) ** (1 / (0.05 + strength**1.5))  # drawn without replacement, by weight
    features = candidates[:, np.argsort(-keys)[:count]]
    if lacking := count - features.shape[1]:
        features = np.concatenate([features, _normal(rng, len(target), lacking)], axis=1)
    return features[:, rng.permutation(count)]


def _seen(rng: Rng, x: Array, categories: float, missing: float) -> Array:
    """The features as a table has them: some are noise, categories, or skewed; and cells are missing."""
    rows, count = x.shape
    kind = rng.random(count)
    useless, skewed = np.flatnonzero(kind > 0.95), np.flatnonzero((kind > 0.75) & (kind < 0.95))
    if len(useless) < count:  # one tells something
        x[:, useless] = _normal(rng, rows, len(useless))
    x[:, skewed] = np.exp(rng.uniform(0.3, 1.2) * np.clip(x[:, skewed], -4, 4))
    levelled = np.flatnonzero(kind < rng.uniform(0, 2 * categories))
    if len(levelled):
        cuts = x[rng.integers(rows, size=(LEVELS - 1, len(levelled))), levelled]
        cuts[np.arange(1, LEVELS)[:, None] > rng.integers(1, LEVELS, size=len(levelled))] = np.inf
        level = (x[:, None, levelled] > cuts).sum(axis=1)
        names = rng.random((LEVELS, len(levelled))).argsort(axis=0)  # of categories without an order
        names[:, rng.random(len(levelled)) < 0.5] = np.arange(LEVELS)[:, None]
        x[:, levelled] = names[level, np.arange(len(levelled))]
    if missing and rng.random() < 0.5:
        share = rng.uniform(0, 2 * missing, size=count) * (rng.random(count) < 0.5)
        x[rng.random(x.shape) < share] = np.nan
    return x


def _classes(rng: Rng, clean: Array, noisy: Array, others: Array, count: int) -> Array:
    """Classes of rows: intervals of the target, or the nearest of some rows by the target and another node. All rows
    with the same value have the same class, as long as that leaves two."""
    if rng.random() < 0.25:
        points = np.column_stack([noisy, others[:, : int(rng.integers(1, 3))]])
        centres = points[rng.choice(len(points), count, replace=False)]
        labels = np.square(points[:, None] - centres).sum(axis=2).argmin(axis=1)
        if np.bincount(labels, minlength=count).min() > 1:
            return np.asarray(labels)
    share = rng.dirichlet(np.full(count, np.exp(rng.uniform(0.3, 3))))
    places = (len(clean) * np.cumsum(0.6 * share + 0.4 / count)[:-1]).astype(int)
    labels = np.searchsorted(np.sort(clean)[places], clean, side="right")
    if np.bincount(labels).max() > 0.95 * len(labels):
        labels = np.searchsorted(np.sort(noisy)[places], noisy, side="right")
    return rng.permutation(count)[labels]


def _known_first(rng: Rng, y: Array, count: int) -> Array:
    """An order of the rows in which one row of each class comes first."""
    order = rng.permutation(len(y))
    first = np.full(count, -1)
    first[y[order][::-1]] = np.arange(len(y))[::-1]
    leading = np.zeros(len(y), bool)
    leading[first[first >= 0]] = True
    return np.concatenate([order[leading], order[~leading]])


def table_prior(
    *, classes: int | None, rows: Whole, known: Real, features: Whole, functions: Mapping[str, float], noise: Real,
    categories: float, missing: float, group: int, seeds: Seeds, target_noise: Real | None = None,
) -> PriorTasks:  # fmt: skip
    """Tasks of tables that structural causal models make."""
    check_whole("rows", rows, at_least=4)
    check_part("known", known)
    check_whole("features", features, at_least=1)
    check_real("noise", noise)
    if target_noise is not None:
        check_real("target_noise", target_noise)
    for name, part in (("categories", categories), ("missing", missing)):
        fraction(name, part)
    if missing >= 0.5:
        raise Invalid("missing", missing, "must be below 0.5", "type KEY=0.1")
    if not functions or not functions.keys() <= FUNCTIONS.keys() or sum(functions.values()) <= 0:
        allowed = f"must give weights to some of {', '.join(FUNCTIONS)}"
        raise Invalid("functions", dict(functions), allowed, "type KEY={graph:1,trees:1}")
    for name, weight in functions.items():
        real_number(f"functions.{name}", weight, at_least=0)
    if classes is not None:
        whole_number("classes", classes, at_least=2)
    names = list(functions)
    ends = np.cumsum([functions[name] for name in names]) / sum(functions.values())

    def shape(rng: Rng) -> Shape:
        wide = features if isinstance(features, int) else int(draw_real(rng, [features[0], features[1] + 0.999]))
        count, many = draw_whole(rng, rows), None
        if classes is not None:
            many = 2 if classes == 2 or rng.random() < TWO else int(draw_real(rng, [3, classes + 0.999]))
            count = max(count, ROWS_PER_CLASS * many)
        part = known if isinstance(known, int | float) else rng.uniform(known[0], known[1])
        first = min(max(round(part * count), 6 * (many or 1)), count - 2)
        return Shape(count, first, wide, many, missing=missing > 0)

    def table(rng: Rng, shape: Shape) -> Tables:
        nodes, last, clean = _model(rng, shape, names, ends, draw_real(rng, noise))
        noisy = last[:, 0]
        if rng.random() < 0.6:  # causes and effects; else causes alone
            nodes = np.concatenate([nodes, last[:, 1:]], axis=1)
        x = _seen(rng, _features(rng, nodes, noisy, shape.features), categories, missing)
        if target_noise is not None and rng.random() < UNSURE:
            unsure = draw_real(rng, target_noise) * _normal(rng, shape.rows)
            clean, noisy = clean + unsure, noisy + unsure
        if shape.classes is None:
            return x, np.exp(rng.uniform(0.3, 1) * np.clip(noisy, -4, 4)) if rng.random() < 0.2 else noisy
        y = _classes(rng, clean, noisy, last[:, 1:3], shape.classes)
        if rng.random() < 0.2:  # some labels are wrong
            wrong = rng.random(len(y)) < rng.uniform(0, 0.1)
            y = np.where(wrong, rng.integers(shape.classes, size=len(y)), y)
        order = _known_first(rng, y, shape.classes)
        return x[order], y[order]

    return tasks_of(Prior("table", shape, one_by_one(table)), classes=classes, group=group, seeds=seeds)
