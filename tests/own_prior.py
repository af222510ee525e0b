"""A prior as a user writes it: which side of a plane a point lies on, seen through noise."""

import numpy as np
from numpy.typing import NDArray

from metalearn.tasks.priors import Shape


def shape(rng: np.random.Generator) -> Shape:
    return Shape(rows=int(rng.integers(40, 80)), known=0.6, features=3, classes=2)


def table(rng: np.random.Generator, shape: Shape) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    x = rng.normal(size=(shape.rows, shape.features))
    w = rng.normal(size=shape.features)
    return x, (x @ w + 0.3 * rng.normal(size=shape.rows) > 0).astype(int)
