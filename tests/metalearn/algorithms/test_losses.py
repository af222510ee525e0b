"""Losses: what torch computes of each task, in inner steps, training and evaluation alike; and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import metalearn
from metalearn.algorithms.anil import anil
from metalearn.algorithms.common.inner import gradient_of
from metalearn.algorithms.common.losses import (
    absolute,
    binary,
    cross_entropy,
    huber,
    measured_by,
    objective,
    of_function,
    squared,
)
from metalearn.algorithms.common.wrappers import ensemble
from metalearn.algorithms.maml import maml
from metalearn.api.learner import Regression
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.types import Algorithm, Batch, Episode, Loss, Model, Stage, Unit
from tests.metalearn.learners import LEARNERS, evaluation_episode, network, random, start_of, training_episode

TASKS, SAMPLES, CLASSES = 3, 6, 4

OUTPUTS = random(TASKS, SAMPLES, CLASSES, seed=1)
Y_CLASSES = torch.randint(CLASSES, (TASKS, SAMPLES), generator=Generator().manual_seed(2))
Y_IGNORED = Y_CLASSES.where(Y_CLASSES != 2, -1)
Y_LABELS = (random(TASKS, SAMPLES, CLASSES, seed=3) > 0).double()
Y_NUMBERS = random(TASKS, SAMPLES, CLASSES, seed=4)
WEIGHTS = [1.0, 0.5, 3.0, 2.0]

TORCHS: dict[str, tuple[Loss, Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross_entropy": (cross_entropy(), Y_CLASSES, F.cross_entropy),
    "smoothing": (cross_entropy(smoothing=0.2), Y_CLASSES, nn.CrossEntropyLoss(label_smoothing=0.2)),
    "weights": (
        cross_entropy(weights=WEIGHTS), Y_CLASSES, nn.CrossEntropyLoss(torch.tensor(WEIGHTS, dtype=torch.float64))),
    "ignored": (cross_entropy(ignored=-1), Y_IGNORED, nn.CrossEntropyLoss(ignore_index=-1)),
    "all": (
        cross_entropy(smoothing=0.1, weights=WEIGHTS, ignored=-1), Y_IGNORED,
        nn.CrossEntropyLoss(torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=0.1, ignore_index=-1)),
    "binary": (binary(), Y_LABELS, nn.BCEWithLogitsLoss()),
    "squared": (squared(), Y_NUMBERS, F.mse_loss),
    "absolute": (absolute(), Y_NUMBERS, F.l1_loss),
    "huber": (huber(delta=0.5), Y_NUMBERS, nn.HuberLoss(delta=0.5)),
    "function of classes": (of_function(F.cross_entropy, classes=True), Y_CLASSES, F.cross_entropy),
    "function of numbers": (of_function(F.smooth_l1_loss, classes=False), Y_NUMBERS, F.smooth_l1_loss),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCHS)
def test_a_tasks_loss_is_torchs_with_a_second_derivative(name: str) -> None:
    loss, y, wanted = TORCHS[name]
    outputs = OUTPUTS.clone().requires_grad_()
    values = loss.of_tasks(outputs, y)
    by_task = torch.stack([wanted(*task) for task in zip(outputs, y, strict=True)])
    torch.testing.assert_close(values["loss"], by_task)
    assert not values[loss.metric].requires_grad and values[loss.metric].shape == (TASKS,)
    assert torch.autograd.gradgradcheck(lambda x: loss.of_tasks(x, y)["loss"].sum(), outputs)
    alone = {key: loss.of_tasks(OUTPUTS[1:2], y[1:2])[key] for key in values}
    assert all(torch.equal(alone[key], values[key][1:2].detach()) for key in values), "no task sees the others"


@pytest.mark.parametrize("name", ["cross_entropy", "smoothing", "binary", "squared", "huber", "function of numbers"])
def test_the_loss_of_a_task_is_the_mean_of_its_samples(name: str) -> None:
    loss, y, _ = TORCHS[name]
    samples, tasks = loss.of_samples(OUTPUTS, y), loss.of_tasks(OUTPUTS, y)
    for key, values in samples.items():
        torch.testing.assert_close(values.mean(dim=1), tasks[key])


def test_metrics_count_by_hand() -> None:
    outputs = torch.tensor([[[2.0, -1.0], [-3.0, 1.0]]])
    labels = torch.tensor([[[1.0, 1.0], [0.0, 1.0]]])
    assert binary().of_tasks(outputs, labels)["accuracy"].item() == 0.75
    assert absolute().of_tasks(outputs, labels)["mae"].item() == (1 + 2 + 3 + 0) / 4
    assert huber(delta=1.0).of_tasks(outputs, labels)["mse"].item() == (1 + 4 + 9 + 0) / 4
    ignored = cross_entropy(ignored=9).of_tasks(outputs, torch.tensor([[1, 9]]))
    assert ignored["accuracy"].item() == 0.0
    nothing = cross_entropy(ignored=9).of_tasks(outputs, torch.tensor([[9, 9]]))
    assert nothing["loss"].item() == 0.0, "a mini-batch of ignored samples has no gradient, and no NaN"


OWN = of_function(F.cross_entropy, classes=True)


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_computes_the_loss_of_its_model(name: str) -> None:
    """Cross-entropy as a function of the user's own gives what the default gives; and another loss is another."""
    default, own = LEARNERS[name](network()), LEARNERS[name](measured_by(network(), OWN))
    start = start_of(default)
    task = evaluation_episode(default, 2)
    values, wanted = (learner.evaluate(start, task) for learner in (own, default))
    trained, expected = (
        learner.meta_grad(start, training_episode(default, 2), 1).metrics["loss"] for learner in (own, default)
    )
    torch.testing.assert_close(values, wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(trained, expected, rtol=1e-8, atol=1e-10)
    smooth = LEARNERS[name](measured_by(network(), cross_entropy(smoothing=0.5)))
    assert smooth.computes is not None and own.computes is OWN
    assert not torch.allclose(smooth.evaluate(start, task)["loss"][:, -1], wanted["loss"][:, -1], rtol=1e-6)


@pytest.mark.parametrize("factory", [maml, anil])
def test_the_inner_steps_descend_on_the_loss(factory: Callable[..., Algorithm]) -> None:
    """One step on a linear network, written out: the gradient of Huber's loss by hand."""

    def init(generator: Generator) -> dict[str, Tensor]:
        return {"weight": torch.zeros(1, 1, dtype=torch.float64)}

    def apply(params: dict[str, Tensor], x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return x @ params["weight"].transpose(1, 2)

    head = Stage("head", ("weight",), lambda params, h, known: h @ params["weight"].transpose(1, 2))
    model = Model(init, apply, False, 1, features=lambda params, x, support_x=None: x, head=head)
    learner = factory(model=measured_by(model, huber(delta=1.0)), inner_lr=0.1, inner_steps=1, eval_steps=1)
    x, y = torch.tensor([[[1.0], [2.0]]]).double(), torch.tensor([[[0.5], [7.0]]]).double()
    predict = learner.adapt(init(Generator()), Batch(x, y))
    # errors -0.5 and -7: slopes -0.5 and -1, times x, mean over 2 samples
    weight = 0.1 * (0.5 * 1 + 1.0 * 2) / 2
    assert math.isclose(predict(torch.ones(1, 1, 1).double()).item(), weight)


def test_only_losses_with_kernels_stay_compiled() -> None:
    model = conv4(ways=3, channels=1, image_size=12, filters=4)
    assert measured_by(model, None).network is not None and measured_by(model, cross_entropy()).network is not None
    assert measured_by(model, cross_entropy(smoothing=0.1)).network is None
    task = training_episode(LEARNERS["maml"](model), 2)
    task = Episode(*(Batch(part.x.float(), part.y) for part in task))
    params = model.init(Generator().manual_seed(0))
    explicit = LEARNERS["maml"](measured_by(model, cross_entropy()))
    grads, wanted = (learner.meta_grad(params, task, 1).grads for learner in (explicit, LEARNERS["maml"](model)))
    assert all(torch.equal(grads[key], wanted[key]) for key in wanted)


def test_an_ensemble_averages_the_probabilities_of_each_label() -> None:
    loss = binary()

    def adapt(params: dict[str, Tensor], support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        return lambda x: params["logit"].expand(*x.shape[:2], 1)

    base = maml(model=measured_by(network(), loss), inner_lr=0.1, inner_steps=0, eval_steps=0)
    several = ensemble(base._replace(adapt=adapt), 2)
    params = {"0.logit": torch.tensor([2.0]), "1.logit": torch.tensor([-1.0])}
    predicted = several.adapt(params, Batch(torch.zeros(1, 1, 1), torch.ones(1, 1, 1)))(torch.zeros(1, 1, 1))
    mean = (1 / (1 + math.exp(-2)) + 1 / (1 + math.exp(1))) / 2
    assert math.isclose(predicted.sigmoid().item(), mean, rel_tol=1e-6)


# From the library


class Tasks:
    """Tasks of three classes on four inputs; `targets` makes the targets [n, …] of the classes."""

    def __init__(self, targets: Callable[[Tensor], Tensor] = lambda y: y, classes: int | None = 3) -> None:
        self._targets, self._classes = targets, classes

    def classes(self, split: str) -> int | None:
        return self._classes

    def unit(self, split: str) -> Unit:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Episode:
        def part(each: int, place: int) -> Batch:
            y = torch.arange(3).repeat_interleave(each)
            seeds = (Generator().manual_seed(2 * int(index) + place) for index in indices)
            x = torch.stack([torch.randn(3 * each, 4, generator=seed) + 2 * F.one_hot(y, 4) for seed in seeds])
            return Batch(x, torch.stack([self._targets(y)] * len(indices)))

        return Episode(part(3, 0), part(4, 1))


def several(y: Tensor) -> Tensor:
    """A sample of class 0 has the labels 0 and 1, of class 1 the label 1, of class 2 none."""
    return torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])[y]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


SETTINGS: dict[str, Any] = {"meta_batch_size": 4, "val_tasks": 4, "test_tasks": 6, "progress": False}
MAML = metalearn.named("maml", inner_lr=0.1, inner_steps=1, eval_steps=3)


def test_several_labels_of_a_sample_are_learned_and_predicted() -> None:
    source = Tasks(several)
    adam = metalearn.named("adam", lr=0.01)
    learned = metalearn.train(MAML, plain, source, steps=60, loss="binary", optimizer=adam, **SETTINGS)
    figures = learned.evaluate()
    assert figures["accuracy"] > 0.9 > figures["by_step"]["0"] - 1
    losses, right = [], []
    for number in range(6):
        support, query = source.episodes("test", torch.tensor([number]))
        task = learned.adapt(support.x[0], support.y[0].numpy())
        assert isinstance(task, Regression)
        probabilities = torch.from_numpy(task.predict(query.x[0]))
        losses.append(F.binary_cross_entropy(probabilities, query.y[0]).item())
        right.append(((probabilities > 0.5) == (query.y[0] > 0.5)).double().mean().item())
    assert math.isclose(figures["loss"], np.mean(losses), rel_tol=1e-4)
    assert math.isclose(figures["accuracy"], np.mean(right), rel_tol=1e-6)
    with pytest.raises(
        ValueError, match=r"targets: must be 0 or 1 for each of 3 classes, \[2, 3\], and have the shape"
    ):
        learned.adapt(torch.zeros(2, 4), [[0.0], [1.0]])


def test_a_function_is_the_loss_of_validation_and_evaluation_too() -> None:
    real = Tasks(lambda y: several(y)[:, :1], classes=None)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    named = metalearn.train(MAML, network, real, steps=3, loss=metalearn.named("huber", delta=0.3), **SETTINGS)
    own = metalearn.train(MAML, network, real, steps=3, loss=nn.HuberLoss(delta=0.3), **SETTINGS)
    for key, value in named.params.items():
        torch.testing.assert_close(own.params[key], value)
    assert math.isclose(own.validation["loss"], named.validation["loss"], rel_tol=1e-5)
    assert math.isclose(own.evaluate()["loss"], named.evaluate()["loss"], rel_tol=1e-5)
    far = metalearn.train(MAML, network, real, steps=3, loss="absolute", **SETTINGS)
    assert "mae" in far.validation and "mse" not in far.evaluate()


def test_a_loaded_learner_with_a_loss_of_ones_own_needs_no_tasks(tmp_path: Path) -> None:
    learned = metalearn.train(MAML, plain, Tasks(), steps=1, loss=nn.CrossEntropyLoss(), **SETTINGS)
    learned.save(tmp_path / "saved")
    loaded = metalearn.load(tmp_path / "saved", network=plain, loss=nn.CrossEntropyLoss())
    x = torch.randn(6, 4, generator=Generator().manual_seed(0))
    answers = (one.adapt(x, ["a", "b", "c"] * 2).predict(x) for one in (learned, loaded))
    assert [*map(repr, next(answers))] == [*map(repr, next(answers))]


def test_labels_keep_their_numbers_where_the_loss_has_weights() -> None:
    weighted = metalearn.named("cross_entropy", weights=[1.0, 1.0, 5.0])
    learned = metalearn.train(MAML, plain, Tasks(), steps=2, loss=weighted, **SETTINGS)
    (support, query) = Tasks().episodes("test", torch.tensor([0]))
    backwards = learned.adapt(support.x[0].flip(0), support.y[0].flip(0).tolist())
    forwards = learned.adapt(support.x[0], support.y[0].tolist())
    for one, other in zip(backwards.predict(query.x[0]), forwards.predict(query.x[0]), strict=True):
        assert one.label == other.label  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"labels: 'cat' is no number from 0 to 2, and the loss has a weight"):
        learned.adapt(support.x[0][:3], ["cat", "dog", "cow"])


def hole(y: Tensor) -> Tensor:
    return torch.cat([y[:1].fill_(-100), y[1:]])


def alone(*, model: Model) -> Algorithm:
    """An algorithm of the user's own that knows nothing of losses."""

    def outcome(params: dict[str, Tensor], episode: Episode, step: int) -> dict[str, Tensor]:
        (_, query) = episode
        return objective(
            model.apply({k: v.expand(len(query.x), *v.shape) for k, v in params.items()}, query.x), query.y
        )

    made = maml(model=model, inner_lr=0.1, inner_steps=1, eval_steps=1)
    return made._replace(meta_grad=gradient_of(outcome), computes=None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer outputs than classes": ({"tasks": Tasks(classes=5)}, r"it has 3 outputs, and this dataset's tasks need 5"),
    "several labels without a loss": ({"tasks": Tasks(several)}, r"loss=binary if a sample may have several labels"),
    "several labels for classes": (
        {"tasks": Tasks(several), "loss": "cross_entropy"},
        r"labels of train .*loss=cross_entropy is for classes .*; type loss=binary"),
    "classes for an error": ({"loss": "squared"}, "loss=squared is for real numbers.*=cross_entropy"),
    "numbers for classes": (
        {"tasks": Tasks(several, classes=None), "loss": "binary"}, "type loss=squared"),
    "whole numbers without classes": (
        {"tasks": Tasks(classes=None)}, "torch.int64 .*give real numbers"),
    "labels out of range": (
        {"tasks": Tasks(lambda y: 2 * several(y)), "loss": "binary"}, "run from 0 to 2"),
    "another number of labels": (
        {"tasks": Tasks(lambda y: several(y)[:, :2]), "loss": "binary"}, r"\[1, 9, 2\]"),
    "other weights": (
        {"loss": metalearn.named("cross_entropy", weights=[1.0, 2.0])}, "weights: has 2 numbers, .*has 3 classes"),
    "an ignored class": (
        {"loss": metalearn.named("cross_entropy", ignored=1)}, r"loss.ignored=1 is a class of train"),
    "nothing but ignored": (
        {"tasks": Tasks(lambda y: y * 0 - 100), "loss": metalearn.named("cross_entropy", ignored=-100)},
        "the label of all samples of a task"),
    "an ignored label that is not ignored": ({"tasks": Tasks(hole)}, "run from -100 to 2"),
    "ignored support samples": (
        {"algorithm": "protonet", "tasks": Tasks(hole), "loss": metalearn.named("cross_entropy", ignored=-100)},
        "each needs a class; type algorithm=maml"),
    "several labels and class means": (
        {"algorithm": "protonet", "tasks": Tasks(several), "loss": "binary"}, "needs classes"),
    "an algorithm with its own loss": (
        {"algorithm": alone, "loss": metalearn.named("cross_entropy", smoothing=0.1)},
        "loss=cross_entropy: this algorithm has a loss of its own; type loss=auto and metric=auto, or let it compute"),
    "a function that is no mean": (
        {"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss=CrossEntropyLoss: gives a tensor \[12\] for one task"),
    "a function that fails": (
        {"loss": lambda outputs, y: outputs @ y.float()},
        r"loss: fails for outputs \[12, 3\] and targets \[12\] of torch.int64"),
    "a function without a second derivative": (
        {"loss": nn.MultiMarginLoss()}, "loss=MultiMarginLoss: has no second derivative .* type algorithm.first"),
    "no loss": ({"loss": 3}, r"loss=3: must be a name of conf/, or a function of outputs and targets"),
    "a smoothing of one": ({"loss": metalearn.named("cross_entropy", smoothing=1)}, "loss.smoothing=1: must be below"),
    "weights of text": (
        {"loss": metalearn.named("cross_entropy", weights="balanced")}, r"loss.weights='balanced': must be a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_are_refused_before_the_first_step(name: str) -> None:
    changed, message = REFUSED[name]
    arguments: dict[str, Any] = {"algorithm": MAML, "model": plain, "tasks": Tasks()} | changed
    with pytest.raises(ValueError, match=message):
        metalearn.train(**arguments, steps=1, **SETTINGS)


def test_first_order_takes_a_loss_without_second_derivative() -> None:
    first = metalearn.named("maml", inner_lr=0.1, first_order=True)
    learned = metalearn.train(first, plain, Tasks(), steps=1, loss=nn.MultiMarginLoss(), **SETTINGS)
    assert math.isfinite(learned.validation["loss"])


def test_ignored_support_samples_teach_nothing() -> None:
    """A task with an ignored sample is adapted to as the task without that sample."""
    model = mlp(inputs=4, outputs=3, hidden=[5], activation="tanh")
    learner = maml(model=measured_by(model, cross_entropy(ignored=-1)), inner_lr=0.3, inner_steps=1, eval_steps=2)
    params = model.init(Generator().manual_seed(0))
    (x, y), query = Tasks().episodes("test", torch.tensor([0]))
    marked = learner.adapt(params, Batch(x, y.index_fill(1, torch.tensor([4]), -1)))(query.x)
    rest = [number for number in range(9) if number != 4]
    torch.testing.assert_close(marked, learner.adapt(params, Batch(x[:, rest], y[:, rest]))(query.x))
