"""Makes few-shot episodes; what the task sources share.

Nothing here keeps state: task number i of a split is drawn from a generator seeded by (seed, split, i),
so that any worker can make any task, and a resumed run meets the tasks it would have met.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metalearn.checks import whole_number
from metalearn.types import Batch, Episode

SPLITS = {"train": 0, "val": 1, "test": 2}

Images = NDArray[np.uint8]
TaskSeeds = Callable[[str, int], np.random.Generator]


def task_generators(seed: int, eval_seed: int) -> TaskSeeds:
    """(split, index) → the generator of that task. Training depends on `seed`; validation and test
    only on `eval_seed`, so that every run is judged by the same tasks.

    Raises:
        ValueError: a negative seed.
    """
    whole_number("seed", seed, at_least=0)
    whole_number("eval_seed", eval_seed, at_least=0)

    def generator(split: str, index: int) -> np.random.Generator:
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
        root = seed if split == "train" else eval_seed
        return np.random.default_rng((root, SPLITS[split], index))

    return generator


def check_shape(*, ways: int, shots: int, queries: int, drawings: int) -> None:
    """Raises ValueError for an episode that a class of `drawings` pictures cannot fill."""
    whole_number("ways", ways, at_least=2)
    whole_number("shots", shots, at_least=1)
    whole_number("queries", queries, at_least=1)
    if shots + queries > drawings:
        raise ValueError(
            f"queries={queries}: with shots={shots} an episode needs {shots + queries} pictures of a class, "
            f"and there are {drawings}; type queries={max(1, drawings - shots)} or fewer"
        )


def draw_images(
    rng: np.random.Generator,
    class_images: Callable[[int], Images],
    classes: int,
    *,
    ways: int,
    per_class: int,
    rotations: bool,
) -> Images:
    """`per_class` different pictures of each of `ways` different classes: [ways, per_class, h, w].

    With `rotations` every drawn class is turned as a whole by a random multiple of 90°.
    """
    chosen = rng.choice(classes, ways, replace=False)
    turns = rng.integers(0, 4, ways) if rotations else np.zeros(ways, np.int64)
    drawn = []
    for label, turn in zip(chosen.tolist(), turns.tolist(), strict=True):
        pictures = class_images(label)
        picked = rng.permutation(len(pictures))[:per_class]
        drawn.append(turned(pictures[picked], turn))
    return np.stack(drawn)


def turned(pictures: Images, quarters: int) -> Images:
    """[n, h, w] turned by some quarters, as `np.rot90` turns them over axes (1, 2), in a tenth of its time: a view."""
    if quarters == 0:
        return pictures
    if quarters == 1:
        return pictures[:, :, ::-1].transpose(0, 2, 1)
    if quarters == 2:
        return pictures[:, ::-1, ::-1]
    return pictures.transpose(0, 2, 1)[:, :, ::-1]


def image_episode(drawn: Images, *, shots: int) -> Episode:
    """`drawn` uint8 [t, ways, shots + queries, h, w] → an episode of images [t, n, 1, h, w] in [0, 1].

    The label of a class is its place among the ways.
    """
    tasks, ways = drawn.shape[:2]
    pictures = torch.from_numpy(drawn).to(torch.float32).div_(255).unsqueeze(3)
    labels = torch.arange(ways).view(1, ways, 1)

    def batch(part: Tensor) -> Batch:
        y = labels.expand(tasks, ways, part.shape[2]).flatten(1)
        return Batch(part.flatten(1, 2).contiguous(), y.contiguous())

    return Episode(batch(pictures[:, :, :shots]), batch(pictures[:, :, shots:]))
