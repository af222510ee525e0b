"""ANIL, Raghu et al. 2020 (arXiv 1909.09157).

MAML whose inner steps change the head only. The inner steps do not change the features of the support set, so these
are computed once. The outer step changes everything.

The model must end in one linear layer. No code of the authors was found to compare with.
"""

from collections.abc import Iterator

from torch import Tensor

from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    check_descent,
    descent,
    features_and_head,
    gradient_learner,
)
from metalearn.algorithms.common.losses import objective
from metalearn.nn.layers import per_task
from metalearn.types import Algorithm, Batch, Model, Params


def anil(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    eval_lr_factor: float = 1.0, first_order: bool = False,
) -> Algorithm:  # fmt: skip
    """Almost no inner loop. Raises ValueError for a rate or factor that is not above 0, a negative number of steps, or
    a model without a linear head.

    Args:
        model: the network; its head is adapted.
        inner, inner_lr, inner_steps, eval_steps, eval_lr_factor, first_order: as for `maml`.
    """
    check_descent(
        inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps, eval_lr_factor=eval_lr_factor,
        first_order=first_order,
    )  # fmt: skip
    _, head = features_and_head(model)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        rate = inner_lr if order else eval_lr_factor * inner_lr
        tasks = support.x.shape[0]
        theta = model.start(params, tasks)
        support_features = model.features_of(params, tasks)(support.x)  # once: no inner step changes the body
        start = per_task({name: params[name] for name in head.params}, tasks)

        def loss(adapted: Params, step: int) -> Tensor:
            return objective(head.apply(adapted, support_features, 0), support.y, model.loss)["loss"]

        for adapted in descent(loss, start, optimizer=inner, rate=rate, steps=steps, order=order):
            yield model.replaced(theta, adapted)

    return gradient_learner(model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=1 if first_order else 2)
