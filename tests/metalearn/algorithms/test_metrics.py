"""Metrics: counted by hand, in evaluations and validations; and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import metalearn
from metalearn.algorithms.common.losses import absolute, binary, cross_entropy, huber, squared
from metalearn.algorithms.common.metrics import exact_match, f1, mae, mse, of_function, reporting, top_k
from metalearn.errors import ConfigError
from metalearn.runs.metrics import better
from metalearn.types import Batch, Episode, Loss, Metric

LOGITS = torch.tensor([[[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [0.0, 9.0, 1.0, 2.0]]])
CLASSES = torch.tensor([[1, 0, 3]])  # second, last and second largest
LABELLED = torch.tensor([[[2.0, -1.0, -1.0], [-3.0, 1.0, -1.0], [1.0, 1.0, -1.0]]])
LABELS = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
NUMBERS, TARGETS = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[0.0], [5.0]]])


def of_first(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs[0, 0] - y.flatten()[0]


BY_HAND: dict[str, tuple[Loss | None, Metric | Callable[..., Any], Tensor, Tensor, float]] = {
    "top 1": (cross_entropy(), top_k(k=1), LOGITS, CLASSES, 0.0),
    "top 2": (cross_entropy(smoothing=0.1), top_k(k=2), LOGITS, CLASSES, 2 / 3),
    "top 2 of two": (cross_entropy(ignored=-1), top_k(k=2), LOGITS, torch.tensor([[1, 0, -1]]), 1 / 2),
    "exact match": (binary(), exact_match(), LABELLED, LABELS, 1 / 3),
    # label 0: tp 2, fn 1; label 1: tp 1, fp 1; label 2: nothing to find, and nothing found
    "f1 of labels": (binary(), f1(average="labels"), LABELLED, LABELS, (4 / 5 + 2 / 3 + 1) / 3),
    # sample 0: all right; samples 1 and 2: tp 1 and one wrong
    "f1 of samples": (binary(), f1(average="samples"), LABELLED, LABELS, (1 + 2 / 3 + 2 / 3) / 3),
    "mse": (absolute(), mse(), NUMBERS, TARGETS, (1 + 9) / 2),
    "mae": (huber(delta=1.0), mae(), NUMBERS, TARGETS, (1 + 3) / 2),
    "own": (squared(), of_first, NUMBERS, TARGETS, 1.0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_metrics_count_by_hand(name: str) -> None:
    loss, metric, outputs, y, wanted = BY_HAND[name]
    both = reporting(loss, metric, Tags())
    assert both is not None and loss is not None
    outputs = outputs.clone().requires_grad_()
    values = both.of_tasks(outputs, y)
    assert list(values) == ["loss", both.metric] and not values[both.metric].requires_grad
    assert values[both.metric].tolist() == pytest.approx([wanted])
    torch.testing.assert_close(values["loss"], loss.of_tasks(outputs, y)["loss"])


def test_samples_have_their_own_values() -> None:
    loss = reporting(cross_entropy(), top_k(k=2), Tags())
    assert loss is not None and loss.of_samples(LOGITS, CLASSES)["top_k"].tolist() == [[1.0, 0.0, 1.0]]
    own = of_function(of_first).of_samples(NUMBERS, TARGETS)
    assert own.tolist() == [[1.0, -3.0]]
    with pytest.raises(ConfigError, match=r"^metric\.average=labels: counts over the samples of a task"):
        f1(average="labels").of_samples(LABELLED, LABELS)


def test_more_is_better_but_of_errors() -> None:
    assert all(better(name, 0.9, 0.1) for name in ("accuracy", "top_k", "f1", "exact_match", "score"))
    assert all(better(name, 0.1, 0.9) for name in ("mse", "mae"))


class Tags:
    """Two labels, of which one is the sign of the first input and the other that of the second."""

    def classes(self, split: str) -> int:
        return 2

    def unit(self, split: str) -> str:
        return "tasks"

    def size(self, split: str) -> None:
        return None

    def episodes(self, split: str, indices: Tensor) -> Episode:
        draws = [torch.randn(12, 2, generator=torch.Generator().manual_seed(int(index))) for index in indices]
        x = torch.stack(draws)
        y = (x > 0).float()
        return Episode(Batch(x[:, :6], y[:, :6]), Batch(x[:, 6:], y[:, 6:]))


SHORT: dict[str, Any] = {
    "steps": 2, "meta_batch_size": 2, "val_every": 1, "val_tasks": 2, "test_tasks": 2, "progress": False
}  # fmt: skip


def short(metric: Any, loss: str = "binary") -> dict[str, Any]:
    learner = metalearn.train(
        metalearn.named("maml", inner_lr=0.1, inner_steps=1, eval_steps=1), torch.nn.Linear(2, 2), Tags(),  # type: ignore[arg-type]
        loss=loss, metric=metric, **SHORT,
    )  # fmt: skip
    return learner.validation


def test_a_validation_has_the_metric_that_was_chosen() -> None:
    assert "f1" in short("f1") and "accuracy" not in short("f1")
    best = short(lambda outputs, y: -(outputs - y).abs().max())
    assert best["score"] < 0 and best["by_step"].keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("metric", "loss", "named"),
    [
        ("mae", "binary", "metric=mae: .* type metric=auto"),
        ("f1", "auto", "metric=f1: .* type metric=auto, or a loss"),
        ("f2", "binary", "metric=f2"),
        (3, "binary", "metric=3"),
        (metalearn.named("f1", average="all"), "binary", "metric.average='all'"),
        (lambda outputs, y: outputs, "binary", "metric=<lambda>"),
    ],
)
def test_what_does_not_fit_is_refused(metric: Any, loss: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        short(metric, loss)
