"""MAML, Finn et al. 2017 (arXiv 1703.03400).

Algorithm 1 and 2: θ′ᵢ = θ − α ∇θ L_support(θ) for each task, one or several times (line 6), then
θ ← θ − β ∇θ Σᵢ L_query(θ′ᵢ) (line 8), which differentiates through the inner steps. First-order MAML
(section 5.2) treats the inner gradients as constants.

Differences from the authors' code:

- Their cross-entropy sums over the ways, ours is a mean: their inner rates of 0.4 (5-way) and 0.1 (20-way) both equal
  2.0.
- Their norms have a shift and no scale, and inner steps do not change it. Ours have both, and the inner steps change
  both: Algorithm 1 has no exception.
- Their Omniglot head starts from a normal distribution with σ = 1, ours with 0.01. Their convolutions have a bias,
  which the norm cancels.
- They draw 200,000 training tasks beforehand, and clip the meta-gradient of mini-ImageNet. We always draw new ones, and
  clip only if `optimizer.clip_norm` or `clip_value` says so.
"""

from collections.abc import Iterator

from metalearn.algorithms.common.inner import SGD, InnerOptimizer, check_descent, gradient_learner, support_descent
from metalearn.types import Algorithm, Batch, Model, Params


def maml(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    eval_lr_factor: float = 1.0, first_order: bool = False, checkpoint_steps: bool | str = False,
) -> Algorithm:  # fmt: skip
    """Model-agnostic meta-learning. Raises ValueError for a rate or factor that is not above 0, or a negative number of
    steps.

    Args:
        model: the network to be adapted.
        inner: the optimiser of the inner steps.
        inner_lr: α, the rate of the inner steps on the mean loss of a task's support set.
        inner_steps: inner steps in meta-training.
        eval_steps: inner steps in validation and test.
        eval_lr_factor: validation and test multiply the inner rate by it.
        first_order: drop the second derivatives from the meta-gradient.
        checkpoint_steps: keep no graph of the inner steps; the meta-gradient computes each step a second time. With
            `nested`, keep the parameters of log₂(inner_steps) steps, and compute each step about as many times.
    """
    check_descent(
        inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps, eval_lr_factor=eval_lr_factor,
        first_order=first_order, checkpoint_steps=checkpoint_steps,
    )  # fmt: skip

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        rate = inner_lr if order else eval_lr_factor * inner_lr
        return support_descent(
            model, params, support, inner=inner, rate=rate, steps=steps, order=order, checkpoint=checkpoint_steps
        )

    order = 1 if first_order else 2
    learner = gradient_learner(model, path, inner_steps=inner_steps, eval_steps=eval_steps, order=order)
    return learner._replace(adds_in_pairs=True)
