"""Sine waves as a prior, with as many points as one likes: y = amplitude · sin(frequency · x − phase) + noise.

Without noise and with frequency 1 they are like those of Finn et al. 2017 (arXiv 1703.03400), section 5.1.
"""

import numpy as np

from metalearn.checks import real_number
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.priors.ranges import Real, Whole, check_real, check_rows, draw_real, draw_whole
from metalearn.tasks.priors.source import Prior, PriorTasks, Shape, Tables, one_by_one, tasks_of


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
