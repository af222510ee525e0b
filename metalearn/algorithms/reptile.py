"""Reptile, Nichol et al. 2018 (arXiv 1803.02999).

Algorithm 2: φᵢ = k inner steps on task i from θ, then θ ← θ + ε (1/n) Σᵢ (φᵢ − θ). Here the sum of θ − φᵢ takes the
place of the gradient; `optimizer=sgd` with rate ε then does that step. There is no graph of the inner steps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from metalearn.algorithms.common.functional import by_name, results, start_of, summed
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, TaskLoss, constant, descent, last
from metalearn.algorithms.common.learners import check_descent, evaluated_by_descent
from metalearn.checks import whole_number
from metalearn.nn.packing import sum_of_tasks
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Model, Params


def reptile(
    *,
    model: Model,
    inner: InnerOptimizer = SGD,
    inner_lr: float,
    inner_steps: int,
    eval_steps: int,
    inner_batch: int | None,
    eval_batch: int | None,
) -> Algorithm:
    """Learns a start that is near to the ends of many trainings.

    A training task has no queries: its support and query samples are one set.

    Args:
        model: the network to be adapted.
        inner: the optimiser of the inner steps, with a fresh state for every task.
        inner_lr: the rate of the inner steps.
        inner_steps: inner steps in meta-training, one mini-batch each.
        eval_steps: inner steps in validation and test.
        inner_batch: most samples of a mini-batch in meta-training; None: all.
        eval_batch: most samples of a mini-batch in validation and test; None: all.

    Raises:
        ValueError: a rate that is not above 0, a negative number of steps, or an empty mini-batch.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    for name, size in (("inner_batch", inner_batch), ("eval_batch", eval_batch)):
        if size is not None:
            whole_number(name, size, at_least=1)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        start = start_of(model, params, support.x.shape[0])
        loss = batch_loss(model, support, eval_batch)
        return descent(loss, start, optimizer=inner, rate=constant(inner_lr), steps=steps, order=0)

    @torch.no_grad()
    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        (support, query) = episode
        tasks = support.x.shape[0]
        samples = Batch(*(torch.cat([known, more], dim=1) for known, more in zip(support, query, strict=True)))
        start = start_of(model, params, tasks)
        loss = batch_loss(model, samples, inner_batch)
        end = last(descent(loss, start, optimizer=inner, rate=constant(inner_lr), steps=inner_steps, order=0))
        grads = by_name(model, {name: sum_of_tasks(start[name] - end[name]) for name in start})
        return ChunkResult(grads, summed(results(model, end, query, support.x, twice=False)), tasks)

    return Algorithm(model.init, meta_grad, *evaluated_by_descent(model, path, eval_steps), loss=None)


def batch_loss(model: Model, samples: Batch, size: int | None) -> TaskLoss:
    """The inner objective: each task's loss [t] on one mini-batch per step, in turn."""
    batches = mini_batches(samples, size)

    def loss(params: Params, step: int) -> Tensor:
        batch = batches[step % len(batches)]
        return results(model, params, batch, twice=False)["loss"]

    return loss


def mini_batches(samples: Batch, size: int | None) -> list[Batch]:
    """The samples in mini-batches of at most `size`, as even as possible; the classes take turns.

    Support and query samples each come sorted by class. So the samples are put in the order of how often their class
    has come before.
    """
    if size is None:
        return [samples]
    x, y = samples
    if not y.is_floating_point():
        earlier = (y.unsqueeze(2) == y.unsqueeze(1)).tril(-1).sum(dim=2)
        order = (earlier * (y.max() + 1) + y).argsort(dim=1)
        rows = torch.arange(len(y), device=y.device).unsqueeze(1)
        x, y = x[rows, order], y[rows, order]
    count = -(-y.shape[1] // size)
    return [Batch(*pair) for pair in zip(x.tensor_split(count, dim=1), y.tensor_split(count, dim=1), strict=True)]
