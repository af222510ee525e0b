"""Steps of the training loop in one process, without a config, a run folder and validations."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.ways import SEED
from distributed.partition import dim_partitioner
from distributed.reduce import mean, tree_sum
from distributed.strategies.common.work import Work, WorkPlan
from distributed.strategies.local import local
from metalearn.training.chunks import chunk_functions
from metalearn.training.on_device import DeviceUpdater, DeviceWork
from metalearn.training.optimizers import Rates, adam
from metalearn.training.settings import TrainerSettings, Units
from metalearn.training.trainer import HostUpdater, Trainer, TrainState
from metalearn.types import Algorithm, ChunkResult, Episode, TaskSource

RATE = 0.001


def trainer_of(
    algorithm: Algorithm,
    source: TaskSource,
    tasks: int,
    chunk: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Trainer:
    """A trainer that has `tasks` tasks (or samples) a step, `chunk` of them together; Adam at `RATE`.

    As in train.py, the parameters stay on the CPU and chunks are computed on `device`.
    """
    work = Work(**chunk_functions(algorithm, source, device, dtype, tree_sum)._asdict(), device=device)
    plan = WorkPlan(work, 1, dim_partitioner(), mean())
    outer = adam(rates=Rates(RATE), beta1=0.9, beta2=0.999, eps=1e-8)
    units = Units(chunk, algorithm.trained_on)
    settings = TrainerSettings(
        steps=1, meta_batch_size=tasks, task_chunk="auto", val_every=1, val_tasks=2, test_tasks=2
    )
    start = algorithm.init(torch.Generator().manual_seed(SEED))
    state = TrainState.new({name: value.to(dtype) for name, value in start.items()}, outer.start)
    return Trainer(settings, state, local(plan=plan, timeout=60)(), outer, plan.reduce, units, units)


def take_step(trainer: Trainer, step: int) -> Sequence[ChunkResult]:
    """Step number `step`, from 1 on, with its own tasks."""
    return HostUpdater(trainer).advance(trainer.tasks_of(step), step, RATE)[0]


def on_device(
    algorithm: Algorithm, source: TaskSource, tasks: int, chunk: int, device: torch.device, *, steps: int, every: int
) -> tuple[Trainer, DeviceUpdater]:
    """A trainer whose steps stay on a device, and what takes them; figures are there after `every` steps."""
    trainer = trainer_of(algorithm, source, tasks, chunk, device)
    trainer.settings = replace(trainer.settings, steps=steps)
    work = DeviceWork(algorithm, source, device, torch.float32, tree_sum, every)
    return trainer, DeviceUpdater(trainer, work)


def advance_on_device(trainer: Trainer, updater: DeviceUpdater, first: int, count: int) -> float:
    """Takes `count` steps from number `first` on, reads their figures, and returns the last loss of a task."""
    results = list[ChunkResult]()
    for step in range(first, first + count):
        results = list(updater.advance(trainer.tasks_of(step), step, RATE)[0])
        if (step - first + 1) % updater.every == 0:
            updater.settle()
    if count % updater.every:
        updater.settle()
    return float(results[0].metrics["loss"]) / trainer.settings.meta_batch_size


def train_tasks(episodes: Callable[[Tensor], Episode]) -> Any:
    """A source of training tasks alone."""
    y = episodes(torch.tensor([0])).query.y
    classes = None if y.is_floating_point() else int(y.max()) + 1

    class TrainTasks:
        def episodes(self, split: str, indices: Tensor) -> Episode:
            return episodes(indices)

        def classes(self, split: str) -> int | None:
            return classes

        def unit(self, split: str) -> str:
            return "tasks"

    return TrainTasks()
