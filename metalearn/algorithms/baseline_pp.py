"""Baseline++, Chen et al. 2019 (arXiv 1904.04232), section 3.2: as finetune, with cosines in place of the linear head.

A class has a weight vector, and its logit is the cosine between this vector and the features, times a factor. Body and
vectors are trained as in supervised learning; then the body is frozen, and each task learns new vectors. They begin
at the means of the support features of the classes (as the imprinted weights of Qi et al. 2018, arXiv 1712.07136).

Differences from the authors' code:

- The vectors of a task start at random there. Without any step, ours send a query to the class whose mean has the
  largest cosine.
- Their factors are 2 for up to 200 classes and 30 above; here `scale` and `task_scale`.
- The training of a task, and the norms: as for finetune.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import class_means, cosines
from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    check_descent,
    descent,
    evaluated_by_new_heads,
    features_and_head,
    one_hot,
    trained_on_samples,
)
from metalearn.algorithms.common.losses import objective
from metalearn.errors import positive
from metalearn.types import Algorithm, Batch, Model, Params

VECTORS = "cosine.weight"  # the meta-parameter of the classes' vectors, [classes, d]


def baseline_pp(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, eval_steps: int, scale: float, task_scale: float,
) -> Algorithm:  # fmt: skip
    """Supervised learning with a cosine head, then a new cosine head for every task. Raises ValueError for a rate or
    factor that is not above 0, a negative number of steps, or a model without a linear head.

    Args:
        model: the network; its head has an output for every training class, and cosines take its place.
        inner, inner_lr, eval_steps: as for `maml`.
        scale: the factor of the cosines in training.
        task_scale: the factor of the cosines in a task.
    """
    check_descent(inner_lr=inner_lr, eval_steps=eval_steps)
    positive(scale=scale, task_scale=task_scale)
    features, head = features_and_head(model)

    def init(generator: Generator) -> Params:
        params = model.init(generator)
        body = {name: value for name, value in params.items() if name not in head.params}
        return body | {VECTORS: params[head.params[0]]}

    def classify(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return scale * cosines(features(params, x, support_x), params[VECTORS])

    def classify_task(adapted: Params, z: Tensor) -> Tensor:
        return task_scale * cosines(z, adapted[VECTORS])

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        start = {VECTORS: class_means(F.normalize(support.x, dim=2), one_hot(support, support.x.dtype))}

        def loss(adapted: Params, step: int) -> Tensor:
            return objective(classify_task(adapted, support.x), support.y, model.loss)["loss"]

        return descent(loss, start, optimizer=inner, rate=inner_lr, steps=steps, order=order)

    evaluate, adapt = evaluated_by_new_heads(model, path, classify_task, eval_steps)
    return trained_on_samples(model, adapt, evaluate, classify=classify, init=init)
