"""Inner optimisers and the descent that they steer, one task beside the other; all of it can be differentiated.

Each optimiser is what torch's of the same name computes, written as a pure function: from gradients and state to
the directions that are subtracted, times the rate, and the new state.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from metalearn.algorithms.common.functional import leaves
from metalearn.checks import fraction, real_number
from metalearn.types import Params

TaskLoss = Callable[[Params, int], Tensor]
"""Per-task losses [t] of per-task parameters, at an inner step (from 0)."""

Rate = float | Params
"""One for all, or one for every parameter, of a shape that broadcasts to its."""

State = dict[str, Params]


class InnerOptimizer(NamedTuple):
    """`start(params)` gives the state before the first step; `direct(grads, state, step)` the directions to go
    against, and the new state. Steps count from 0."""

    start: Callable[[Params], State]
    direct: Callable[[Params, State, int], tuple[Params, State]]


def sgd() -> InnerOptimizer:
    """Plain gradient descent."""
    return InnerOptimizer(lambda params: {}, lambda grads, state, step: (grads, state))


SGD = sgd()


def momentum(*, momentum: float) -> InnerOptimizer:
    """Gradient descent with momentum (Sutskever et al. 2013), as torch has it: m ← μ m + g, and m is the direction.

    Args:
        momentum: μ.

    Raises:
        ValueError: a decay outside [0, 1).
    """
    fraction("momentum", momentum)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        kept = {name: momentum * state["m"][name] + g for name, g in grads.items()}
        return kept, {"m": kept}

    return InnerOptimizer(lambda params: {"m": _zeros(params)}, direct)


def rmsprop(*, decay: float, eps: float) -> InnerOptimizer:
    """RMSprop (Tieleman and Hinton 2012): v ← ρ v + (1 − ρ) g², and the direction is g / (√v + ε).

    Args:
        decay: ρ.
        eps: ε.

    Raises:
        ValueError: a decay outside [0, 1), or an ε that is not above 0.
    """
    fraction("decay", decay)
    real_number("eps", eps, above=0)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        kept = {name: decay * state["v"][name] + (1 - decay) * g.square() for name, g in grads.items()}
        return {name: g / (_root(kept[name]) + eps) for name, g in grads.items()}, {"v": kept}

    return InnerOptimizer(lambda params: {"v": _zeros(params)}, direct)


def adam(*, beta1: float, beta2: float, eps: float) -> InnerOptimizer:
    """Adam, Kingma and Ba 2015 (arXiv 1412.6980), Algorithm 1.

    Args:
        beta1, beta2, eps: as in the paper.

    Raises:
        ValueError: a decay outside [0, 1), or an ε that is not above 0.
    """
    fraction("beta1", beta1)
    fraction("beta2", beta2)
    real_number("eps", eps, above=0)

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        first = {name: beta1 * state["m"][name] + (1 - beta1) * g for name, g in grads.items()}
        second = {name: beta2 * state["v"][name] + (1 - beta2) * g.square() for name, g in grads.items()}
        of_first, of_second = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
        directions = {name: first[name] / of_first / (_root(second[name] / of_second) + eps) for name in grads}
        return directions, {"m": first, "v": second}

    return InnerOptimizer(lambda params: {"m": _zeros(params), "v": _zeros(params)}, direct)


def constant(lr: Rate) -> Callable[[int], Rate]:
    """The same rate at every inner step."""
    return lambda step: lr


def descent(
    loss: TaskLoss,
    params: Params,
    *,
    optimizer: InnerOptimizer,
    rate: Callable[[int], Rate],
    steps: int,
    order: int,
) -> Iterator[Params]:
    """Descent on a loss, one task beside the other: yields `params`, then the parameters after each step.

    `order` says how far one may differentiate through the steps: 2, exactly; 1, taking each step's
    gradient for a constant (first-order MAML); 0, not at all (evaluation: no graph is kept).
    """
    yield params
    state = optimizer.start(params)
    for step in range(steps):
        if order == 0:
            params = leaves(params)
        with torch.enable_grad():
            total = loss(params, step).sum()
            found = torch.autograd.grad(total, list(params.values()), create_graph=order == 2)
        with torch.set_grad_enabled(order > 0 and torch.is_grad_enabled()):
            directions, state = optimizer.direct(dict(zip(params, found, strict=True)), state, step)
            params = _moved(params, directions, rate(step))
        yield params


def last(path: Iterator[Params]) -> Params:
    """Where a path ends; of what comes before nothing is kept."""
    for end in path:
        final = end
    return final


def _moved(params: Params, directions: Params, rate: Rate) -> Params:
    if isinstance(rate, float | int):
        return {name: p.add(directions[name], alpha=-rate) for name, p in params.items()}
    return {name: p - rate[name] * directions[name] for name, p in params.items()}


def _zeros(params: Params) -> Params:
    return {name: torch.zeros_like(p) for name, p in params.items()}


def _root(squares: Tensor) -> Tensor:
    """√x, with the derivative 0 at 0, where it has none: a parameter without a gradient stays where it is."""
    some = squares > 0
    return torch.where(some, torch.where(some, squares, 1.0).sqrt(), 0.0)
