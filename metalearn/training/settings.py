"""The user's settings of the training loop: steps, sizes, and how many tasks are computed together."""

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metalearn.errors import Invalid, fraction, one_of, whole_number
from metalearn.types import ComesInGroups, Model, Unit

Chunk = int | Callable[[str, int], int]
"""How many tasks are computed together; or, where tasks come in groups, a function from the split and the number of a
task to the number after its chunk."""


class Units(NamedTuple):
    """How many units a chunk has, and whether a unit is a task or a sample."""

    chunk: Chunk
    unit: Unit


def tasks_in_chunks(first: int, count: int, size: Chunk, split: str = "train") -> list[Tensor]:
    """The task numbers from `first` on, `count` of them, in chunks of `size`; the last chunk has what is left."""
    if isinstance(size, int):
        return list(torch.split(torch.arange(first, first + count), size))
    chunks, last = list[Tensor](), first + count
    while first < last:
        end = min(size(split, first), last)
        chunks.append(torch.arange(first, end))
        first = end
    return chunks


CHUNK_CELLS = {"cpu": 20_000, "cuda": 500_000}
"""The most cells of the tables of a chunk with `task_chunk=auto`, by type of device, where tasks come in groups."""

CHUNK_FLOATS = {"cpu": 1_400_000, "cuda": 45_000_000}
"""The most floats that the activations of a chunk may take with `task_chunk=auto`, by type of device. Omniglot's 5-way
1-shot episodes with 64 filters then come in chunks of 8 on a CPU, and in one chunk on a GPU."""

FEW, FEW_FLOATS = 8, 12_000_000  # chunks of up to 8 tasks may use 12M floats: each chunk has a fixed cost
PAIR_FLOATS = 80_000_000  # chunks of two tasks may use 80M floats, so that two threads have a task each
AUTO = "auto"  # stands for a number that the program chooses


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of the loop, by the keys of conf/trainer/default.yaml, which explains them. `eval_seed` is checked
    here as the others; the task source alone keeps it. Raises ValueError for a number out of range, a patience that can
    end nothing, or an unknown `best_by`."""

    steps: int
    meta_batch_size: int
    task_chunk: int | str
    val_every: int
    val_tasks: int
    test_tasks: int
    ema_decay: float | None = None
    patience: int | None = None
    best_by: str = "metric"
    draw_ahead: int | str = AUTO
    eval_seed: InitVar[int] = 0

    def __post_init__(self, eval_seed: int) -> None:
        least = {"steps": 0, "meta_batch_size": 1, "val_every": 1, "val_tasks": 2, "test_tasks": 2}
        for name, bound in least.items():
            whole_number(name, getattr(self, name), at_least=bound)
        whole_number("eval_seed", eval_seed, at_least=0)
        if self.ema_decay is not None:
            fraction("ema_decay", self.ema_decay)
        if self.patience is not None:
            whole_number("patience", self.patience, at_least=1)
            if (self.patience + 1) * self.val_every >= self.steps:
                most = (self.steps - 1) // self.val_every - 1
                allowed = f"has no effect, since the {self.steps} steps have too few validations for it"
                advice = f"type KEY={most} or less, " if most > 0 else "type "
                raise Invalid("patience", self.patience, allowed, f"{advice}a smaller GROUP.val_every, or KEY=null")
        one_of("best_by", self.best_by, ("metric", "loss"))
        if self.task_chunk != AUTO:
            whole_number("task_chunk", self.task_chunk, at_least=1)
        if self.draw_ahead != AUTO:
            whole_number("draw_ahead", self.draw_ahead, at_least=0)


EVEN = 1.15  # how much larger than an equal share the largest worker's share may be


def chunk_size(
    settings: TrainerSettings, model: Model, images: int, device: torch.device, workers: int = 1, *, pairs: bool = False
) -> int:
    """The number of tasks of `images` images in a chunk: at most `tasks_that_fit`, in chunks as even as possible.

    Large tasks come in four chunks or more, which workers can share; in two if torch computes a chunk at once. If there
    are few, they come in pairs. With `pairs`, tasks are added in pairs, so that chunks of 1, 2, 4, … tasks have the
    bits of a single one; then chunks are so small that every worker gets an equal share.
    """
    # With `auto`, only the model, the episode, the type of device and constants count: the bits then depend on nothing
    # else of the machine, nor on the number of workers.
    if isinstance(settings.task_chunk, int):
        return settings.task_chunk
    tasks = settings.meta_batch_size
    small = CHUNK_FLOATS[device.type] // (images * model.activations)
    shared = max(small, tasks // (2 if model.at_once else 4), 2)
    chunks = math.ceil(tasks / min(shared, tasks_that_fit(model, images, device)))
    chunk = math.ceil(tasks / chunks)
    if not pairs or (chunks > 1 and chunk.bit_count() > 1):
        return chunk
    # The chunk, or the largest power of two below it of which all workers get equal shares, as far as that can be.
    sizes = [chunk, *(1 << power for power in reversed(range(chunk.bit_length())) if 1 << power < chunk)]
    # The most tasks of a worker, where each gets the same number of chunks or one more.
    shares = {size: min(tasks, math.ceil(math.ceil(tasks / size) / workers) * size) for size in sizes}
    allowed = max(EVEN * tasks / workers, min(shares.values()))
    return next(size for size, share in shares.items() if share <= allowed)


def chunk_in_group(settings: TrainerSettings, source: ComesInGroups, device: torch.device) -> Chunk:
    """Chunks of tasks that share their shape: a divisor of a group, as large as `CHUNK_CELLS` allows. Raises Invalid if
    `task_chunk` is no divisor."""
    fixed = settings.task_chunk

    def largest(group: int, most: int) -> int:
        return max((size for size in range(1, group + 1) if group % size == 0 and size <= most), default=1)

    for group in {source.group(split) for split in ("train", "val", "test")}:
        if isinstance(fixed, int) and group % fixed:
            allowed = f"must divide dataset.group={group}, since the tasks of a chunk share their shape"
            raise Invalid("task_chunk", fixed, allowed, f"type KEY={largest(group, fixed)}, or KEY=auto")

    def end(split: str, task: int) -> int:
        most = fixed if isinstance(fixed, int) else CHUNK_CELLS[device.type] // source.cells(split, task)
        size = largest(source.group(split), most)
        return task + size - task % size

    return end


def tasks_that_fit(model: Model, images: int, device: torch.device) -> int:
    """The number of tasks of `images` images that fit `CHUNK_FLOATS`, or up to `FEW` that fit `FEW_FLOATS`, or two that
    fit `PAIR_FLOATS`; at least one."""
    floats = images * model.activations
    few = min(FEW, FEW_FLOATS // floats)
    return max(CHUNK_FLOATS[device.type] // floats, few, 2 if 2 * floats <= PAIR_FLOATS else 1)
