"""MAML++, Antoniou et al. 2019 (arXiv 1810.09502).

Section 4 changes MAML in six ways. Five have a switch of their own here: the multi-step loss, the annealing of the
derivative order, batch-norm scales and shifts for every inner step, a learned rate for every layer and inner step, and
the cosine schedule of the outer rate (`optimizer.schedule=cosine`). The sixth, batch statistics for every step, is how
all our models normalise.

The multi-step loss (equation 4) is Σⱼ wⱼ L_query(θⱼ) over the inner steps j, where θⱼ₊₁ = θⱼ − αⱼ ∇L_support(θⱼ). With
all switches off, MAML++ is MAML, bit for bit. In evaluation, inner steps beyond `inner_steps` share the rates and norms
of the last.

Differences from the authors' code:

- They keep running statistics for every inner step, which never reach an output. We keep none.
- Their loss weights change once per epoch of 500 steps, with a lower limit; ours fall at every meta-step and reach 0 at
  `multi_step_until`. Their cosine changes once per epoch, ours at every step.
- They have K + 1 rates for K steps, of which the last is never used.
- Their Omniglot config pools and has leaky ReLUs and 8 tasks a step: `experiment=maml_pp_omniglot_paper`.
- They test the mean of the five checkpoints with the best validation, we one. They rotate in training only, we in the
  test, too.
"""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import RATE, part, prefixed, without
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, Rate, Rates, check_descent, descent, gradient_learner
from metalearn.errors import Invalid, counts, not_negative, switches
from metalearn.types import Algorithm, Batch, Episode, Metrics, Model, Params


def maml_pp(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    multi_step_until: int, first_order_until: int, learned_rates: bool, per_step_norm: bool,
    checkpoint_steps: bool = False,
) -> Algorithm:  # fmt: skip
    """MAML with the changes of "How to train your MAML". Raises ValueError for a rate that is not above 0, a number of
    steps out of range, or `per_step_norm` for a model without norms.

    Args:
        model, inner_steps, checkpoint_steps: as for `maml`, without `nested`.
        inner: the optimiser of the inner steps, whose directions the rates multiply.
        inner_lr: the rate of the inner steps; if rates are learned, their initial value.
        eval_steps: inner steps in validation and test. Steps beyond `inner_steps` share the rates and norms of the
            last one.
        multi_step_until: meta-steps in which the query losses after all inner steps count. Their weights are equal at
            first; then the weight of the last one grows until it alone counts. 0: it alone counts from the start.
        first_order_until: meta-steps with first-order gradients; later ones have second-order gradients.
        learned_rates: learn a rate for every parameter tensor and inner step.
        per_step_norm: learn scales and shifts of the norms for every inner step; the inner steps do not adapt them.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    counts(inner_steps=inner_steps)
    not_negative(multi_step_until=multi_step_until, first_order_until=first_order_until)
    switches(learned_rates=learned_rates, per_step_norm=per_step_norm, checkpoint_steps=checkpoint_steps)
    if per_step_norm and not model.norms:
        raise Invalid("per_step_norm", True, "this model has no batch norm", "type KEY=false")
    norms = model.norms if per_step_norm else ()

    def place(step: int) -> int:
        """The place of a step's rates and norms; steps beyond the last one share its values."""
        return max(0, min(step, inner_steps - 1))

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        rates = {name: value.new_full((inner_steps,), inner_lr) for name, value in weights.items() if name not in norms}
        stacked = {name: torch.stack([weights[name]] * inner_steps) for name in norms}
        return weights | stacked | (prefixed(RATE, rates) if learned_rates else {})

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        tasks, rates, weights = support.x.shape[0], part(RATE, params), without(RATE, params)
        first = {name: value[0] if name in norms else value for name, value in weights.items()}

        def with_norms(adapted: Params, step: int) -> Params:
            """The parameters with the norms of a step: what the inner steps give for these is not used."""
            return model.replaced(adapted, {name: params[name][place(step)] for name in norms})

        def loss(adapted: Params, step: int) -> Tensor:
            return model.metrics(with_norms(adapted, step), support, twice=order == 2)["loss"]

        def learned(step: int) -> Rate:
            none = rates[next(iter(rates))].new_zeros(())
            values = {name: none if name in norms else rates[name][place(step)] for name in first}
            return model.start({name: value.expand_as(first[name]) for name, value in values.items()}, tasks)

        start = model.start(first, tasks)
        rate: Rates = learned if learned_rates else inner_lr
        adapting = descent(
            loss, start, optimizer=inner, rate=rate, steps=steps, order=order, checkpoint=checkpoint_steps
        )
        for done, adapted in enumerate(adapting):
            yield with_norms(adapted, done - 1)

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        """The sum of the query losses after the inner steps, each times its weight (equation 4)."""
        (support, query) = episode
        weights = step_weights(step, inner_steps, multi_step_until)
        order = 1 if step <= first_order_until else 2
        values: list[Metrics] = []
        for adapted, weight in zip(path(params, support, inner_steps, order), [0.0, *weights], strict=True):
            if weight:  # the start has none, and its query loss would cost a pass through the network
                metrics = model.metrics(adapted, query, support.x)
                values.append(metrics | {"loss": metrics["loss"] * weight})
        return values[-1] | {"loss": torch.stack([value["loss"] for value in values]).sum(dim=0)}

    return gradient_learner(model, path, eval_steps=eval_steps, init=init, outcome=outcome)


def step_weights(step: int, inner_steps: int, until: int) -> list[float]:
    """The weights of the query losses after the inner steps, at a meta-step (from 1); they add up to 1."""
    remaining = max(0.0, 1 - (step - 1) / until) if until else 0.0
    others = [remaining / inner_steps] * (inner_steps - 1)
    return [*others, 1 - sum(others)]
