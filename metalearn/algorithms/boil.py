"""BOIL, Oh et al. 2021 (arXiv 2008.08882).

The opposite of ANIL: MAML whose inner steps change the body only (the inner rate of the head is zero). The outer step
changes everything.

The model must end in one linear layer. As in the authors' code, losses are means and norms use batch statistics. They
have colour photographs with 15 queries a class; the experiment on Omniglot is ours.
"""

from collections.abc import Iterator

import torch

from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    check_descent,
    features_and_head,
    gradient_learner,
    support_descent,
)
from metalearn.types import Algorithm, Batch, Model, Params


def boil(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    eval_lr_factor: float = 1.0, first_order: bool = False, checkpoint_steps: bool | str = False,
) -> Algorithm:  # fmt: skip
    """Body-only update in the inner loop. Raises ValueError for a rate or factor that is not above 0, a negative number
    of steps, or a model without a linear head.

    Args:
        model: the network; all but its head is adapted.
        inner, inner_lr, inner_steps, eval_steps, eval_lr_factor, first_order, checkpoint_steps: as for `maml`.
    """
    check_descent(
        inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps, eval_lr_factor=eval_lr_factor,
        first_order=first_order, checkpoint_steps=checkpoint_steps,
    )  # fmt: skip
    _, head = features_and_head(model)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        rate = inner_lr if order else eval_lr_factor * inner_lr
        # The head has a rate of 0, and is not left out: packed parameters are one tensor.
        rates = {name: torch.full_like(p, 0.0 if name in head.params else rate) for name, p in params.items()}
        return support_descent(
            model, params, support, inner=inner, rate=rates, steps=steps, order=order, checkpoint=checkpoint_steps
        )

    order = 1 if first_order else 2
    learner = gradient_learner(model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=order)
    return learner._replace(adds_in_pairs=True)
