"""Functions as priors: of a Gaussian process (Müller et al. 2022, arXiv 2112.10510, section 5.1), and sine waves.

Of a Gaussian process, inputs lie evenly in [0, 1]ᵈ; y has variance 1, and noise on top; other ranges and scales are
keys. The exact prediction is known (`posterior`), so that it can be measured how far a trained model is from it. The
benchmark of neural processes is such a prior (`experiment=functions`). A sine wave is y = amplitude ·
sin(frequency · x − phase) + noise; without noise and with frequency 1, one of Finn et al. 2017 (arXiv 1703.03400).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from metalearn.errors import Invalid, real_number, true_or_false, whole_number
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

KERNELS = ("rbf", "matern12", "matern32", "matern52", "periodic")
LEAST_NOISE = 1e-6  # with less, rounding can make a covariance of close points that no longer is one


def covariance(kernel: str, a: Array, b: Array, length: float | Array, period: float | Array = 1.0) -> Array:
    """The covariance […, n, m] of values of variance 1 at the inputs a […, n, d] and b […, m, d] (Rasmussen and
    Williams 2006, section 4.2.1). The periodic kernel is as if each input went around a circle of diameter 2 (equation
    4.31)."""
    values: Array
    difference = a[..., :, None, :] - b[..., None, :, :]
    if kernel == "periodic":
        difference = 2 * np.sin(np.pi / period * difference)
    distance = np.sqrt((difference**2).sum(axis=-1)) / length
    if kernel in ("rbf", "periodic"):
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


def posterior(
    x: Array, y: Array, asked: Array, *, kernel: str, length: float, noise: float, scale: float = 1.0,
    period: float = 1.0,
) -> tuple[Array, Array]:  # fmt: skip
    """Mean and standard deviation [m] of the noisy values at `asked` [m, d], given y [n] at x [n, d]."""
    across, among = (scale**2 * covariance(kernel, x, points, length, period) for points in (asked, x))
    weights = np.linalg.solve(among + noise**2 * np.eye(len(x)), across)
    return weights.T @ y, np.sqrt(scale**2 + noise**2 - (across * weights).sum(axis=0))


class Settings(NamedTuple):
    """What a task draws: the arguments of `posterior`."""

    kernel: str
    length: float
    noise: float
    scale: float
    period: float


def draw_settings(
    rng: np.random.Generator, *, kernel: str | Sequence[str], length: Real, noise: Real, scale: Real, period: Real,
    uniform: bool,
) -> Settings:  # fmt: skip
    """The settings of a task: what its generator draws first."""
    kernels = [kernel] if isinstance(kernel, str) else kernel
    name = kernels[int(rng.integers(len(kernels)))]
    return Settings(name, *(draw_real(rng, value, evenly=uniform) for value in (length, noise, scale, period)))


def gp_prior(
    *, kernel: str | Sequence[str], length: Real, noise: Real, features: Whole, rows: Whole, known: Whole, group: int,
    seeds: Seeds, scale: Real = 1.0, period: Real = 1.0, uniform: bool = False, inputs: Sequence[float] = (0.0, 1.0),
    asked: int | None = None,
) -> PriorTasks:  # fmt: skip
    """Tasks of a Gaussian process."""
    kernels = [kernel] if isinstance(kernel, str) else list(kernel)
    if not kernels or not {*kernels} <= {*KERNELS}:
        raise Invalid("kernel", kernel, f"must be of {', '.join(KERNELS)}", "type KEY=rbf, or KEY=[rbf,matern52]")
    for name, value in (("length", length), ("scale", scale), ("period", period)):
        check_real(name, value)
    check_real("noise", noise, at_least=LEAST_NOISE)
    check_whole("features", features, at_least=1)
    check_rows(rows, known)
    true_or_false("uniform", uniform)
    if len(inputs) != 2 or not inputs[0] < inputs[1]:
        raise Invalid("inputs", inputs, "must be the smallest and the largest", "type KEY=[0,1]")
    if asked is not None:
        whole_number("asked", asked, at_least=1)
        whole_number("rows", rows, at_least=asked + (known if isinstance(known, int) else known[1]))

    def shape(rng: np.random.Generator) -> Shape:
        if asked is None:
            return Shape(draw_whole(rng, rows), draw_whole(rng, known), draw_whole(rng, features))
        first = draw_whole(rng, known)
        return Shape(draw_whole(rng, [first + asked, cast(int, rows)]), first, draw_whole(rng, features))

    def tables(rngs: Sequence[np.random.Generator], shape: Shape) -> Tables:
        drawn: list[Any] = []
        for rng in rngs:
            settings = draw_settings(
                rng, kernel=kernels, length=length, noise=noise, scale=scale, period=period, uniform=uniform
            )
            points = rng.uniform(inputs[0], inputs[1], size=(shape.rows, shape.features))
            drawn.append((settings, points, rng.normal(size=shape.rows)))
        settings_of, x, normal = zip(*drawn, strict=True)
        of_task, *columns = zip(*settings_of, strict=True)
        lengths, noises, scales, periods = (np.array(column)[:, None, None] for column in columns)
        points = np.stack(x)
        matrices = np.empty((len(rngs), shape.rows, shape.rows))
        for name in {*of_task}:
            tasks = [number for number, kernel_of_task in enumerate(of_task) if kernel_of_task == name]
            shown = covariance(name, points[tasks], points[tasks], lengths[tasks], periods[tasks][..., None])
            matrices[tasks] = scales[tasks] ** 2 * shown
        diagonal = np.arange(shape.rows)
        matrices[:, diagonal, diagonal] += noises[:, 0] ** 2
        return points, (np.linalg.cholesky(matrices) @ np.stack(normal)[..., None])[..., 0]

    return tasks_of(Prior("gp", shape, tables), classes=None, group=group, seeds=seeds)


def sine_prior(
    *, amplitude: Real, frequency: Real, noise: float, rows: Whole, known: Whole, group: int, seeds: Seeds
) -> PriorTasks:
    """Tasks of sine waves, with x in [−5, 5] and phase in [0, π]."""
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
