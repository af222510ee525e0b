"""What the loop saves when a worker is lost in a step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.steps import trainer_of
from metalearn.training.trainer import HostUpdater, Trainer
from tests.metalearn.training.test_on_device import learner_of, waves


class LosesAWorker(HostUpdater):
    """Its third step finds no worker."""

    def advance(self, tasks: Sequence[Tensor], step: int, rate: float) -> Any:
        if step == 3:
            raise TimeoutError("worker1 did not answer")
        return super().advance(tasks, step, rate)


class HasItElsewhere:
    """As `LosesAWorker`, but it holds the parameters elsewhere, as `split` does, and they are beyond the last step."""

    every = 1

    def __init__(self, trainer: Trainer) -> None:
        self._within = LosesAWorker(trainer)
        self.advance, self.settle = self._within.advance, self._within.settle

    def fetch(self) -> None:
        raise AssertionError("what would be fetched is of no step")


@pytest.mark.parametrize(("kind", "saved"), [(LosesAWorker, [2]), (HasItElsewhere, [])])
def test_the_last_whole_step_is_saved(kind: Callable[[Trainer], Any], saved: list[int]) -> None:
    trainer = trainer_of(learner_of(waves()), waves(), 2, 2, torch.device("cpu"))
    trainer.settings = replace(trainer.settings, steps=9, val_every=9)
    trainer.updates = kind
    steps: list[int] = []
    trainer.save = lambda *, improved: steps.append(trainer.state.step)  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="worker1"):
        trainer.fit()
    assert steps == saved
