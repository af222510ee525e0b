"""A program for every rank of a world whose steps stay on the device, for which the CPU stands. Of each source it
prints where a run ends, of which one has a step that is not finite, and a digest of the parameters."""

import hashlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.steps import trainer_of
from distributed.info import get_world_size
from distributed.partition import dim_partitioner
from distributed.reduce import mean, tree_sum
from distributed.strategies.common.work import Work, WorkPlan
from distributed.strategies.ddp import ddp
from distributed.strategies.local import local
from metalearn.errors import DivergedError
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training.chunks import chunk_functions
from metalearn.training.on_device import steps_on_device
from metalearn.types import TaskSource
from tests.metalearn.training.test_on_device import CPU, Growing, Poisoned, characters, learner_of, waves, work_of

BATCH, CHUNK, STEPS, EVERY = 11, 2, 7, 3
SOURCES: dict[str, Any] = {
    "pictures": characters,
    "waves": waves,
    "growing": lambda: Growing(2 * BATCH),
    "two lengths in a step": lambda: sinusoid(shots=[2, 4], queries=3, eval_queries=3, seeds=Seeds(0, 0)),
    "poisoned": lambda: Poisoned(waves(), task=2 * BATCH + 1),
}


def trained(source: TaskSource) -> str:
    """What becomes of a run on this rank."""
    algorithm, ranks = learner_of(source), get_world_size()
    work = Work(**chunk_functions(algorithm, source, CPU, torch.float32, tree_sum)._asdict(), device=CPU)
    plan = WorkPlan(work, ranks, dim_partitioner(), mean())
    strategy = (local if ranks == 1 else ddp)(plan=plan, timeout=30)()
    trainer = trainer_of(algorithm, source, BATCH, CHUNK, CPU)
    trainer.settings = replace(trainer.settings, steps=STEPS, val_every=100)
    trainer.strategy, trainer.updates = strategy, partial(steps_on_device, work_of(algorithm, source, EVERY))
    try:
        trainer.fit()
        end = "ended"
    except DivergedError as error:
        end = f"step {error.step}"
    finally:
        strategy.close()
    values = b"".join(value.detach().numpy().tobytes() for value in trainer.state.params.values())
    return f"{end} {hashlib.sha256(values).hexdigest()}"


def main() -> None:
    for name, make in SOURCES.items():
        print(name, trained(make()), flush=True)


if __name__ == "__main__":
    main()
