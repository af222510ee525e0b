"""If a step does not give finite numbers, the error names the task and the worker that computed it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import partition, reduce
from distributed.reduce import tree_sum
from distributed.strategies.common.work import Work, WorkPlan
from distributed.strategies.local import local
from metalearn.errors import RunError
from metalearn.training.chunks import FAULTS, chunk_functions, explain
from metalearn.training.optimizers import Rates, adam
from metalearn.training.settings import TrainerSettings, Units
from metalearn.training.trainer import Trainer, TrainState
from metalearn.types import Batch, Episode, Params
from tests.metalearn.learners import FLOAT64, LEARNERS, Tasks, network, start_of

LOWER = "Lower rates may help: optimizer.lr, and algorithm.inner_lr if there is one"
CPU = torch.device("cpu")


class Spoiled(Tasks):
    """Training task 13 has a NaN, and task 12 an image so bright that the network overflows."""

    def episodes(self, split: str, indices: Tensor) -> Episode:
        episode = super().episodes(split, indices)
        for place, index in enumerate(indices.tolist()):
            at = (place,) if len(indices) == len(episode.query.x) else (0, place)
            if split == "train" and index in (12, 13):
                episode.query.x[at].view(-1)[5] = float("nan") if index == 13 else 1e200
        return episode


def trainer_of(name: str, steps: int) -> Trainer:
    learner = LEARNERS[name](network())
    functions = chunk_functions(learner, Spoiled(learner), CPU, FLOAT64, tree_sum)
    plan = WorkPlan(Work(**functions._asdict(), device=CPU), 1, partition.batch_partitioner, reduce.mean())
    settings = TrainerSettings(
        steps=steps, meta_batch_size=5, task_chunk=3, val_every=100, val_tasks=4, test_tasks=2, eval_seed=0
    )
    outer = adam(rates=Rates(1e-3), beta1=0.9, beta2=0.999, eps=1e-8)
    return Trainer(
        settings, TrainState.new(start_of(learner), outer.start), local(plan=plan, timeout=9.0)(), outer, reduce.mean(),
        training=Units(3, learner.trained_on), evaluation=Units(2, learner.evaluated_on),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["maml", "reptile", "imaml", "protonet", "finetune", "simpleshot_centred"])
def test_the_task_that_spoils_a_step_is_named(name: str) -> None:
    """Tasks 0 to 9 make two good steps; the third has 12 and 13 in it, and is not applied."""
    spoiled, good = trainer_of(name, steps=5), trainer_of(name, steps=2)
    good.fit()
    unit = "sample" if name in ("finetune", "simpleshot_centred") else "task"
    with pytest.raises(
        RunError, match=rf"step 3: {unit} 13, on worker0: its inputs are not finite .*\. The step is not"
    ):
        spoiled.fit()
    assert all(torch.equal(value, good.state.params[name]) for name, value in spoiled.state.params.items())


def test_a_diagnosis_is_explained() -> None:
    numbers = torch.arange(20, 25)

    def message(*faults: int) -> str:
        return explain({"fault": torch.tensor(faults), "worker": torch.tensor([0, 0, 1, 1, 1])}, numbers, 7, "tasks")

    assert message(0, 0, 2, 0, 0) == f"step 7: task 22, on worker1: {FAULTS[2]}. {LOWER}"
    assert message(0, 3, 2, 0, 0) == f"step 7: task 22, on worker1: {FAULTS[2]} (and 1 more of its 5 tasks). {LOWER}"
    assert message(0, 3, 2, 0, 1) == f"step 7: task 24, on worker1: {FAULTS[1]} (and 2 more of its 5 tasks)"
    assert "the meta-gradient is not finite, but the gradients of all its tasks are" in message(0, 0, 0, 0, 0)


def test_a_loss_and_a_gradient_are_different_faults() -> None:
    """The loss √θ at θ = 0, 1 and −1: an infinite gradient, no fault, and a loss that is NaN."""
    learner = LEARNERS["maml"](network())

    def meta_grad(params: Params, episode: Episode, step: int) -> Any:
        theta = episode.query.x.flatten().detach().requires_grad_()
        loss = theta.sqrt().sum()
        (grad,) = torch.autograd.grad(loss, theta)
        return learner.meta_grad(start_of(learner), Tasks(learner).episodes("train", torch.tensor([0])), 1)._replace(
            grads={"theta": grad}, metrics={"loss": loss.detach()}, count=1
        )

    class Numbers(Tasks):
        def classes(self, split: str) -> None:  # type: ignore[override]
            return None

        def episodes(self, split: str, indices: Tensor) -> Episode:
            x = torch.tensor([0.0, 1.0, -1.0])[indices].view(-1, 1, 1)
            return Episode(Batch(x, x), Batch(x, x))

    functions = chunk_functions(learner._replace(meta_grad=meta_grad), Numbers(learner), CPU, FLOAT64, tree_sum)
    assert functions.diagnose({}, torch.tensor([0, 1, 2]), 1)["fault"].tolist() == [3, 0, 2]
