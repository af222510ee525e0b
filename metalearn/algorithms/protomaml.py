"""Proto-MAML, Triantafillou et al. 2020 (arXiv 1903.03096), section 3.

MAML whose last layer starts, in each task, as the prototypical network of its support set: with the mean c_k of the
features of class k, the weights of its output are 2 c_k and the bias is −‖c_k‖². So the logits before the first inner
step are −‖z − c_k‖² but for ‖z‖², which is the same for all classes. The inner steps change all parameters, and the
meta-gradient goes through the start of the last layer, too.

Differences from the authors' code:

- Their inner steps leave scales and shifts of norms alone, unless asked. Ours change them, as MAML does.
- They train on tasks of different sizes, and take more inner steps in the test than in training.
"""

from collections.abc import Iterator

from metalearn.algorithms.common.arithmetic import class_means
from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    check_descent,
    features_and_head,
    gradient_learner,
    one_hot,
    support_descent,
    without_head,
)
from metalearn.types import Algorithm, Batch, Model, Params


def protomaml(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    eval_lr_factor: float = 1.0, first_order: bool = False, checkpoint_steps: bool | str = False,
) -> Algorithm:  # fmt: skip
    """MAML from the prototypes of each task. Raises ValueError for a rate or factor that is not above 0, a negative
    number of steps, or a model without a linear head with a bias.

    Args:
        model: the network; the classes of a task make its head.
        inner, inner_lr, inner_steps, eval_steps, eval_lr_factor, first_order, checkpoint_steps: as for `maml`.
    """
    check_descent(
        inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps, eval_lr_factor=eval_lr_factor,
        first_order=first_order, checkpoint_steps=checkpoint_steps,
    )  # fmt: skip
    _, head = features_and_head(model)
    if len(head.params) < 2:
        raise ValueError("model: this algorithm needs a last layer with a bias; type model=conv4, for example")
    (weight, bias) = head.params

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        features = model.features_of(params, support.x.shape[0])(support.x)
        means = class_means(features, one_hot(support, features.dtype))
        start = {weight: 2 * means, bias: -means.square().sum(dim=2)}
        blank = {name: value[0].detach() for name, value in start.items()}  # of this shape, for any number of classes
        return support_descent(
            model, params | blank, support, inner=inner, rate=inner_lr if order else eval_lr_factor * inner_lr,
            steps=steps, order=order, checkpoint=checkpoint_steps, replaced=start,
        )  # fmt: skip

    order = 1 if first_order else 2
    return gradient_learner(
        model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=order, init=without_head(model)
    )
