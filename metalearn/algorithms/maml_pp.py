"""MAML++, Antoniou et al. 2019 (arXiv 1810.09502).

Section 4 changes MAML in six ways, each of which can be switched by itself here: the multi-step loss,
annealing of the derivative order, batch-norm scales and shifts of every inner step's own, a learned rate for every
layer and inner step, and, by `optimizer.schedule=cosine`, the cosine schedule of the outer rate. The sixth, batch
statistics of every step, is how all our models normalise.
"""

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.functional import objective, per_task
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, Rate, constant, descent
from metalearn.algorithms.common.learners import RATE, check_descent, gradient_learner, part, prefixed
from metalearn.checks import true_or_false, whole_number
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
) -> Algorithm:
    """MAML with the changes of "How to train your MAML".

    Args:
        model: the network to be adapted.
        inner: the optimiser of the inner steps, whose directions the rates multiply.
        inner_lr: the rate of the inner steps, or where every learned one starts.
        inner_steps: inner steps in meta-training.
        eval_steps: inner steps in validation and test; what each has of its own, those beyond `inner_steps` share
            with the last.
        multi_step_until: meta-steps in which the query losses after all inner steps count; at first equally, then
            more and more the last one, at the end it alone. 0: only the last one, always.
        first_order_until: meta-steps with first-order gradients, before second-order ones. 0: none.
        learned_rates: learn a rate for every parameter tensor and inner step.
        per_step_norm: learn scales and shifts of the norms for every inner step; they are not adapted then.

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
    if per_step_norm and not model.norms:
        raise ValueError("per_step_norm=True: this model has no batch norm; type per_step_norm=false")
    norms = model.norms if per_step_norm else ()

    def at(step: int) -> int:
        return max(0, min(step, inner_steps - 1))

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        rates = {name: value.new_full((inner_steps,), inner_lr) for name, value in weights.items() if name not in norms}
        own = {name: torch.stack([weights[name]] * inner_steps) for name in norms}
        return weights | own | (prefixed(RATE, rates) if learned_rates else {})

    def path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        everything = per_task(params, support.x.shape[0])
        rates = part(RATE, everything)
        start = {name: value for name, value in everything.items() if not name.startswith(RATE) and name not in norms}

        def norms_at(step: int) -> Params:
            return {name: everything[name][:, at(step)] for name in norms}

        def loss(adapted: Params, step: int) -> Tensor:
            return objective(model.apply(adapted | norms_at(step), support.x), support.y)["loss"]

        def learned(step: int) -> Rate:
            return {name: _broadcast(rates[name][:, at(step)], start[name]) for name in start}

        rate = learned if learned_rates else constant(inner_lr)
        adapting = descent(loss, start, optimizer=inner, rate=rate, steps=steps, order=order)
        for done, adapted in enumerate(adapting):
            yield adapted | norms_at(done - 1)

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        weights = step_weights(step, inner_steps, multi_step_until)
        order = 1 if step <= first_order_until else 2
        values: list[Metrics] = []
        for adapted, weight in zip(path(params, support, inner_steps, order), [0.0, *weights], strict=True):
            if weight:
                found = objective(model.apply(adapted, query.x, support.x), query.y)
                values.append(found | {"loss": found["loss"] * weight})
        return values[-1] | {"loss": torch.stack([value["loss"] for value in values]).sum(dim=0)}

    return gradient_learner(model, path, eval_steps=eval_steps, init=init, outcome=outcome)


def step_weights(step: int, inner_steps: int, until: int) -> list[float]:
    """How much the query loss after each inner step counts at a meta-step (from 1); they add up to 1."""
    remaining = max(0.0, 1 - (step - 1) / until) if until else 0.0
    others = [remaining / inner_steps] * (inner_steps - 1)
    return [*others, 1 - sum(others)]


def _broadcast(rates: Tensor, parameter: Tensor) -> Tensor:
    """[t] → [t, 1, …] beside a parameter [t, …]."""
    return rates.view(-1, *[1] * (parameter.dim() - 1))
