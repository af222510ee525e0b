"""What a task's predictions are measured by: the loss that is minimised, and the metric beside it.

The loss of a task is a mean over its samples, in its inner steps, in training, validation and test alike. Without a
choice (`auto`) the targets decide: cross-entropy for classes, the squared error for real numbers.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.arithmetic import ratio
from metalearn.errors import ConfigError, Invalid, fraction, positive, real_number
from metalearn.nn.network import (
    accuracy,
    cross_entropies,
    mean_squared_error,
    squared_errors,
    usual_metrics,
    usual_metrics_of_samples,
)
from metalearn.types import Loss, Metrics, Model, Targets

Measure = Callable[[Tensor, Tensor], Tensor]  # from outputs [t, n, d] and targets to a value for each sample, [t, n]


def objective(outputs: Tensor, y: Tensor, loss: Loss | None = None) -> Metrics:
    """The `loss` and the metric of predictions, per task [t]; without a loss, those of `usual_metrics`."""
    return usual_metrics(outputs, y) if loss is None else loss.of_tasks(outputs, y)


def by_sample(outputs: Tensor, y: Tensor, loss: Loss | None = None) -> Metrics:
    """As `objective`, for every sample [t, n]."""
    return usual_metrics_of_samples(outputs, y) if loss is None else loss.of_samples(outputs, y)


def auto() -> None:
    """Cross-entropy for classes, the squared error for real numbers."""


def cross_entropy(
    *, smoothing: float = 0.0, weights: Sequence[float] | None = None, ignored: int | None = None
) -> Loss:
    """Cross-entropy, for one class of several; torch's of this name, with its mean over the samples of a task.

    Args:
        smoothing: the part of a sample's probability that all classes share (Szegedy et al. 2016, arXiv 1512.00567).
        weights: a weight for each class. The mean over a task's samples is weighted. If the algorithm trains on plain
            samples, a sample's loss is multiplied by its weight instead.
        ignored: a label; its samples have no part in loss and metric. It must be none of the classes' labels.

    Raises ValueError for a smoothing outside [0, 1), weights below 0, or an ignored label that is no whole number.
    """
    fraction("smoothing", smoothing)
    if weights is not None:
        if not isinstance(weights, list | tuple) or not weights:
            advice = "type KEY=[1.0,2.0,0.5], a number of at least 0 for each class"
            raise Invalid("weights", weights, "must be a list of numbers", advice)
        for weight in weights:
            real_number("weights", weight, at_least=0)
    if ignored is not None and (isinstance(ignored, bool) or not isinstance(ignored, int)):
        raise Invalid("ignored", ignored, "must be a label, a whole number, or null", "type KEY=-100")
    if not smoothing and weights is None and ignored is None:
        return _loss("cross_entropy", ("classes",), cross_entropies, accuracy)._replace(compiled=True)
    ignore_index = -100 if ignored is None else ignored

    @functools.cache  # so that a recorded step brings nothing to its GPU
    def by_class(device: torch.device, dtype: torch.dtype, ways: int) -> Tensor | None:
        return None if weights is None else torch.tensor(list(weights[:ways]), dtype=dtype, device=device)

    def losses(logits: Tensor, y: Tensor) -> Tensor:
        values = F.cross_entropy(
            logits.flatten(0, 1), y.flatten(), by_class(logits.device, logits.dtype, logits.shape[2]),
            reduction="none", ignore_index=ignore_index, label_smoothing=smoothing,
        )  # fmt: skip
        return values.view(y.shape)

    def of_tasks(logits: Tensor, y: Tensor) -> Metrics:
        shares = (y != ignore_index).to(logits.dtype)
        factors = by_class(logits.device, logits.dtype, logits.shape[2])
        if factors is not None:
            shares = factors[y.where(y != ignore_index, 0)] * shares
        loss = ratio(losses(logits, y).sum(dim=1), shares.sum(dim=1))
        return {"loss": loss, "accuracy": per_task_mean(accuracy(logits, y), y, ignore_index)}

    loss = _loss("cross_entropy", ("classes",), losses, accuracy)
    return loss._replace(of_tasks=of_tasks, weights=None if weights is None else len(weights), ignored=ignored)


def binary() -> Loss:
    """Binary cross-entropy of each label by itself, for samples with several labels or none; the mean over labels.

    The accuracy is the fraction of labels that are right, where a probability of 1/2 decides (1 minus the Hamming
    loss, as `torchmetrics` and scikit-learn's `hamming_loss` have it), and not that of samples without an error.
    """

    def losses(logits: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(dim=2)

    return _loss("binary", ("labels",), losses, label_accuracy)


def squared() -> Loss:
    """The squared error of real numbers."""
    loss = _loss("squared", ("numbers",), squared_errors, squared_errors, metric="mse")
    return loss._replace(of_tasks=mean_squared_error, compiled=True)


def absolute() -> Loss:
    """The absolute error of real numbers; the metric is its mean, `mae`."""
    return _loss("absolute", ("numbers",), absolute_errors, absolute_errors, metric="mae")


def huber(*, delta: float) -> Loss:
    """Huber's loss of real numbers (1964): half the squared error up to `delta`, and linear beyond. The metric is the
    mean squared error. Raises ValueError for a `delta` that is not above 0."""
    positive(delta=delta)

    def losses(outputs: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(outputs, y, reduction="none", delta=delta).mean(dim=2)

    return _loss("huber", ("numbers",), losses, squared_errors, metric="mse")


def of_function(function: Callable[[Tensor, Tensor], Tensor], *, classes: bool) -> Loss:
    """A loss of the user's own.

    Args:
        function: from the outputs [n, d] of one task and its targets, [n] or [n, d], to its loss, one number. If the
            algorithm trains on plain samples, it is called for each sample, n = 1. All losses of torch are such.
        classes: whether the tasks have classes. The metric is the accuracy then, else the mean squared error.
    """
    name = str(getattr(function, "__name__", type(function).__name__))

    def measured(outputs: Tensor, y: Tensor) -> Tensor:
        value = function(outputs, y)
        if not isinstance(value, Tensor) or value.numel() != 1:
            kind = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(f"loss={name}: gives {kind} for one task, and must give one number, such as their mean")
        return value.reshape(())

    of_each, losses = by_task(measured)

    def score(outputs: Tensor, y: Tensor) -> Tensor:
        if not classes:
            return squared_errors(outputs, y)
        return label_accuracy(outputs, y) if y.is_floating_point() else accuracy(outputs, y)

    def of_tasks(outputs: Tensor, y: Tensor) -> Metrics:
        return {"loss": of_each(outputs, y), metric: score(outputs.detach(), y).mean(dim=1)}

    metric = "accuracy" if classes else "mse"
    loss = _loss(name, ("classes", "labels") if classes else ("numbers",), losses, score, metric=metric)
    return loss._replace(of_tasks=of_tasks)


def by_task(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Measure, Measure]:
    """The values of tasks [t], and of samples [t, n] as tasks of one sample, by a function of one task to a scalar."""

    def of_tasks(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.stack([function(*task) for task in zip(outputs, y, strict=True)])

    def of_samples(outputs: Tensor, y: Tensor) -> Tensor:
        return of_tasks(*(value.flatten(0, 1).unsqueeze(1) for value in (outputs, y))).view(outputs.shape[:2])

    return of_tasks, of_samples


def per_task_mean(values: Tensor, y: Tensor, ignored: int | None) -> Tensor:
    """The mean of samples' values [t, n] for each task [t], without those samples whose label is `ignored`."""
    if ignored is None:
        return values.mean(dim=1)
    counted = (y != ignored).to(values.dtype)
    return ratio((values * counted).sum(dim=1), counted.sum(dim=1))


def measured_by(model: Model, loss: Loss | None) -> Model:
    """The model with this loss. Where compiled networks do not compute it, the layers are computed one by one."""
    if loss is None:
        return model
    return model._replace(loss=loss, network=model.network if loss.compiled else None)


# Values of samples [t, n]


def label_accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The fraction of the labels `y` [t, n, labels] that are right."""
    return ((logits.detach() > 0) == (y > 0.5)).to(logits.dtype).mean(dim=2)


def absolute_errors(outputs: Tensor, y: Tensor) -> Tensor:
    """Their mean over the numbers of a sample, `y` [t, n, d]."""
    return (outputs - y).abs().mean(dim=2)


def _loss(name: str, allows: tuple[Targets, ...], losses: Measure, score: Measure, *, metric: str = "accuracy") -> Loss:
    def of_samples(outputs: Tensor, y: Tensor) -> Metrics:
        return {"loss": losses(outputs, y), metric: score(outputs.detach(), y)}

    def of_tasks(outputs: Tensor, y: Tensor) -> Metrics:
        return {name: values.mean(dim=1) for name, values in of_samples(outputs, y).items()}

    return Loss(name, allows, metric, of_tasks, of_samples)
