"""Small pure functions that the algorithms share."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.nn import laid_out
from metalearn.types import Algorithm, Apply, Batch, ChunkResult, Episode, Metrics, Model, Params, Stage

TaskLoss = Callable[[Params], Tensor]
"""Per-task losses [t] of per-task parameters."""

Outcome = Callable[[Params, Episode, int], Metrics]
"""From meta-parameters, episode and step to values per task [t], `loss` among them with its graph."""


def objective(outputs: Tensor, y: Tensor) -> Metrics:
    """What a prediction is worth, per task [t], as the kind of target decides.

    Classes (`y` [t, n] integers; `outputs` [t, n, ways] logits): mean cross-entropy as `loss`, and
    `accuracy`. Regression (`y` [t, n, d]): mean squared error as `loss` and `mse`.
    """
    if y.is_floating_point():
        mse = (outputs - y).square().mean(dim=(1, 2))
        return {"loss": mse, "mse": mse.detach()}
    return {name: values.mean(dim=1) for name, values in by_sample(outputs, y).items()}


def by_sample(logits: Tensor, y: Tensor) -> Metrics:
    """Cross-entropy as `loss`, and `accuracy`, of every sample [t, n]; `logits` [t, n, ways], `y` [t, n] integers."""
    losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    return {"loss": losses, "accuracy": (logits.detach().argmax(dim=-1) == y).to(logits.dtype)}


def one_after_the_other(stages: Sequence[Stage], *, ignores_support: bool) -> Apply:
    """A network as the sequence of its stages; normalised by the support set's statistics unless it ignores them."""

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        known = 0 if ignores_support or support_x is None else support_x.shape[1]
        h = torch.cat([support_x, x], dim=1) if known and support_x is not None else x
        for stage in stages:
            h = stage.apply(params, h, known)
        return h[:, known:]

    return apply


def support_loss(model: Model, support: Batch) -> TaskLoss:
    """The inner objective: each task's loss [t] on its own support set."""
    return lambda params: objective(model.apply(params, support.x), support.y)["loss"]


def per_task(params: Params, tasks: int) -> Params:
    """Every parameter with a leading task dimension, sharing memory; gradients add up over the tasks."""
    return {name: laid_out(p).expand(tasks, *p.shape) for name, p in params.items()}


def descent(loss: TaskLoss, params: Params, *, lr: float, steps: int, order: int) -> Iterator[Params]:
    """Gradient descent, one task beside the other: yields `params`, then the parameters after each step.

    `order` says how far one may differentiate through the steps: 2, exactly; 1, taking each step's
    gradient for a constant (first-order MAML); 0, not at all (evaluation: no graph is kept).
    """
    yield params
    for _ in range(steps):
        if order == 0:
            params = leaves(params)
        with torch.enable_grad():
            total = loss(params).sum()
            grads = torch.autograd.grad(total, list(params.values()), create_graph=order == 2)
        with torch.set_grad_enabled(order > 0 and torch.is_grad_enabled()):
            params = {name: p.add(g, alpha=-lr) for (name, p), g in zip(params.items(), grads, strict=True)}
        yield params


def descend(loss: TaskLoss, params: Params, *, lr: float, steps: int, order: int) -> Params:
    """The last of `descent`."""
    *_, adapted = descent(loss, params, lr=lr, steps=steps, order=order)
    return adapted


def summed(values: Metrics) -> Metrics:
    """Per-task values [t], summed over the tasks and without their graph, as float64."""
    return {name: value.detach().sum().double() for name, value in values.items()}


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
            grads = torch.autograd.grad(values["loss"].sum(), list(theta.values()))
        return ChunkResult(dict(zip(theta, grads, strict=True)), summed(values), len(values["loss"]))

    return meta_grad


def gradient_learner(
    model: Model,
    outcome: Outcome,
    trajectory: Callable[[Params, Batch, int], Iterator[Params]],
    eval_steps: int,
) -> Algorithm:
    """An algorithm that adapts by descent.

    `outcome(params, episode, step)` gives the per-task query `loss` [t] with its graph, and metrics
    beside it. `trajectory(params, support, steps)` yields the adapted parameters without a graph,
    before the first inner step and after each.
    """

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        columns = [
            objective(model.apply(adapted, query.x, support.x), query.y)
            for adapted in trajectory(params, support, eval_steps)
        ]
        return {name: torch.stack([column[name] for column in columns], dim=1) for name in columns[0]}

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        *_, final = trajectory(params, support, eval_steps if steps is None else steps)

        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return model.apply(final, x, support.x)

        return predict

    return Algorithm(model.init, gradient_of(outcome), evaluate, adapt, total_of(outcome), outcome)
