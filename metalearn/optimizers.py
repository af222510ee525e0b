"""Outer optimisers: what moves the meta-parameters. The rate is a pure function of the step."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from metalearn.checks import one_of, real_number, whole_number
from metalearn.types import Params


class OuterOptimizer(NamedTuple):
    """`start(params)` makes the torch optimiser; `rate(step, steps)` is the rate of a step (from 1)."""

    start: Callable[[Params], torch.optim.Optimizer]
    rate: Callable[[int, int], float]


def adam(
    *, lr: float, beta1: float, beta2: float, eps: float, schedule: str, min_lr: float, warmup: int
) -> OuterOptimizer:
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980).

    Args:
        lr: the rate.
        beta1, beta2, eps: as in the paper.
        schedule: `constant`, or `cosine`: from `lr` to `min_lr` at the last step (arXiv 1608.03983,
            equation 5, without restarts).
        min_lr: where `cosine` ends.
        warmup: steps over which the rate rises linearly to its schedule.

    Raises:
        ValueError: a rate that is not above 0, a decay outside [0, 1), or an unknown schedule.
    """
    real_number("lr", lr, above=0)
    real_number("eps", eps, above=0)
    real_number("min_lr", min_lr, at_least=0)
    whole_number("warmup", warmup, at_least=0)
    one_of("schedule", schedule, ("constant", "cosine"))
    for name, decay in (("beta1", beta1), ("beta2", beta2)):
        real_number(name, decay, at_least=0)
        if decay >= 1:
            raise ValueError(f"{name}={decay}: must be below 1; type {name}=0.9")

    def start(params: Params) -> torch.optim.Optimizer:
        return torch.optim.Adam(params.values(), lr=lr, betas=(beta1, beta2), eps=eps)

    def rate(step: int, steps: int) -> float:
        progress = (step - 1) / max(steps, 1)
        falling = min_lr + (lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2
        return (falling if schedule == "cosine" else lr) * min(1.0, step / (warmup + 1))

    return OuterOptimizer(start, rate)
