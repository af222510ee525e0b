"""Tasks of several data sets: training across them, and a test that shows each (Triantafillou et al. 2020, arXiv
1903.03096, train on eight).

A training task is of one of the sets, drawn by weights. Validation and test take the tasks of each set in turn, its own
first ones: so the figures of a set are those of the same tasks as in a run on this set alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from metalearn.errors import DataError, Invalid, real_number
from metalearn.tasks.common.episodes import (
    EpisodeSpec,
    SeededTasks,
    Seeds,
    class_names_of,
    content_of,
    drawers_of,
    identities_of,
    joined,
)
from metalearn.types import TaskSource

_CHOICE = 6  # the purpose of the generator of a training task's set


def several(
    *, sets: Mapping[str, TaskSource], weights: list[float] | None, episode: EpisodeSpec, image_size: int,
    channels: int, seeds: Seeds,
) -> TaskSource:  # fmt: skip
    """Few-shot classification of the classes of several `sets`, by the names of their options. Each has the same
    `episode`, `image_size`, `channels` and `seeds`."""
    if not isinstance(episode.shots, int):
        raise Invalid("shots", episode.shots, "tasks of several sets have one number of shots", "type KEY=1")
    for name, source in sets.items():
        if source.unit("train") != "tasks" or source.classes("test") != episode.ways:
            raise Invalid("sets", list(sets), f"{name} has no tasks of {episode.ways} classes", f"leave {name} out")
    shares = [1.0] * len(sets) if weights is None else weights
    if not isinstance(shares, list) or len(shares) != len(sets):
        example = ",".join("1" for _ in sets)
        raise Invalid("weights", weights, f"must be {len(sets)} numbers, one of each set", f"type KEY=[{example}]")
    for weight in shares:
        real_number("weights", weight, above=0)
    return _SeveralSets(sets, np.cumsum(np.array(shares, np.float64)), seeds)


class _SeveralSets(SeededTasks):
    def __init__(self, sets: Mapping[str, TaskSource], ends: NDArray[np.float64], seeds: Seeds) -> None:
        super().__init__(seeds)
        self.sets, self._sources, self._ends = list(sets), list(sets.values()), ends

    def classes(self, split: str) -> int | None:
        return self._sources[0].classes(split)

    def identities(self, split: str) -> Sequence[str]:
        return sorted({one for source in self._sources for one in identities_of(source, split) or ()})

    def class_names(self, split: str, index: int) -> Sequence[str]:
        place, number = self._place(split, index)
        return class_names_of(self._sources[place], split, number)

    def drawers(self, split: str) -> Mapping[str, str]:
        return {key: name for source in self._sources for key, name in drawers_of(source, split).items()}

    def set_of(self, split: str, index: int) -> str:
        return self.sets[self._place(split, index)[0]]

    def digest_of_all(self) -> bytes:
        return "".join(content_of(source).digest for source in self._sources).encode()

    def _place(self, split: str, index: int) -> tuple[int, int]:
        """The place of a task's set, and the task's number there."""
        if split != "train":
            number, place = divmod(index, len(self._sources))
            return place, number
        drawn = self._seeds.generator(split, index, _CHOICE).random()
        return int(np.searchsorted(self._ends, drawn * self._ends[-1], side="right")), index

    def episodes(self, split: str, indices: Tensor) -> Any:
        places = [self._place(split, index) for index in indices.tolist()]
        tasks = [self._sources[place].episodes(split, torch.tensor([number])) for place, number in places]
        shapes = [[tuple(values.shape) for values in pytree.tree_leaves(task)] for task in tasks]
        for wrong, shape in enumerate(shapes):
            if shape != shapes[0]:
                pair = [f"{self.sets[places[number][0]]} {shapes[number][0]}" for number in (0, wrong)]
                raise DataError(f"dataset.sets: tasks differ in shape: {' and '.join(pair)}; choose others")
        return joined(tasks)
