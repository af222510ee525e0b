"""A baseline: a classifier of all training classes, trained on plain samples, then a new head for every task.

Chen et al. 2019 (arXiv 1904.04232), "Baseline": the body is trained as in supervised learning, then
frozen, and a linear head is trained on its features of a task's support set. With `whole`, a task trains the body, too.
"""

from collections.abc import Iterator

from torch import Tensor

from metalearn.algorithms.common.functional import objective, per_task
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, constant, descent
from metalearn.algorithms.common.learners import (
    check_descent,
    evaluated_by_descent,
    features_and_head,
    trained_on_samples,
)
from metalearn.checks import true_or_false, whole_number
from metalearn.types import Algorithm, Batch, Model, Params


def finetune(
    *,
    model: Model,
    inner: InnerOptimizer = SGD,
    inner_lr: float,
    eval_steps: int,
    ways: int,
    whole: bool,
) -> Algorithm:
    """Supervised learning, then fine-tuning.

    Args:
        model: the network; its head has an output for every training class.
        inner: the optimiser of the inner steps.
        inner_lr: the rate of the inner steps on the mean loss of a task's support set.
        eval_steps: inner steps in validation and test.
        ways: classes of a task. They are the outputs of its head, which starts at zero.
        whole: train the body on a task, too.

    Raises:
        ValueError: a rate that is not above 0, a negative number of steps, or a model without a linear head.
    """
    check_descent(inner_lr=inner_lr, inner_steps=0, eval_steps=eval_steps)
    whole_number("ways", ways, at_least=2)
    true_or_false("whole", whole)
    features, head = features_and_head(model)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        theta = per_task(params, support.x.shape[0])
        new_head = {name: theta[name].new_zeros(len(support.x), ways, *params[name].shape[1:]) for name in head.params}
        known = None if whole else features(theta, support.x)

        def loss(adapted: Params, step: int) -> Tensor:
            inputs = features(theta | adapted, support.x) if known is None else known
            return objective(head.apply(adapted, inputs, 0), support.y)["loss"]

        start = theta | new_head if whole else new_head
        for adapted in descent(loss, start, optimizer=inner, rate=constant(inner_lr), steps=steps, order=0):
            yield theta | adapted

    return trained_on_samples(model.apply, model.init, *evaluated_by_descent(model, path, eval_steps))
