"""Meta-SGD, Li et al. 2017 (arXiv 1707.09835).

Algorithm 1: θ′ = θ − α ∘ ∇θ L_support(θ). The vector α has the size of θ and is learned with it: every single weight
has its own rate, which may become negative.

The rates are the same at all inner steps; the outer step changes them with θ (line 9). No code of the authors was found
to compare with.
"""

from collections.abc import Iterator

import torch
from torch import Generator

from metalearn.algorithms.common.arithmetic import RATE, part, prefixed
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, check_descent, gradient_learner, support_descent
from metalearn.types import Algorithm, Batch, Model, Params


def meta_sgd(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    eval_lr_factor: float = 1.0, first_order: bool = False, checkpoint_steps: bool | str = False,
) -> Algorithm:  # fmt: skip
    """MAML with a learned rate for every weight. Raises ValueError for a rate or factor that is not above 0, or a
    negative number of steps.

    Args:
        inner: the optimiser of the inner steps, whose directions the rates multiply.
        inner_lr: the initial value of every rate, for steps on the mean loss of a task's support set.
        eval_lr_factor: validation and test multiply the learned rates by it.
        model, inner_steps, eval_steps, first_order, checkpoint_steps: as for `maml`.
    """
    check_descent(
        inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps, eval_lr_factor=eval_lr_factor,
        first_order=first_order, checkpoint_steps=checkpoint_steps,
    )  # fmt: skip

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        return weights | prefixed(RATE, {name: torch.full_like(value, inner_lr) for name, value in weights.items()})

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        rates = part(RATE, params)
        weights = {name: params[name] for name in rates}
        if order == 0:
            rates = {name: eval_lr_factor * rate for name, rate in rates.items()}
        return support_descent(
            model, weights, support, inner=inner, rate=rates, steps=steps, order=order, checkpoint=checkpoint_steps
        )

    order = 1 if first_order else 2
    learner = gradient_learner(model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=order, init=init)
    return learner._replace(adds_in_pairs=True)
