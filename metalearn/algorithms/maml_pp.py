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
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.functional import Outcome, replaced, results, start_of
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, Rate, constant, descent
from metalearn.algorithms.common.learners import (
    RATE,
    Init,
    InnerPath,
    check_descent,
    extended,
    gradient_learner,
    part,
    without,
)
from metalearn.checks import Invalid, true_or_false, whole_number
from metalearn.types import Algorithm, Batch, Episode, Metrics, Model, Params


def maml_pp(
    *,
    model: Model,
    inner: InnerOptimizer = SGD,
    inner_lr: float,
    inner_steps: int,
    eval_steps: int,
    multi_step_until: int,
    first_order_until: int,
    learned_rates: bool,
    per_step_norm: bool,
    checkpoint_steps: bool = False,
) -> Algorithm:
    """MAML with the changes of "How to train your MAML".

    Args:
        model: the network to be adapted.
        inner: the optimiser of the inner steps, whose directions the rates multiply.
        inner_lr: the rate of the inner steps; if rates are learned, their initial value.
        inner_steps: inner steps in meta-training.
        eval_steps: inner steps in validation and test. Steps beyond `inner_steps` share the rates and norms of the
            last one.
        multi_step_until: meta-steps in which the query losses after all inner steps count. Their weights are equal at
            first; then the weight of the last one grows until it alone counts. 0: it alone counts from the start.
        first_order_until: meta-steps with first-order gradients; later ones have second-order gradients.
        learned_rates: learn a rate for every parameter tensor and inner step.
        per_step_norm: learn scales and shifts of the norms for every inner step; the inner steps do not adapt them.
        checkpoint_steps: keep no graph of the inner steps; the meta-gradient computes each step a second time.

    Raises:
        ValueError: a rate that is not above 0, a number of steps out of range, or `per_step_norm` for a model without
            norms.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    whole_number("inner_steps", inner_steps, at_least=1)
    whole_number("multi_step_until", multi_step_until, at_least=0)
    whole_number("first_order_until", first_order_until, at_least=0)
    true_or_false("learned_rates", learned_rates)
    true_or_false("per_step_norm", per_step_norm)
    true_or_false("checkpoint_steps", checkpoint_steps)
    if per_step_norm and not model.norms:
        raise Invalid("per_step_norm", True, "this model has no batch norm", "type KEY=false")
    per_step = PerStep(inner_steps, learned_rates, model.norms if per_step_norm else ())
    path = _path(model, inner, inner_lr, per_step, checkpoint_steps)
    outcome = _multi_step_loss(model, path, inner_steps, multi_step_until, first_order_until)
    return gradient_learner(model, path, eval_steps=eval_steps, init=_init(model, inner_lr, per_step), outcome=outcome)


class PerStep(NamedTuple):
    """What each inner step learns for itself: rates, if `rates`, and the scales and shifts that `norms` names."""

    steps: int
    rates: bool
    norms: tuple[str, ...]

    def place(self, step: int) -> int:
        """The place of a step's values; steps beyond the last one share its values."""
        return max(0, min(step, self.steps - 1))


def _init(model: Model, inner_lr: float, per_step: PerStep) -> Init:
    (steps, learned_rates, norms) = per_step

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        rates = {name: value.new_full((steps,), inner_lr) for name, value in weights.items() if name not in norms}
        stacked = {name: torch.stack([weights[name]] * steps) for name in norms}
        return extended(weights | stacked, RATE, rates if learned_rates else {})

    return init


def _path(model: Model, inner: InnerOptimizer, inner_lr: float, per_step: PerStep, checkpoint: bool) -> InnerPath:
    norms = per_step.norms

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        tasks, rates = support.x.shape[0], part(RATE, params)
        weights = without(RATE, params)
        first = {name: value[0] if name in norms else value for name, value in weights.items()}

        def with_norms(adapted: Params, step: int) -> Params:
            """The parameters with the norms of a step: what the inner steps give for these is not used."""
            return replaced(model, adapted, {name: params[name][per_step.place(step)] for name in norms})

        def loss(adapted: Params, step: int) -> Tensor:
            return results(model, with_norms(adapted, step), support, twice=order == 2)["loss"]

        def learned(step: int) -> Rate:
            place = per_step.place(step)
            none = rates[next(iter(rates))].new_zeros(())
            by_name = {name: (none if name in norms else rates[name][place]).expand_as(p) for name, p in first.items()}
            return start_of(model, by_name, tasks)

        start = start_of(model, first, tasks)
        rate = learned if per_step.rates else constant(inner_lr)
        adapting = descent(loss, start, optimizer=inner, rate=rate, steps=steps, order=order, checkpoint=checkpoint)
        for done, adapted in enumerate(adapting):
            yield with_norms(adapted, done - 1)

    return path


def _multi_step_loss(
    model: Model, path: InnerPath, inner_steps: int, multi_step_until: int, first_order_until: int
) -> Outcome:
    """The sum of the query losses after the inner steps, each times its weight (equation 4)."""

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        weights = step_weights(step, inner_steps, multi_step_until)
        order = 1 if step <= first_order_until else 2
        values: list[Metrics] = []
        for adapted, weight in zip(path(params, support, inner_steps, order), [0.0, *weights], strict=True):
            if weight:
                metrics = results(model, adapted, query, support.x, twice=False)
                values.append(metrics | {"loss": metrics["loss"] * weight})
        return values[-1] | {"loss": torch.stack([value["loss"] for value in values]).sum(dim=0)}

    return outcome


def step_weights(step: int, inner_steps: int, until: int) -> list[float]:
    """The weights of the query losses after the inner steps, at a meta-step (from 1); they add up to 1."""
    remaining = max(0.0, 1 - (step - 1) / until) if until else 0.0
    others = [remaining / inner_steps] * (inner_steps - 1)
    return [*others, 1 - sum(others)]
