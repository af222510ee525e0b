"""Outer optimisers, which update the meta-parameters. The rate is a pure function of the step."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as functional_adam
from torch.optim.sgd import sgd as functional_sgd

from metalearn.errors import Invalid, fraction, one_of, real_number, whole_number
from metalearn.types import STATE, Optimizer, Params


class OuterOptimizer(NamedTuple):
    """`start(params)` makes the optimiser; `rate(step, steps)` is the rate of a step (from 1). `by_norm`: it needs the
    whole gradient, whose norm it limits. `in_words(params)` says what a user should know of it, if anything."""

    start: Callable[[Params], Optimizer]
    rate: Callable[[int, int], float]
    by_norm: bool = False
    in_words: Callable[[Params], str] = lambda params: ""


class Rates(NamedTuple):
    """The keys of an optimiser that give the rate of a step.

    `lr` is the highest rate. `schedule` is `constant`; or from `lr` at the first step to `min_lr` after the last, by
    `linear` or `cosine` (arXiv 1608.03983, equation 5, without restarts); or `step`: times `decay` after every
    `decay_every` steps, but never below `min_lr`. Over `warmup` steps the rate rises linearly to its schedule.
    """

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


# One optimiser for all, whose parameters are updated as one flat tensor


OptimizerSettings = dict[str, Any]
STEPS = "step"  # the name of the number of steps in the state; it is one number for all parameters

Guard = tuple[Tensor, Tensor]
"""Of a step on a GPU: its rate [], and a number [] that is not 0 where the step changes nothing."""

Step = Callable[[Tensor, Tensor, Params, OptimizerSettings, Guard | None], None]
"""From the values and gradients [P] of all parameters, the state and the settings. It changes values and state."""


class FlatOptimizer:
    """An optimiser of parameters of one type, on one device, in one pass; see `metalearn.types.Optimizer`.

    It stands in place of torch.optim.Adam and torch.optim.SGD: it steps by their functional forms, to the same bits,
    and reads and writes their `state_dict`. But to construct one of torch's imports torch._dynamo, which takes seconds.

    Args:
        params: leaves. A step needs the `grad` of each, but for state (`metalearn.types.STATE`), which it leaves alone.
        settings: the settings of the only parameter group, with `lr`.
        update: one step. Before it, gradients are clipped (`clipping`), and parameters shrink by the factor
            1 − rate · `weight_decay`.
        names: of the state once a step is done; each tensor is [P], but for the number `STEPS`.
    """

    def __init__(
        self, params: Params, settings: OptimizerSettings, update: Step, names: Sequence[str], weight_decay: float,
        clipping: Clipping,
    ) -> None:  # fmt: skip
        self._params = [param for name, param in params.items() if not name.startswith(STATE)]
        self._settings, self._update, self._names = list(settings), update, list(names)
        self._weight_decay, self._clipping = weight_decay, clipping
        self.param_groups: list[OptimizerSettings] = [settings | {"params": self._params}]
        self._state: Params = {}

    @torch.no_grad()
    def step(self) -> None:
        gradients = [param.grad for param in self._params if param.grad is not None]
        assert len(gradients) == len(self._params), "every parameter has a gradient"
        values, grads = joined(self._params), joined(gradients)
        if self._weight_decay:
            values.mul_(1 - self.param_groups[0]["lr"] * self._weight_decay)
        self._update(values, self._clipping.of(grads), self._state, self.param_groups[0], None)
        for param, value in zip(self._params, self._parts(values), strict=True):
            param.copy_(value)

    @torch.no_grad()
    def step_of_device(self, values: Tensor, grads: Tensor, rate: Tensor, skip: Tensor) -> None:
        """A step of all parameters, which lie one after the other in `values` [P], without waiting for the device. The
        rate [] is its own; nothing changes where `skip` [] is not 0."""
        if self._weight_decay:
            values.mul_(torch.where(skip > 0, 1.0, 1 - rate.double() * self._weight_decay))
        self._update(values, self._clipping.of(grads), self._state, self.param_groups[0], (rate, skip))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The state of each parameter, in its shape. A single number belongs to all."""
        if flat.dim() == 0:
            return [flat] * len(self._params)
        parts = flat.split([param.numel() for param in self._params])
        return [part.view_as(param) for part, param in zip(parts, self._params, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Copies of the state by the parameters' positions, and the settings."""
        by_name = {name: self._parts(value) for name, value in self._state.items()}
        numbers = list(range(len(self._params)))
        state = {i: {name: parts[i].clone() for name, parts in by_name.items()} for i in numbers if by_name}
        return {"state": state, "param_groups": [self.param_groups[0] | {"params": numbers}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over copies of the state and the settings. Raises ValueError if the state belongs to other
        parameters."""
        (group,), state = state_dict["param_groups"], state_dict["state"]
        rows = [state.get(i, {}) for i in range(len(self._params))]
        begun = all(row.get(name) is not None for row in rows for name in self._names)
        parts = {name: [torch.as_tensor(row[name]) for row in rows] for name in (self._names if begun else [])}
        shapes = [param.shape for param in self._params]
        of_these = all([part.shape for part in values] == shapes for name, values in parts.items() if name != STEPS)
        if len(group["params"]) != len(self._params) or not of_these:
            raise ValueError(f"the state is that of other parameters than these {len(self._params)}")
        self._state = {
            name: values[0].to(self._params[0].device, torch.float32, copy=True)
            if name == STEPS
            else joined(part.to(self._params[0]) for part in values).detach()
            for name, values in parts.items()
        }
        self.param_groups[0] |= {name: group[name] for name in self._settings}


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers in one new tensor [P]."""
    return torch.cat([tensor.flatten() for tensor in tensors])


PIECE = 4096  # numbers that a GPU's multiprocessor updates in a step of Adam
ADAM = ("step", "exp_avg", "exp_avg_sq")  # the state of Adam, by torch's names


def adam(*, rates: Rates, beta1: float, beta2: float, eps: float, clipping: Clipping = Clipping()) -> OuterOptimizer:  # noqa: B008 (it is immutable)
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980), with the names of the paper. Raises ValueError for a rate or limit
    that is not above 0, a decay outside [0, 1), or an unknown schedule."""
    return adamw(rates=rates, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0, clipping=clipping)


def adamw(
    *, rates: Rates, beta1: float, beta2: float, eps: float, weight_decay: float, clipping: Clipping = Clipping()  # noqa: B008
) -> OuterOptimizer:  # fmt: skip
    """Adam with decoupled weight decay, Loshchilov and Hutter 2019 (arXiv 1711.05101): torch.optim.AdamW. Each step
    first shrinks all meta-parameters by the factor 1 − rate · `weight_decay`. Raises ValueError as `adam`, and for a
    weight decay below 0."""
    settings = _settings_of_adam(rates, beta1, beta2, eps)
    return _outer(rates, clipping, weight_decay, settings, ADAM, lambda params: _adam_step)


def sgd(
    *, rates: Rates, momentum: float, weight_decay: float = 0.0, clipping: Clipping = Clipping()  # noqa: B008
) -> OuterOptimizer:  # fmt: skip
    """Gradient descent, with momentum if it is above 0.

    The rate is Reptile's ε, and `momentum` is μ in m ← μ m + g; θ ← θ − lr · m. `weight_decay` is decoupled as that of
    `adamw` (SGDW of that paper), and no part of the gradient as in torch.optim.SGD. Raises ValueError as `adamw`, and
    for a momentum outside [0, 1).
    """
    fraction("momentum", momentum)
    settings = {"lr": rates.lr, "momentum": momentum}
    return _outer(rates, clipping, weight_decay, settings, ("momentum_buffer",), lambda params: _sgd_step)


def muon(
    *, rates: Rates, momentum: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    clipping: Clipping = Clipping(),  # noqa: B008
) -> OuterOptimizer:  # fmt: skip
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, AdamW for all other parameters.

    Matrices are the parameters of two or more dimensions; a filter [out, in, h, w] is one of [out, in · h · w]. Their
    step is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"` (Liu et al. 2025, arXiv 2502.16982), so that
    one rate suits both; but it rounds to the type of the parameters, where torch rounds to bfloat16. `momentum` is
    Nesterov's, of matrices; `beta1`, `beta2` and `eps` are those of all others, and `weight_decay` that of all. Raises
    ValueError as `adamw`, and for a momentum outside [0, 1).
    """
    fraction("momentum", momentum)
    settings = _settings_of_adam(rates, beta1, beta2, eps) | {"momentum": momentum}

    def update_of(params: Params) -> Step:
        return partial(_muon_step, [value.shape for name, value in params.items() if not name.startswith(STATE)])

    def in_words(params: Params) -> str:
        names = [name for name in params if not name.startswith(STATE)]
        matrices = [name for name in names if params[name].dim() >= 2]
        others = [name for name in names if name not in matrices]
        many = [f"{len(s)} parameters such as {s[0]}" if len(s) > 8 else ", ".join(s) for s in (matrices, others)]
        return f"Muon updates {many[0] or 'nothing'}; AdamW updates {many[1] or 'nothing'}"

    return _outer(rates, clipping, weight_decay, settings, ADAM, update_of)._replace(in_words=in_words)


def _settings_of_adam(rates: Rates, beta1: float, beta2: float, eps: float) -> OptimizerSettings:
    real_number("eps", eps, above=0)
    fraction("beta1", beta1)
    fraction("beta2", beta2)
    return {"lr": rates.lr, "betas": (beta1, beta2), "eps": eps}


def _outer(
    rates: Rates, clipping: Clipping, weight_decay: float, settings: OptimizerSettings, names: Sequence[str],
    update_of: Callable[[Params], Step],
) -> OuterOptimizer:  # fmt: skip
    """The optimiser with these steps, before which gradients are clipped and parameters shrink."""
    real_number("weight_decay", weight_decay, at_least=0)
    for name, limit in clipping._asdict().items():
        if limit is not None:
            real_number(name, limit, above=0)

    def start(params: Params) -> Optimizer:
        return FlatOptimizer(params, settings, update_of(params), names, weight_decay, clipping)

    return OuterOptimizer(start, scheduled(rates), by_norm=clipping.clip_norm is not None)


_Piece = tuple[Tensor, Tensor, Tensor, Tensor]
"""A parameter, its gradient, `exp_avg` and `exp_avg_sq`, or parts of them."""


def _muon_step(
    shapes: Sequence[torch.Size], params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings,
    guard: Guard | None,
) -> None:  # fmt: skip
    """Changes `params` [P] and `state`: matrices by Muon, whose momentum is in `exp_avg`; the others as
    torch.optim.Adam does."""
    _begin_adam(params, state)
    if guard is not None:
        grads = torch.where(guard[1] > 0, 0.0, grads)  # what is not finite stays so, times 0
    flat, momentum = (params, grads, state["exp_avg"], state["exp_avg_sq"]), settings["momentum"]
    pieces: list[_Piece] = list(zip(*(value.split([shape.numel() for shape in shapes]) for value in flat), strict=True))
    matrices = [
        (value.view(shape[0], -1), slope.view(shape[0], -1), average.view(shape[0], -1), square)
        for (value, slope, average, square), shape in zip(pieces, shapes, strict=True)
        if len(shape) >= 2
    ]
    others = [piece for piece, shape in zip(pieces, shapes, strict=True) if len(shape) < 2]
    if guard is None:
        if others:
            columns = [list(column) for column in zip(*others, strict=True)]
            values, slopes, first, second = (torch.cat(column) for column in columns)
            _adam_of((values, slopes, first, second), state["step"].clone(), settings)
            for column, whole in zip(columns, (values, slopes, first, second), strict=True):
                torch._foreach_copy_(column, list(whole.split([piece.numel() for piece in column])))
        state["step"].add_(1)
        _move_matrices(matrices, 1 - momentum, settings["lr"], momentum)
    else:
        rate, keep = guard[0], 1 - guard[1]
        state["step"].add_(keep)
        if others:
            _fused_adam(others, state["step"], settings, guard)
        _move_matrices(matrices, keep * (1 - momentum), keep * rate, momentum)


def _move_matrices(matrices: Sequence[_Piece], share: float | Tensor, rate: float | Tensor, momentum: float) -> None:
    """A step of Muon. Momenta move by `share` to the gradients."""
    alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
    for value, slope, average, _ in matrices:
        average.lerp_(slope, share)
        direction = slope.lerp(average, momentum)
        if len(value) > value.shape[1]:
            value, direction = value.T, direction.T
        alike.setdefault(tuple(value.shape), []).append((value, direction))
    for shape, several in alike.items():
        values, directions = zip(*several, strict=True)
        factor = rate * 0.2 * math.sqrt(max(shape))  # steps as large as Adam's (arXiv 2502.16982, section 2.2)
        for value, direction in zip(values, _orthogonal(torch.stack(directions)), strict=True):
            value.sub_(factor * direction)


def _orthogonal(x: Tensor) -> Tensor:
    """[k, n, m] with n ≤ m → nearly U Vᵀ of each matrix's U S Vᵀ, by five steps of Newton and Schulz. In the type of x,
    where torch.optim.Muon rounds to bfloat16; and all at once, which small matrices need."""
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x


def _adam_of(piece: _Piece, step: Tensor, settings: OptimizerSettings) -> None:
    """A step of Adam, which adds 1 to `step`."""
    # Not the Adam of the inner loop, which keeps a graph and rounds otherwise: a run's state is torch.optim.Adam's.
    beta1, beta2 = settings["betas"]
    value, slope, first, second = ([part] for part in piece)
    functional_adam(
        value, slope, first, second, [], [step], amsgrad=False, beta1=beta1, beta2=beta2, lr=settings["lr"],
        weight_decay=0.0, eps=settings["eps"], maximize=False,
    )  # fmt: skip


def _adam_step(params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings, guard: Guard | None) -> None:
    """Changes `params` [P] and `state` as torch.optim.Adam does."""
    _begin_adam(params, state)
    flat = (params, grads, state["exp_avg"], state["exp_avg_sq"])
    if guard is None:
        _adam_of(flat, state["step"], settings)
    else:
        state["step"].add_(1 - guard[1])
        # In pieces, since torch gives each tensor of up to 65,536 numbers to one multiprocessor.
        _fused_adam([*zip(*(whole.split(PIECE) for whole in flat), strict=True)], state["step"], settings, guard)


def _begin_adam(params: Tensor, state: Params) -> None:
    if not state:
        state["step"] = torch.zeros((), device=params.device)
        state |= {name: torch.zeros_like(params) for name in ADAM[1:]}


def _fused_adam(pieces: Sequence[_Piece], step: Tensor, settings: OptimizerSettings, guard: Guard) -> None:
    """torch's fused Adam, which can skip a step."""
    (beta1, beta2), (rate, skip) = settings["betas"], guard
    values, slopes, first, second = (list(parts) for parts in zip(*pieces, strict=True))
    torch._fused_adam_(
        values, slopes, first, second, [], [step] * len(values), lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0,
        eps=settings["eps"], amsgrad=False, maximize=False, found_inf=skip,
    )  # fmt: skip


def _sgd_step(params: Tensor, grads: Tensor, state: Params, settings: OptimizerSettings, guard: Guard | None) -> None:
    """Changes `params` [P] and `state` as torch.optim.SGD does."""
    if guard is not None:
        rate, skip = guard
        if settings["momentum"]:
            kept = state.setdefault("momentum_buffer", torch.zeros_like(params))
            grads = settings["momentum"] * kept + grads
            kept.copy_(torch.where(skip > 0, kept, grads))
        params.sub_(torch.where(skip > 0, 0.0, rate * grads))
        return
    buffers = [state.get("momentum_buffer")]
    functional_sgd(
        [params], [grads], buffers, weight_decay=0.0, momentum=settings["momentum"], lr=settings["lr"], dampening=0.0,
        nesterov=False, maximize=False,
    )  # fmt: skip
    if buffers[0] is not None:  # there is momentum
        state["momentum_buffer"] = buffers[0]


def scheduled(rates: Rates) -> Callable[[int, int], float]:
    """The rate of a step, as `rate(step, steps)`: steps count from 1, and a run has `steps` of them. Raises ValueError
    for a number out of range, or an unknown schedule."""
    lr, schedule, min_lr, decay, decay_every, warmup = rates
    real_number("lr", lr, above=0)
    if lr > 1e30:  # beyond it, torch's Adam cannot make the rate of its first step a number of 32 bits
        raise Invalid("lr", lr, "must be at most 1e+30", "type KEY=0.001, for example")
    real_number("min_lr", min_lr, at_least=0)
    fraction("decay", decay)
    whole_number("decay_every", decay_every, at_least=1)
    whole_number("warmup", warmup, at_least=0)
    one_of("schedule", schedule, ("constant", "cosine", "linear", "step"))
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
