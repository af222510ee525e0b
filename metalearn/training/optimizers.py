"""Outer optimisers, which update the meta-parameters. The rate is a pure function of the step."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as functional_adam
from torch.optim.sgd import sgd as functional_sgd

from metalearn.checks import Invalid, fraction, one_of, real_number, whole_number
from metalearn.training.flat import FlatOptimizer, OptimizerSettings
from metalearn.types import Optimizer, Params


class OuterOptimizer(NamedTuple):
    """`start(params)` makes the optimiser; `rate(step, steps)` is the rate of a step (from 1)."""

    start: Callable[[Params], Optimizer]
    rate: Callable[[int, int], float]


SCHEDULES = ("constant", "cosine", "linear", "step")


PIECE = 4096
"""Numbers that a GPU's multiprocessor updates in a step of Adam."""


def adam(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    schedule: str,
    min_lr: float,
    decay: float,
    decay_every: int,
    warmup: int,
) -> OuterOptimizer:
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980).

    Args:
        lr: the rate.
        beta1, beta2, eps: as in the paper.
        schedule, min_lr, decay, decay_every, warmup: as for `scheduled`.

    Raises:
        ValueError: a rate that is not above 0, a decay outside [0, 1), or an unknown schedule.
    """
    real_number("eps", eps, above=0)
    fraction("beta1", beta1)
    fraction("beta2", beta2)
    rate = scheduled(lr=lr, schedule=schedule, min_lr=min_lr, decay=decay, decay_every=decay_every, warmup=warmup)

    def start(params: Params) -> Optimizer:
        settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps}
        return FlatOptimizer(params, settings, _adam_step, _guarded_adam_step, ("step", "exp_avg", "exp_avg_sq"))

    return OuterOptimizer(start, rate)


def sgd(
    *, lr: float, momentum: float, schedule: str, min_lr: float, decay: float, decay_every: int, warmup: int
) -> OuterOptimizer:
    """Gradient descent, with momentum if it is above 0.

    Args:
        lr: the rate; Reptile's ε.
        momentum: μ in m ← μ m + g; θ ← θ − lr · m.
        schedule, min_lr, decay, decay_every, warmup: as for `scheduled`.

    Raises:
        ValueError: a rate that is not above 0, a momentum outside [0, 1), or an unknown schedule.
    """
    fraction("momentum", momentum)
    rate = scheduled(lr=lr, schedule=schedule, min_lr=min_lr, decay=decay, decay_every=decay_every, warmup=warmup)

    def start(params: Params) -> Optimizer:
        return FlatOptimizer(
            params, {"lr": lr, "momentum": momentum}, _sgd_step, _guarded_sgd_step, ("momentum_buffer",)
        )

    return OuterOptimizer(start, rate)


def _adam_step(params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings) -> None:
    """Changes `params` [P] and `state` as torch.optim.Adam does."""
    _begin_adam(params, state)
    # Not the Adam of the inner loop, which keeps a graph and rounds otherwise: a run's state is torch.optim.Adam's.
    beta1, beta2 = settings["betas"]
    functional_adam(
        [params], [grads], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]], amsgrad=False, beta1=beta1,
        beta2=beta2, lr=settings["lr"], weight_decay=0.0, eps=settings["eps"], maximize=False,
    )  # fmt: skip


def _begin_adam(params: Tensor, state: Params) -> None:
    if not state:
        state |= {
            "step": torch.zeros((), device=params.device),
            "exp_avg": torch.zeros_like(params),
            "exp_avg_sq": torch.zeros_like(params),
        }


def _guarded_adam_step(
    params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings, rate: Tensor, skip: Tensor
) -> None:
    """As `_adam_step`, for `FlatOptimizer.step_of_device`: torch's fused Adam, which can skip a step."""
    _begin_adam(params, state)
    state["step"].add_(1 - skip)
    beta1, beta2 = settings["betas"]
    # In pieces, since torch gives each tensor of up to 65,536 numbers to one multiprocessor.
    values, slopes, first, second = (
        list(flat.split(PIECE)) for flat in (params, grads, state["exp_avg"], state["exp_avg_sq"])
    )
    torch._fused_adam_(
        values, slopes, first, second, [], [state["step"]] * len(values), lr=rate, beta1=beta1, beta2=beta2,
        weight_decay=0.0, eps=settings["eps"], amsgrad=False, maximize=False, found_inf=skip,
    )  # fmt: skip


def _guarded_sgd_step(
    params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings, rate: Tensor, skip: Tensor
) -> None:
    """As `_sgd_step`, for `FlatOptimizer.step_of_device`."""
    if settings["momentum"]:
        kept = state.setdefault("momentum_buffer", torch.zeros_like(params))
        grads = settings["momentum"] * kept + grads
        kept.copy_(torch.where(skip > 0, kept, grads))
    params.sub_(torch.where(skip > 0, 0.0, rate * grads))


def _sgd_step(params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings) -> None:
    """Changes `params` [P] and `state` as torch.optim.SGD does."""
    buffers = [state.get("momentum_buffer")]
    functional_sgd(
        [params], [grads], buffers, weight_decay=0.0, momentum=settings["momentum"], lr=settings["lr"], dampening=0.0,
        nesterov=False, maximize=False,
    )  # fmt: skip
    if buffers[0] is not None:  # there is momentum
        state["momentum_buffer"] = buffers[0]


def scheduled(
    *, lr: float, schedule: str, min_lr: float, decay: float, decay_every: int, warmup: int
) -> Callable[[int, int], float]:
    """The rate of a step, as `rate(step, steps)`: steps count from 1, and a run has `steps` of them.

    Args:
        lr: the highest rate.
        schedule: `constant`; or from `lr` at the first step to `min_lr` after the last, by `linear` or `cosine`
            (arXiv 1608.03983, equation 5, without restarts); or `step`: times `decay` after every `decay_every` steps.
        min_lr: the rate at which `cosine` and `linear` end; the rate of `step` never falls below it.
        decay, decay_every: for `step`.
        warmup: steps over which the rate rises linearly to its schedule.

    Raises:
        ValueError: a number out of range, or an unknown schedule.
    """
    real_number("lr", lr, above=0)
    real_number("min_lr", min_lr, at_least=0)
    fraction("decay", decay)
    whole_number("decay_every", decay_every, at_least=1)
    whole_number("warmup", warmup, at_least=0)
    one_of("schedule", schedule, SCHEDULES)
    if schedule != "constant" and min_lr > lr:
        allowed = f"must be at most lr={lr:g}, the highest rate"
        raise Invalid("min_lr", f"{min_lr:g}", allowed, f"type KEY={lr:g}", quoted=False)

    def rate(step: int, steps: int) -> float:
        progress = (step - 1) / max(steps, 1)
        height = {
            "constant": lr,
            "cosine": min_lr + (lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2,
            "linear": min_lr + (lr - min_lr) * (1 - progress),
            "step": max(lr * decay ** ((step - 1) // decay_every), min_lr),
        }[schedule]
        return height * min(1.0, step / (warmup + 1))

    return rate
