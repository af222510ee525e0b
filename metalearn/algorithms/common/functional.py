"""Small pure functions that the algorithms share."""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.algorithms.common.losses import (
    accuracy,
    cross_entropies,
    mean_squared_error,
    squared_errors,
)
from metalearn.nn.conv import laid_out
from metalearn.nn.network import one_for_each
from metalearn.nn.packing import is_packed, sum_of_tasks
from metalearn.types import Batch, ChunkResult, Episode, Loss, Metrics, Model, Params

Outcome = Callable[[Params, Episode, int], Metrics]
"""`outcome(params, episode, step)`: the values per task [t]; their `loss` has a graph."""


def objective(outputs: Tensor, y: Tensor, loss: Loss | None = None) -> Metrics:
    """The `loss` and the metric of predictions, per task [t]. Without a loss the type of the targets decides.

    Classes (`y` [t, n] integers; `outputs` [t, n, ways] logits): mean cross-entropy as `loss`, and
    `accuracy`. Regression (`y` [t, n, d]): mean squared error as `loss` and `mse`.
    """
    if loss is not None:
        return loss.of_tasks(outputs, y)
    if y.is_floating_point():
        return mean_squared_error(outputs, y)
    return {name: values.mean(dim=1) for name, values in by_sample(outputs, y).items()}


def by_sample(outputs: Tensor, y: Tensor, loss: Loss | None = None) -> Metrics:
    """As `objective`, for every sample [t, n]."""
    if loss is not None:
        return loss.of_samples(outputs, y)
    if y.is_floating_point():
        errors = squared_errors(outputs, y)
        return {"loss": errors, "mse": errors.detach()}
    return {"loss": cross_entropies(outputs, y), "accuracy": accuracy(outputs, y)}


def cholesky(systems: Tensor) -> Tensor:
    """The Cholesky roots of symmetric systems [..., n, n]. They are NaN where there is none, as in a run that diverges:
    its loss is then not finite, which the run reports."""
    roots, failed = torch.linalg.cholesky_ex(systems)
    return torch.where((failed > 0)[..., None, None], torch.nan, roots)


def results(model: Model, params: Params, batch: Batch, support_x: Tensor | None = None, *, twice: bool) -> Metrics:
    """The loss and the metrics, per task [t], of the model's predictions for `batch`; see `objective`.

    Args:
        model: the network.
        params: per-task parameters. If they are packed, the compiled network computes all at once.
        batch: the samples, and what is to be predicted.
        support_x: the support set, whose statistics normalise if the model is not transductive.
        twice: whether the loss will be differentiated twice.
    """
    if model.network is not None and is_packed(params):
        return model.network.metrics(params, batch.x, batch.y, support_x, twice=twice)
    return objective(model.apply(params, batch.x, support_x), batch.y, model.loss)


def start_of(model: Model, params: Params, tasks: int) -> Params:
    """Where the inner steps of `tasks` tasks start: the parameters in packed form if the model can be compiled, else as
    `per_task` gives them."""
    if model.network is not None and model.network.computes(params):
        return model.network.pack(params, tasks)
    return per_task(params, tasks)


def sums_by_name(model: Model, values: Params) -> Params:
    """Per-task values of parameters, packed or by name, summed over the tasks and under the parameters' own names."""
    sums = {name: sum_of_tasks(value) for name, value in values.items()}
    return sums if model.network is None else model.network.unpack(sums)


def replaced(model: Model, params: Params, values: Params) -> Params:
    """Per-task parameters, packed or by name, with other values of some of them: [*shape], which all tasks share, or
    [t, *shape]."""
    if model.network is not None and is_packed(params):
        return model.network.replaced(params, values)
    shared = {name: value for name, value in values.items() if value.dim() < params[name].dim()}
    return params | values | per_task(shared, len(next(iter(params.values()))))


def per_task(params: Params, tasks: int) -> Params:
    """Every parameter with a leading task dimension, sharing memory; gradients add up over the tasks."""
    return {name: laid_out(p).expand(tasks, *p.shape) for name, p in params.items()}


def summed(values: Metrics) -> Metrics:
    """Per-task values [t], summed over the tasks and without their graph, as float64."""
    return {name: value.detach().double().sum() for name, value in values.items()}


def leaves(params: Params) -> Params:
    """Fresh leaves with the same values, to differentiate by."""
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def total_of(outcome: Outcome) -> Callable[[Params, Episode, int], Tensor]:
    """The summed loss of an outcome, with its graph."""
    return lambda params, episode, step: outcome(params, episode, step)["loss"].sum()


def gradient_of(outcome: Outcome) -> Callable[[Params, Episode, int], ChunkResult]:
    """The gradient of the summed loss of an outcome, and the other values' sums."""

    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        theta = leaves(params)
        with torch.enable_grad():
            values = outcome(theta, episode, step)
            # On a CPU not so: torch imports sympy, for a second, to compare the shapes of losses and factors.
            losses = values["loss"]
            total, factors = (losses, one_for_each(losses)) if losses.is_cuda else (losses.sum(), None)
            grads = torch.autograd.grad(total, list(theta.values()), factors, allow_unused=True, materialize_grads=True)
        return ChunkResult(dict(zip(theta, grads, strict=True)), summed(values), len(values["loss"]))

    return meta_grad


def conjugate_gradient(product: Callable[[Params], Params], right: Params, steps: int) -> tuple[Params, Tensor]:
    """Solves A x = b from x = b, for every task by itself (Hestenes and Stiefel 1952).

    Args:
        product: v ↦ A v. A must be symmetric; only a system with a positive definite A is solved.
        right: b, each [t, …].
        steps: the most steps. A task stops early if its residual is zero, or if b or a direction shows that its A is
            not positive definite.

    Returns:
        x, and ‖A x − b‖ / ‖b‖ [t].
    """
    x, image = right, product(right)
    residual = direction = {name: value - image[name] for name, value in right.items()}
    before, going = _dot(residual, residual), _dot(right, image) > 0
    for _ in range(steps):
        image = product(direction)
        curvature = _dot(direction, image)
        going = going & (curvature > 0)
        length = torch.where(going, _ratio(before, curvature), 0.0)
        x, residual = _along(x, direction, length), _along(residual, image, -length)
        now = _dot(residual, residual)
        direction = _along(residual, direction, _ratio(now, before))
        before = now
    return x, _ratio(before, _dot(right, right)).sqrt()


def _dot(a: Params, b: Params) -> Tensor:
    """The inner product of every task's parameters, [t]."""
    return torch.stack([(a[name] * b[name]).reshape(len(a[name]), -1).sum(dim=1) for name in a]).sum(dim=0)


def _along(start: Params, direction: Params, lengths: Tensor) -> Params:
    """start + length · direction; each task has its own length [t]."""
    return {name: p + lengths.view(-1, *[1] * (p.dim() - 1)) * direction[name] for name, p in start.items()}


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
