"""A baseline: a classifier of all training classes, trained on plain samples, then a new head for every task.

Chen et al. 2019 (arXiv 1904.04232), "Baseline": the body is trained as in supervised learning, then
frozen, and a linear head is trained on its features of a task's support set. With `whole`, a task trains the body, too.

It needs a dataset of pictures in classes: the pictures of the training classes are its samples, and the others give the
tasks that evaluate it.

Differences from the authors' code:

- Theirs trains a head in 100 epochs of shuffled mini-batches of 4, from a random start; ours in `eval_steps` steps on
  the whole support set, from zero. Nothing is random, so the value of a task does not depend on a seed.
- They normalise features by running statistics; we by batch or support statistics.
"""

from collections.abc import Iterator

from torch import Tensor

from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    check_descent,
    descent,
    evaluated_by_descent,
    evaluated_by_new_heads,
    features_and_head,
    trained_on_samples,
)
from metalearn.algorithms.common.losses import objective
from metalearn.errors import switches, whole_number
from metalearn.nn.layers import per_task
from metalearn.types import Algorithm, Batch, Model, Params


def finetune(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, eval_steps: int, ways: int, whole: bool,
) -> Algorithm:  # fmt: skip
    """Supervised learning, then fine-tuning. Raises ValueError for a rate that is not above 0, a negative number of
    steps, or a model without a linear head.

    Args:
        model: the network; its head has an output for every training class.
        inner, inner_lr, eval_steps: as for `maml`.
        ways: classes of a task. They are the outputs of its head, which starts at zero.
        whole: train the body on a task, too.
    """
    check_descent(inner_lr=inner_lr, eval_steps=eval_steps)
    whole_number("ways", ways, at_least=2)
    switches(whole=whole)
    _, head = features_and_head(model)

    def classify(adapted: Params, features: Tensor) -> Tensor:
        return head.apply(adapted, features, 0)

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        tasks = len(support.x)
        start = {name: params[name].new_zeros(tasks, ways, *params[name].shape[1:]) for name in head.params}
        if whole:
            start = per_task(params, tasks) | start

        def loss(adapted: Params, step: int) -> Tensor:
            outputs = (model.apply if whole else classify)(adapted, support.x)
            return objective(outputs, support.y, model.loss)["loss"]

        return descent(loss, start, optimizer=inner, rate=inner_lr, steps=steps, order=order)

    if whole:
        evaluate, adapt = evaluated_by_descent(model, path, eval_steps)
    else:
        evaluate, adapt = evaluated_by_new_heads(model, path, classify, eval_steps)
    return trained_on_samples(model, adapt, evaluate)
