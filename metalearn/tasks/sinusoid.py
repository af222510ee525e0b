"""Regression on sine waves, Finn et al. 2017 (arXiv 1703.03400), section 5.1.

Amplitude in [0.1, 5], phase in [0, π], inputs in [−5, 5]: y = amplitude · sin(x − phase).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from metalearn.errors import whole_number
from metalearn.tasks.common.episodes import SeededTasks, Seeds, Shots, check_shots, joined, shots_of_task
from metalearn.types import Batch, Episode, TaskSource


class _Sinusoid(SeededTasks):
    def __init__(self, *, shots: Shots, queries: int, eval_queries: int, seeds: Seeds) -> None:
        super().__init__(seeds)
        self._shots, self._queries, self._eval_queries = shots, queries, eval_queries

    def classes(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Any:
        if isinstance(self._shots, int):
            return self._of(split, indices.tolist(), self._shots)
        tasks = [self._of(split, [n], shots_of_task(self._shots, self._seeds, split, n)) for n in indices.tolist()]
        return joined(tasks, alike=False)

    def _of(self, split: str, indices: list[int], k: int) -> Episode:
        queries = self._queries if split == "train" else self._eval_queries
        waves = []
        for index in indices:
            rng = self._seeds.generator(split, index)
            amplitude, phase = rng.uniform(0.1, 5.0), rng.uniform(0.0, np.pi)
            points = rng.uniform(-5.0, 5.0, (k + queries, 1))
            waves.append((points, amplitude * np.sin(points - phase)))
        x, y = (torch.from_numpy(np.stack(values)).to(torch.float32) for values in zip(*waves, strict=True))
        # Contiguous: a kernel may round otherwise on a view, and a chunk's layout must not depend on its size.
        support, query = ((x[:, part].contiguous(), y[:, part].contiguous()) for part in (slice(k), slice(k, None)))
        return Episode(Batch(*support), Batch(*query))


def sinusoid(*, shots: Shots, queries: int, eval_queries: int, seeds: Seeds) -> TaskSource:
    """Sine waves, each learned from a few points."""
    check_shots(shots)
    whole_number("queries", queries, at_least=1)
    whole_number("eval_queries", eval_queries, at_least=1)
    return _Sinusoid(shots=shots, queries=queries, eval_queries=eval_queries, seeds=seeds)
