"""Regression on sine waves, Finn et al. 2017 (arXiv 1703.03400), section 5.1.

Amplitude in [0.1, 5], phase in [0, π], inputs in [−5, 5]: y = amplitude · sin(x − phase).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from metalearn.checks import real_number, whole_number
from metalearn.tasks.common.episodes import Seeds, Shots, check_shots, shots_of_task, task_generator
from metalearn.tasks.priors.ranges import Real, Whole, check_real, check_rows, draw_real, draw_whole
from metalearn.tasks.priors.source import Prior, PriorTasks, Shape, Tables, one_by_one, tasks_of
from metalearn.types import Batch, Episode, TaskSource, Unit


class _Sinusoid:
    def __init__(self, *, shots: Shots, queries: int, eval_queries: int, seeds: Seeds) -> None:
        self._shots = shots
        self._queries = queries
        self._eval_queries = eval_queries
        self._seeds = seeds
        self._generator = task_generator(seeds)

    def classes(self, split: str) -> None:
        return None

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Any:
        if isinstance(self._shots, int):
            return self._of(split, indices.tolist(), self._shots)
        tasks = [self._of(split, [n], shots_of_task(self._shots, self._seeds, split, n)) for n in indices.tolist()]
        return tasks[0] if len(tasks) == 1 else tasks

    def _of(self, split: str, indices: list[int], k: int) -> Episode:
        queries = self._queries if split == "train" else self._eval_queries
        xs, ys = [], []
        for index in indices:
            rng = self._generator(split, index)
            amplitude, phase = rng.uniform(0.1, 5.0), rng.uniform(0.0, np.pi)
            x = rng.uniform(-5.0, 5.0, (k + queries, 1))
            xs.append(x)
            ys.append(amplitude * np.sin(x - phase))
        x_all, y_all = (torch.from_numpy(np.stack(values)).to(torch.float32) for values in (xs, ys))
        return Episode(
            Batch(x_all[:, :k].contiguous(), y_all[:, :k].contiguous()),
            Batch(x_all[:, k:].contiguous(), y_all[:, k:].contiguous()),
        )


def sinusoid(*, shots: Shots, queries: int, eval_queries: int, seeds: Seeds) -> TaskSource:
    """Sine waves, each learned from a few points.

    Args:
        shots: support points of a task, or the fewest and the most.
        queries: query points of a training task.
        eval_queries: query points of a validation or test task.

    Raises:
        ValueError: fewer than one point, or a negative seed.
    """
    check_shots(shots)
    whole_number("queries", queries, at_least=1)
    whole_number("eval_queries", eval_queries, at_least=1)
    return _Sinusoid(shots=shots, queries=queries, eval_queries=eval_queries, seeds=seeds)


def sine_prior(
    *, amplitude: Real, frequency: Real, noise: float, rows: Whole, known: Whole, group: int, seeds: Seeds
) -> PriorTasks:
    """A prior of sine waves, with x in [−5, 5], phase in [0, π] and as many points as one likes:
    y = amplitude · sin(frequency · x − phase) + noise.

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
