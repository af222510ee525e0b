"""A baseline that does not meta-learn: every task is learned from the same random start.

A learner that does no better has learned nothing from other tasks.
"""

from collections.abc import Iterator

import torch

from metalearn.algorithms.common.inner import SGD, InnerOptimizer, check_descent, evaluated_by_descent, support_descent
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Model, Params, summed


def scratch(*, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, eval_steps: int) -> Algorithm:
    """Learns each task by itself. Its meta-gradient is zero: `trainer.steps=0` saves the time. Raises ValueError for a
    rate that is not above 0, or a negative number of steps.

    Args:
        model, inner, inner_lr, eval_steps: as for `maml`.
    """
    check_descent(inner_lr=inner_lr, eval_steps=eval_steps)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        # Order 0: nothing differentiates through these steps.
        return support_descent(model, params, support, inner=inner, rate=inner_lr, steps=steps, order=0)

    @torch.no_grad()
    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        (support, query) = episode
        values = model.metrics(model.start(params, len(support.x)), query, support.x)
        return ChunkResult({name: torch.zeros_like(p) for name, p in params.items()}, summed(values), len(support.x))

    evaluated = evaluated_by_descent(model, path, eval_steps)
    return Algorithm(model.init, meta_grad, *evaluated, loss=None, computes=model.loss)
