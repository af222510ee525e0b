"""Outer optimisers, which update the meta-parameters. The rate is a pure function of the step."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim._muon import muon as functional_muon
from torch.optim.adam import adam as functional_adam
from torch.optim.sgd import sgd as functional_sgd

from metalearn.checks import Invalid, fraction, one_of, real_number, whole_number
from metalearn.training.flat import FlatOptimizer, GuardedStep, OptimizerSettings, Step
from metalearn.types import STATE, Optimizer, Params


class OuterOptimizer(NamedTuple):
    """`start(params)` makes the optimiser; `rate(step, steps)` is the rate of a step (from 1). `by_norm`: it needs the
    whole gradient, whose norm it limits. `in_words(params)` says what a user should know of it, if anything."""

    start: Callable[[Params], Optimizer]
    rate: Callable[[int, int], float]
    by_norm: bool = False
    in_words: Callable[[Params], str] = lambda params: ""


SCHEDULES = ("constant", "cosine", "linear", "step")


class Rates(NamedTuple):
    """The keys of an optimiser that give the rate of a step; see `scheduled`."""

    lr: float
    schedule: str = "constant"
    min_lr: float = 0.0
    decay: float = 0.5
    decay_every: int = 1
    warmup: int = 0


class Clipping(NamedTuple):
    """Limits of a step's gradient: first of each number, to ±`clip_value`, then of the norm of all, to `clip_norm`.
    None: no limit."""

    clip_norm: float | None = None
    clip_value: float | None = None

    def of(self, grads: Tensor) -> Tensor:
        """The gradient [P] within the limits, as torch.nn.utils.clip_grad_value_ and clip_grad_norm_ compute it."""
        if self.clip_value is not None:
            grads = grads.clamp(-self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(grads, dtype=torch.float64)  # in float32 a large one would overflow
            grads = grads * (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return grads


PIECE = 4096
"""Numbers that a GPU's multiprocessor updates in a step of Adam."""

ADAM = ("step", "exp_avg", "exp_avg_sq")
"""The state of Adam, by torch's names."""


def adam(*, rates: Rates, beta1: float, beta2: float, eps: float, clipping: Clipping = Clipping()) -> OuterOptimizer:  # noqa: B008 (it is immutable)
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980).

    Args:
        rates: the keys of `scheduled`.
        beta1, beta2, eps: as in the paper.
        clipping: the keys of `Clipping`.

    Raises:
        ValueError: a rate or limit that is not above 0, a decay outside [0, 1), or an unknown schedule.
    """
    return adamw(rates=rates, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0, clipping=clipping)


def adamw(
    *, rates: Rates, beta1: float, beta2: float, eps: float, weight_decay: float, clipping: Clipping = Clipping()  # noqa: B008
) -> OuterOptimizer:  # fmt: skip
    """Adam with decoupled weight decay, Loshchilov and Hutter 2019 (arXiv 1711.05101): torch.optim.AdamW.

    Args:
        rates, beta1, beta2, eps, clipping: as for `adam`.
        weight_decay: λ. Each step first shrinks all meta-parameters by the factor 1 − rate · λ.

    Raises:
        ValueError: as for `adam`; or a weight decay below 0.
    """
    settings = _settings_of_adam(rates, beta1, beta2, eps)
    return _outer(rates, clipping, weight_decay, lambda params: (settings, _adam_step, _guarded_adam_step, ADAM))


def sgd(
    *, rates: Rates, momentum: float, weight_decay: float = 0.0, clipping: Clipping = Clipping()  # noqa: B008
) -> OuterOptimizer:  # fmt: skip
    """Gradient descent, with momentum if it is above 0.

    Args:
        rates, clipping: as for `adam`; the rate is Reptile's ε.
        momentum: μ in m ← μ m + g; θ ← θ − lr · m.
        weight_decay: as for `adamw`: decoupled (SGDW of that paper), and no part of the gradient as in torch.optim.SGD.

    Raises:
        ValueError: as for `adamw`; or a momentum outside [0, 1).
    """
    fraction("momentum", momentum)
    settings = {"lr": rates.lr, "momentum": momentum}
    names = ("momentum_buffer",)
    return _outer(rates, clipping, weight_decay, lambda params: (settings, _sgd_step, _guarded_sgd_step, names))


def muon(
    *, rates: Rates, momentum: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    clipping: Clipping = Clipping(),  # noqa: B008
) -> OuterOptimizer:  # fmt: skip
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, AdamW for all other parameters.

    Matrices are the parameters of two or more dimensions; a filter [out, in, h, w] is one of [out, in · h · w]. Their
    step is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025, arXiv 2502.16982), so that
    one rate suits both.

    Args:
        rates, clipping: as for `adam`.
        momentum: of matrices, Nesterov's.
        beta1, beta2, eps: as for `adam`, of all others.
        weight_decay: as for `adamw`, of all.

    Raises:
        ValueError: as for `adamw`; or a momentum outside [0, 1).
    """
    fraction("momentum", momentum)
    settings = _settings_of_adam(rates, beta1, beta2, eps) | {"momentum": momentum}

    def step_of(params: Params) -> _Steps:
        shapes = [value.shape for name, value in params.items() if not name.startswith(STATE)]

        def step(params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings) -> None:
            _muon_step(shapes, params, grads, state, settings)

        return settings, step, None, ADAM

    def in_words(params: Params) -> str:
        names = [name for name in params if not name.startswith(STATE)]
        matrices = [name for name in names if params[name].dim() >= 2]
        others = [name for name in names if name not in matrices]
        return f"Muon updates {', '.join(matrices) or 'nothing'}; AdamW updates {', '.join(others) or 'nothing'}"

    return _outer(rates, clipping, weight_decay, step_of)._replace(in_words=in_words)


_Steps = tuple[OptimizerSettings, Step, GuardedStep | None, Sequence[str]]
"""The last four arguments of `FlatOptimizer`."""


def _settings_of_adam(rates: Rates, beta1: float, beta2: float, eps: float) -> OptimizerSettings:
    real_number("eps", eps, above=0)
    fraction("beta1", beta1)
    fraction("beta2", beta2)
    return {"lr": rates.lr, "betas": (beta1, beta2), "eps": eps}


def _outer(
    rates: Rates, clipping: Clipping, weight_decay: float, steps_of: Callable[[Params], _Steps]
) -> OuterOptimizer:
    """The optimiser with these steps, before which gradients are clipped and parameters shrink."""
    real_number("weight_decay", weight_decay, at_least=0)
    for name, limit in clipping._asdict().items():
        if limit is not None:
            real_number(name, limit, above=0)

    def start(params: Params) -> Optimizer:
        settings, update, guarded, names = steps_of(params)

        def step(values: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings) -> None:
            if weight_decay:
                values.mul_(1 - settings["lr"] * weight_decay)
            update(values, clipping.of(grads), state, settings)

        def guarded_step(
            values: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings, rate: Tensor, skip: Tensor
        ) -> None:
            assert guarded is not None
            if weight_decay:
                values.mul_(torch.where(skip > 0, 1.0, 1 - rate.double() * weight_decay))
            guarded(values, clipping.of(grads), state, settings, rate, skip)

        return FlatOptimizer(params, settings, step, None if guarded is None else guarded_step, names)

    return OuterOptimizer(start, scheduled(**rates._asdict()), by_norm=clipping.clip_norm is not None)


def _muon_step(
    shapes: Sequence[torch.Size], params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings
) -> None:
    """Changes `params` [P] and `state`: matrices as torch.optim.Muon does, whose momentum is in `exp_avg`; the others
    as torch.optim.Adam does."""
    _begin_adam(params, state)
    flat = (params, grads, state["exp_avg"], state["exp_avg_sq"])
    pieces = list(zip(*(value.split([shape.numel() for shape in shapes]) for value in flat), strict=True))
    others = [piece for piece, shape in zip(pieces, shapes, strict=True) if len(shape) < 2]
    if others:
        values, slopes, first, second = (list(column) for column in zip(*others, strict=True))
        _adam_of(values, slopes, first, second, [state["step"].clone() for _ in others], settings)
    state["step"].add_(1)
    for (value, slope, average, _), shape in zip(pieces, shapes, strict=True):
        if len(shape) >= 2:
            functional_muon(
                *([piece.view(shape[0], -1)] for piece in (value, slope, average)), lr=settings["lr"],
                weight_decay=0.0, momentum=settings["momentum"], nesterov=True, ns_steps=5,
                ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, adjust_lr_fn="match_rms_adamw", has_complex=False,
            )  # fmt: skip


def _adam_of(
    values: list[Tensor], slopes: list[Tensor], first: list[Tensor], second: list[Tensor], steps: list[Tensor],
    settings: OptimizerSettings,
) -> None:  # fmt: skip
    """A step of Adam, from values, gradients, their moments, and the numbers of steps."""
    # Not the Adam of the inner loop, which keeps a graph and rounds otherwise: a run's state is torch.optim.Adam's.
    beta1, beta2 = settings["betas"]
    functional_adam(
        values, slopes, first, second, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, lr=settings["lr"],
        weight_decay=0.0, eps=settings["eps"], maximize=False,
    )  # fmt: skip


def _adam_step(params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings) -> None:
    """Changes `params` [P] and `state` as torch.optim.Adam does."""
    _begin_adam(params, state)
    _adam_of([params], [grads], [state["exp_avg"]], [state["exp_avg_sq"]], [state["step"]], settings)


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
