"""Tasks with fewer classes than the head has outputs are computed as by a head of their classes."""

import math
from typing import Any

import pytest
import torch
from torch import Generator

from metalearn.algorithms.common.losses import cross_entropy
from metalearn.algorithms.common.wrappers import of_present_classes, with_present_classes
from metalearn.algorithms.maml import maml
from metalearn.models.conv4 import conv4
from metalearn.training.chunks import chunk_of
from metalearn.types import Algorithm, Batch, Episode, Model, Params
from tests.metalearn.learners import FLOAT64, LEARNERS, SIZE, WAYS, Tasks, close, network, random, start_of, tasks
from tests.runs import slow

FAST = ("maml", "anil", "meta_curvature", "reptile", "imaml", "cavia", "scratch")
WITH_A_HEAD = (*FAST, "fomaml", "boil", "meta_sgd", "maml_pp", "checkpointed", "maml_adam")


class Fewer(Tasks):
    ways_differ = True


def wide(name: str, model: Model) -> Algorithm:
    """A learner whose head has outputs for more classes than `WAYS`."""
    source = Fewer(LEARNERS[name](network()))
    return with_present_classes(LEARNERS[name](of_present_classes(model, source)), source)


def of_more_classes(layers: bool = False) -> Model:
    model = conv4(ways=WAYS + 6, channels=1, image_size=SIZE, filters=8, activation="softplus", transductive=True)
    return model._replace(network=None, body=None) if layers else model


def extended(values: Params, drawn: Params) -> Params:
    """The drawn values, with others in their first rows."""
    for name, value in values.items():
        drawn[name][tuple(slice(size) for size in value.shape)] = value
    return drawn


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else slow) for n in WITH_A_HEAD])
def test_absent_classes_have_no_part(name: str, layers: bool) -> None:
    learner, reference = wide(name, of_more_classes(layers)), LEARNERS[name](network())
    start, episode = start_of(reference), tasks(2)
    params = extended(start, start_of(learner))
    ours, theirs = learner.meta_grad(params, episode, 2), reference.meta_grad(start, episode, 2)
    cut = {key: grad[tuple(slice(size) for size in start[key].shape)] for key, grad in ours.grads.items()}
    close(cut, theirs.grads, atol=1e-9)
    rest = sum(grad.square().sum() for grad in ours.grads.values()) - sum(g.square().sum() for g in cut.values())
    assert abs(float(rest)) < 1e-9
    close(ours.metrics, theirs.metrics, atol=1e-9)
    close(learner.evaluate(params, episode), reference.evaluate(start, episode), atol=1e-9)
    answers = (one.adapt(p, episode.support)(episode.query.x) for one, p in ((learner, params), (reference, start)))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-9)


def test_the_first_loss_of_five_classes_among_fifty_is_log_5() -> None:
    source = Fewer(LEARNERS["maml"](network()))
    model = of_present_classes(conv4(ways=50, channels=1, image_size=SIZE, filters=8), source)
    learner = with_present_classes(maml(model=model, inner_lr=0.1, inner_steps=1, eval_steps=1), source)
    params = {
        name: value.to(FLOAT64) * (not name.startswith("head.")) for name, value in learner.init(Generator()).items()
    }
    batch = Batch(random(1, 10, 1, SIZE, SIZE, seed=0), torch.arange(5).repeat(1, 2))
    loss = learner.evaluate(params, Episode(batch, batch))["loss"][:, 0]
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(5)))


def test_no_answer_of_a_transformer_is_an_absent_class() -> None:
    model, source = of_more_classes(), Fewer(LEARNERS["in_context"](network()))
    whole, cut = (LEARNERS["in_context"](one) for one in (model, of_present_classes(model, source)))
    params, episode = start_of(whole), tasks(2)
    outputs = whole.adapt(params, episode.support)(episode.query.x)
    shown = with_present_classes(cut, source).adapt(params, episode.support)(episode.query.x)
    assert outputs.shape[2] == WAYS + 6
    torch.testing.assert_close(shown, outputs[..., :WAYS])


def test_weights_are_those_of_the_classes_of_a_task() -> None:
    logits, y = random(2, 4, 3, seed=0), torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])
    five, three = (cross_entropy(weights=[1.0, 2.0, 4.0, 8.0, 9.0][:ways]) for ways in (5, 3))
    close(five.of_tasks(logits, y), three.of_tasks(logits, y), atol=0)
    close(five.of_samples(logits, y), three.of_samples(logits, y), atol=0)


def test_tasks_of_different_ways_are_not_computed_together() -> None:
    """Though their shapes are the same: three classes of five samples, and five of three."""

    class Mixed(Fewer):
        def episodes(self, split: str, indices: torch.Tensor) -> Any:
            x = torch.zeros(1, 15, 2)
            return [Episode(*[Batch(x, (torch.arange(15) % (3 + 2 * i)).view(1, 15))] * 2) for i in indices.tolist()]

        def classes(self, split: str) -> int:
            return 5

        def unit(self, split: str) -> Any:
            return "tasks"

    apart = chunk_of(Mixed(LEARNERS["maml"](network())), "train", torch.tensor([0, 1]))
    assert [int(task.support.y.max()) for task in apart] == [2, 4]
