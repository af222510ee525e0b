"""What is reported beside the loss, in place of the loss's own metric. It also decides which validation is the best."""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.algorithms.common.losses import absolute_errors, by_task, cross_entropy, per_task_mean, squared
from metalearn.errors import ConfigError, one_of, whole_number
from metalearn.nn.network import squared_errors
from metalearn.types import Loss, Metric, Metrics, TaskSource


def auto() -> None:
    """The loss's own: accuracy, `mse`, or `mae`."""


def mse() -> Metric:
    """The mean squared error of real numbers."""
    return Metric("mse", ("numbers",), squared_errors)


def mae() -> Metric:
    """The mean absolute error of real numbers."""
    return Metric("mae", ("numbers",), absolute_errors)


def top_k(*, k: int) -> Metric:
    """The fraction of samples whose class is among the `k` largest logits. Raises ValueError for a `k` that is no whole
    number of at least 1; and at the first task, one that all classes reach."""
    whole_number("k", k, at_least=1)

    def hits(logits: Tensor, y: Tensor) -> Tensor:
        if k >= logits.shape[-1]:
            most = logits.shape[-1] - 1
            raise ConfigError(f"metric.k={k}: a task has {most + 1} classes; type metric.k={most} or less")
        return (logits.topk(k, dim=-1).indices == y.unsqueeze(-1)).any(dim=-1).to(logits.dtype)

    return Metric("top_k", ("classes",), hits)


def exact_match() -> Metric:
    """The fraction of samples all of whose labels are right, where a probability of 1/2 decides."""
    return Metric("exact_match", ("labels",), lambda x, y: ((x > 0) == (y > 0.5)).all(dim=2).to(x.dtype))


def f1(*, average: str) -> Metric:
    """F1 = 2 tp / (2 tp + fp + fn) of several labels, where a probability of 1/2 decides; 1 where all three are 0. The
    `average` is the mean over `labels` of the F1 of a task's samples, or the mean over `samples` of the F1 of their
    labels. Raises ValueError for another one; and for `labels`, at the first samples, if the algorithm learns from
    plain samples."""
    one_of("average", average, ("labels", "samples"))

    def over(outputs: Tensor, y: Tensor, axis: int) -> Tensor:
        predicted, true = outputs > 0, y > 0.5
        hits, wrong = (predicted & true).sum(axis), (predicted != true).sum(axis)
        return torch.where(hits + wrong == 0, 1.0, 2 * hits / (2 * hits + wrong).clamp(min=1)).to(outputs.dtype)

    def of_samples(outputs: Tensor, y: Tensor) -> Tensor:
        if average == "labels":
            what = "counts over the samples of a task, and this algorithm has plain samples"
            raise ConfigError(f"metric.average=labels: {what}; type metric.average=samples")
        return over(outputs, y, 2)

    def of_tasks(outputs: Tensor, y: Tensor) -> Tensor:
        return over(outputs, y, 1 if average == "labels" else 2).mean(dim=1)

    return Metric("f1", ("labels",), of_samples, of_tasks)


def of_function(function: Callable[[Tensor, Tensor], Tensor]) -> Metric:
    """A metric of the user's own, reported as `score`: more is better. The function is from the outputs [n, d] of one
    task and its targets, [n] or [n, d], to one number. If the algorithm learns from plain samples, it is called for
    each sample, n = 1."""
    name = str(getattr(function, "__name__", type(function).__name__))

    def measured(outputs: Tensor, y: Tensor) -> Tensor:
        value = torch.as_tensor(function(outputs, y))
        if value.numel() != 1:
            shape = list(value.shape)
            raise ConfigError(f"metric={name}: gives a tensor {shape} for one task, and must give one number")
        return value.reshape(()).to(outputs)

    of_tasks, of_samples = by_task(measured)
    return Metric("score", ("classes", "labels", "numbers"), of_samples, of_tasks)


def reporting(loss: Loss | None, metric: object, source: TaskSource) -> Loss | None:
    """The loss, with another metric beside it if one was chosen. None is the automatic loss, and metric. Raises
    ConfigError if it is no metric, or none for targets of this loss."""
    if metric is None:
        return loss
    if not isinstance(metric, Metric) and not callable(metric):
        raise ConfigError(f"metric={metric!r}: must be a function of outputs and targets, or a metalearn.types.Metric")
    measure = metric if isinstance(metric, Metric) else of_function(metric)
    base = loss or (squared() if source.classes("train") is None else cross_entropy())
    both = tuple(kind for kind in base.allows if kind in measure.allows)
    if not both:
        raise ConfigError(
            f"metric={measure.name}: is for {' or '.join(measure.allows)}, and loss={base.name} for "
            f"{' or '.join(base.allows)}; type metric=auto{'' if loss else ', or a loss for such targets'}"
        )

    def of_samples(outputs: Tensor, y: Tensor) -> Metrics:
        return {"loss": base.of_samples(outputs, y)["loss"], measure.name: measure.of_samples(outputs.detach(), y)}

    def of_tasks(outputs: Tensor, y: Tensor) -> Metrics:
        whole, seen = measure.of_tasks, outputs.detach()
        score = whole(seen, y) if whole else per_task_mean(measure.of_samples(seen, y), y, base.ignored)
        return {"loss": base.of_tasks(outputs, y)["loss"], measure.name: score}

    return base._replace(allows=both, metric=measure.name, of_tasks=of_tasks, of_samples=of_samples, compiled=False)
