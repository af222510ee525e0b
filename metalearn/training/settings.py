"""What the user sets about the loop: steps, sizes, and how many tasks are computed together."""

import math
from typing import NamedTuple

import torch

from metalearn.checks import whole_number
from metalearn.types import Model

CHUNK_FLOATS = {"cpu": 1_400_000, "cuda": 45_000_000}
"""How many floats the activations of a chunk's forward pass may take under `task_chunk=auto`, by type of device.
Omniglot's 5-way 1-shot episodes with 64 filters then come in chunks of 8 on a CPU, and in one chunk on a GPU."""

PAIR_FLOATS = 12_000_000
"""How many those of two tasks may take that are computed together all the same, so that two threads have work."""


class Settings(NamedTuple):
    """What the user may set about the loop; see `trainer`."""

    steps: int
    meta_batch_size: int
    task_chunk: int | str
    val_every: int
    val_tasks: int
    test_tasks: int


def trainer(
    *,
    steps: int,
    meta_batch_size: int,
    task_chunk: int | str,
    val_every: int,
    val_tasks: int,
    test_tasks: int,
    eval_seed: int,
) -> Settings:
    """Checks the settings of the loop.

    Args:
        steps: meta-steps.
        meta_batch_size: tasks of a meta-step.
        task_chunk: tasks computed together, or `auto`.
        val_every: steps between validations; there is one at the last step in any case.
        val_tasks, test_tasks: tasks of a validation, and of the test.
        eval_seed: what validation and test tasks are drawn from (the task source uses it).

    Raises:
        ValueError: a number out of range.
    """
    whole_number("steps", steps, at_least=0)
    whole_number("meta_batch_size", meta_batch_size, at_least=1)
    whole_number("val_every", val_every, at_least=1)
    whole_number("val_tasks", val_tasks, at_least=2)
    whole_number("test_tasks", test_tasks, at_least=2)
    whole_number("eval_seed", eval_seed, at_least=0)
    if task_chunk != "auto":
        whole_number("task_chunk", task_chunk, at_least=1)
    return Settings(steps, meta_batch_size, task_chunk, val_every, val_tasks, test_tasks)


def chunk_size(settings: Settings, model: Model, images: int, device: torch.device) -> int:
    """Tasks of so many images that are computed together: `tasks_that_fit`, evened out over the meta-batch.

    Under `auto` this is a formula of model, episode, type of device and constants. Nothing else about the machine
    counts, so that the bits do not depend on it.
    """
    if isinstance(settings.task_chunk, int):
        return settings.task_chunk
    chunks = math.ceil(settings.meta_batch_size / tasks_that_fit(model, images, device))
    return math.ceil(settings.meta_batch_size / chunks)


def tasks_that_fit(model: Model, images: int, device: torch.device) -> int:
    """How many tasks of so many images fit `CHUNK_FLOATS`; or two that fit `PAIR_FLOATS`; else one."""
    floats = images * model.activations
    return max(CHUNK_FLOATS[device.type] // floats, 2 if 2 * floats <= PAIR_FLOATS else 1)
