"""Functions as priors: of a Gaussian process (Müller et al. 2022, arXiv 2112.10510, section 5.1), and sine waves.

Of a Gaussian process, inputs lie evenly in [0, 1]ᵈ; y has variance 1, and noise on top. The exact prediction is known
(`posterior`), so that it can be measured how far a trained model is from it. A sine wave is y = amplitude ·
sin(frequency · x − phase) + noise; without noise and with frequency 1, one of Finn et al. 2017 (arXiv 1703.03400).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metalearn.checks import Invalid, real_number
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors.source import (
    Prior,
    PriorTasks,
    Real,
    Shape,
    Tables,
    Whole,
    check_real,
    check_rows,
    check_whole,
    draw_real,
    draw_whole,
    one_by_one,
    tasks_of,
)

Array = NDArray[np.float64]

KERNELS = ("rbf", "matern12", "matern32", "matern52")

LEAST_NOISE = 1e-6  # with less, rounding can make a covariance of close points that no longer is one


def covariance(kernel: str, distance: Array) -> Array:
    """The covariance of two values by the distance of their inputs, in length scales (Rasmussen and Williams 2006,
    section 4.2.1)."""
    values: Array
    if kernel == "rbf":
        values = np.exp(-0.5 * distance**2)
    elif kernel == "matern12":
        values = np.exp(-distance)
    elif kernel == "matern32":
        scaled = np.sqrt(3) * distance
        values = (1 + scaled) * np.exp(-scaled)
    else:
        scaled = np.sqrt(5) * distance
        values = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return values


def distances(a: Array, b: Array) -> Array:
    """[…, n, m] between the rows of a […, n, d] and b […, m, d]."""
    difference = a[..., :, None, :] - b[..., None, :, :]
    return np.asarray(np.sqrt((difference**2).sum(axis=-1)))


def posterior(
    x: Array, y: Array, asked: Array, *, kernel: str, length: float, noise: float
) -> tuple[Array, Array]:  # fmt: skip
    """Mean and standard deviation [m] of the noisy values at `asked` [m, d], given y [n] at x [n, d]."""
    gram = covariance(kernel, distances(x, x) / length) + noise**2 * np.eye(len(x))
    across = covariance(kernel, distances(x, asked) / length)
    weights = np.linalg.solve(gram, across)
    return weights.T @ y, np.sqrt(1 + noise**2 - (across * weights).sum(axis=0))


def gp_prior(
    *, kernel: str | Sequence[str], length: Real, noise: Real, features: Whole, rows: Whole, known: Whole, group: int,
    seeds: Seeds,
) -> PriorTasks:  # fmt: skip
    """Tasks of a Gaussian process.

    Args:
        kernel: one of `KERNELS`, or several, of which each task draws one.
        length: the length scale of the kernel, or a range, of which each task draws one.
        noise: the standard deviation of the noise, or a range, of which each task draws one.
        features, rows, known: input dimensions, points, and known points; ranges: each group draws one.
        group: how many tasks share a shape.

    Raises:
        ValueError: a value that is not allowed.
    """
    kernels = [kernel] if isinstance(kernel, str) else list(kernel)
    if not kernels or not {*kernels} <= {*KERNELS}:
        raise Invalid("kernel", kernel, f"must be of {', '.join(KERNELS)}", "type KEY=rbf, or KEY=[rbf,matern52]")
    check_real("length", length)
    check_real("noise", noise, at_least=LEAST_NOISE)
    check_whole("features", features, at_least=1)
    check_rows(rows, known)

    def shape(rng: np.random.Generator) -> Shape:
        return Shape(draw_whole(rng, rows), draw_whole(rng, known), draw_whole(rng, features))

    def tables(rngs: Sequence[np.random.Generator], shape: Shape) -> Tables:
        drawn: list[Any] = []
        for rng in rngs:
            settings = kernels[int(rng.integers(len(kernels)))], draw_real(rng, length), draw_real(rng, noise)
            drawn.append((*settings, rng.uniform(size=(shape.rows, shape.features)), rng.normal(size=shape.rows)))
        of_task, lengths, noises, x, normal = zip(*drawn, strict=True)
        inputs = np.stack(x)
        scaled = distances(inputs, inputs) / np.array(lengths)[:, None, None]
        matrices = np.empty_like(scaled)
        for name in {*of_task}:
            tasks = [number for number, kernel_of_task in enumerate(of_task) if kernel_of_task == name]
            matrices[tasks] = covariance(name, scaled[tasks])
        diagonal = np.arange(shape.rows)
        matrices[:, diagonal, diagonal] += np.array(noises)[:, None] ** 2
        return inputs, (np.linalg.cholesky(matrices) @ np.stack(normal)[..., None])[..., 0]

    return tasks_of(Prior("gp", shape, tables), classes=None, group=group, seeds=seeds)


def sine_prior(
    *, amplitude: Real, frequency: Real, noise: float, rows: Whole, known: Whole, group: int, seeds: Seeds
) -> PriorTasks:
    """Tasks of sine waves, with x in [−5, 5] and phase in [0, π].

    Args:
        amplitude, frequency: numbers, or ranges, of which each task draws one.
        noise: the standard deviation of the noise of y.
        rows, known: points, and known points; ranges: each group draws one.
        group: how many tasks share a shape.

    Raises:
        ValueError: a value that is not allowed.
    """
    check_real("amplitude", amplitude)
    check_real("frequency", frequency)
    real_number("noise", noise, at_least=0)
    check_rows(rows, known)

    def shape(rng: np.random.Generator) -> Shape:
        return Shape(draw_whole(rng, rows), draw_whole(rng, known), 1)

    def table(rng: np.random.Generator, shape: Shape) -> Tables:
        height, pace, phase = draw_real(rng, amplitude), draw_real(rng, frequency), rng.uniform(0, np.pi)
        x = rng.uniform(-5, 5, size=(shape.rows, 1))
        return x, height * np.sin(pace * x[:, 0] - phase) + noise * rng.normal(size=shape.rows)

    return tasks_of(Prior("sines", shape, one_by_one(table)), classes=None, group=group, seeds=seeds)
