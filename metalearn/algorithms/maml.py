"""MAML, Finn et al. 2017 (arXiv 1703.03400).

Algorithm 1 and 2: θ′ᵢ = θ − α ∇θ L_support(θ) for each task, one or several times (line 6), then
θ ← θ − β ∇θ Σᵢ L_query(θ′ᵢ) (line 8), which differentiates through the inner steps. First-order MAML
(section 5.2 there) takes the inner gradients for constants.
"""

from collections.abc import Iterator

from metalearn.checks import real_number, true_or_false, whole_number
from metalearn.functional import descend, descent, gradient_learner, objective, per_task, support_loss
from metalearn.types import Algorithm, Batch, Episode, Metrics, Model, Params


def maml(*, model: Model, inner_lr: float, inner_steps: int, eval_steps: int, first_order: bool = False) -> Algorithm:
    """Model-agnostic meta-learning.

    Args:
        model: the network to be adapted.
        inner_lr: α, the rate of the inner steps on the mean loss of a task's support set.
        inner_steps: inner steps in meta-training.
        eval_steps: inner steps in validation and test.
        first_order: drop the second derivatives from the meta-gradient.

    Raises:
        ValueError: a rate that is not above 0, or a negative number of steps.
    """
    real_number("inner_lr", inner_lr, above=0)
    whole_number("inner_steps", inner_steps, at_least=0)
    whole_number("eval_steps", eval_steps, at_least=0)
    true_or_false("first_order", first_order)
    order = 1 if first_order else 2

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        start = per_task(params, support.x.shape[0])
        adapted = descend(support_loss(model, support), start, lr=inner_lr, steps=inner_steps, order=order)
        return objective(model.apply(adapted, query.x, support.x), query.y)

    def trajectory(params: Params, support: Batch, steps: int) -> Iterator[Params]:
        start = per_task(params, support.x.shape[0])
        return descent(support_loss(model, support), start, lr=inner_lr, steps=steps, order=0)

    return gradient_learner(model, outcome, trajectory, eval_steps)
