"""Inner optimisers, and descent by them, for all tasks of a chunk at once. Both can be differentiated.

Each optimiser computes what torch's of the same name does, as a pure function: from gradients and state it gives the
directions and the new state. A step subtracts the rate times the directions.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as checkpoint_of

from metalearn.checks import fraction, real_number
from metalearn.nn.network import gradient_at, leaves
from metalearn.nn.surroundings import now_and_again
from metalearn.types import Params

TaskLoss = Callable[[Params, int], Tensor]
"""`loss(params, step)`: the losses [t] of per-task parameters, at an inner step (from 0)."""

Rate = float | Params  # one rate for all parameters, or one for each, of a shape that broadcasts to the parameter's

State = dict[str, Params]

Checkpoint = bool | Literal["nested"]  # whether steps are computed again for their derivative; see `descent`

Step = Callable[[Params, State, int], tuple[Params, State]]
"""`step(params, state, number)`: parameters and the optimiser's state after inner step `number`."""

Point = TypeVar("Point")


class InnerOptimizer(NamedTuple):
    """`start(params)` gives the state before the first step. `direct(grads, state, step)` gives the directions, which a
    step subtracts, and the new state. Steps count from 0. Each part of the state is a sum that a step multiplies by its
    number in `decays`, and adds to. It is `plain` if the directions are the gradients."""

    start: Callable[[Params], State]
    direct: Callable[[Params, State, int], tuple[Params, State]]
    decays: Mapping[str, float] = MappingProxyType({})
    plain: bool = False


def sgd() -> InnerOptimizer:
    """Plain gradient descent."""
    return InnerOptimizer(lambda params: {}, lambda grads, state, step: (grads, state), plain=True)


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

    return InnerOptimizer(lambda params: {"m": _zeros(params)}, direct, {"m": momentum})


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

    return InnerOptimizer(lambda params: {"v": _zeros(params)}, direct, {"v": decay})


def adam(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> InnerOptimizer:
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

    return InnerOptimizer(lambda params: {"m": _zeros(params), "v": _zeros(params)}, direct, {"m": beta1, "v": beta2})


def constant(lr: Rate) -> Callable[[int], Rate]:
    """The same rate at every inner step."""
    return lambda step: lr


def descent(
    loss: TaskLoss, params: Params, *, optimizer: InnerOptimizer, rate: Callable[[int], Rate], steps: int, order: int,
    checkpoint: Checkpoint = False,
) -> Iterator[Params]:  # fmt: skip
    """Descent on any losses of the tasks, by autograd: yields `params`, then the parameters after each step.

    `order` says what the steps' derivative is. 2: the exact one. 1: each step's gradient counts as a constant
    (first-order MAML). 0: there is none, and no graph is kept (evaluation). `checkpoint` is as for `descend`, but
    `nested` is True: a step here calls autograd, which torch cannot nest in computations that it repeats.
    """

    def gradient(params: Params, step: int) -> Params:
        at = leaves(params) if order == 0 else params  # in evaluation the parameters do not require a gradient
        with torch.enable_grad():
            return gradient_at(at, loss(at, step), twice=order == 2)

    step = step_along(gradient, optimizer, rate, order)
    return descend(step, params, optimizer.start(params), steps, checkpoint=bool(checkpoint) and order == 2)


def step_along(
    gradient: Callable[[Params, int], Params], optimizer: InnerOptimizer, rate: Callable[[int], Rate], order: int
) -> Step:
    """A step by the optimiser, from the `gradient(params, step)` of the losses; `order` as for `descent`."""

    def step(params: Params, state: State, number: int) -> tuple[Params, State]:
        grads = gradient(params, number)
        with graph_of(order):
            directions, state = optimizer.direct(grads, state, number)
            by = rate(number)
            if isinstance(by, float | int):
                # Not p − rate · d, which rounds twice: `Model.step` takes such a step in one pass, to the same bits.
                return {name: p.add(directions[name], alpha=-by) for name, p in params.items()}, state
            return {name: p - by[name] * directions[name] for name, p in params.items()}, state

    return step


def graph_of(order: int) -> torch.set_grad_enabled:
    """Within it, a step has a graph if its `order` and the caller want one."""
    return torch.set_grad_enabled(order > 0 and torch.is_grad_enabled())


def descend(
    step: Step, params: Params, state: State, steps: int, *, checkpoint: Checkpoint = False
) -> Iterator[Params]:
    """Yields `params`, then the parameters after each step.

    With `checkpoint`, the graph of a step is not kept: the derivative computes each step again, and then drops it (Chen
    et al. 2016, arXiv 1604.06174). The values stay the same. True keeps the parameters and the optimiser's state after
    every step. `nested` keeps those in the middle of what is computed again, then of each half, and so on (the paper's
    recursive form): after log₂(steps) steps at most, and it computes each step as often. It yields the first and the
    last parameters only.
    """

    def through(params: Params, state: State, first: int, end: int) -> tuple[Params, State]:
        """From one step to another, by halves."""
        if end - first == 1:
            return step(params, state, first)
        middle = (first + end) // 2
        params, state = computed_again(through, params, state, first, middle)
        return computed_again(through, params, state, middle, end)

    yield params
    if checkpoint == "nested" and steps:
        yield computed_again(through, params, state, 0, steps)[0]
        return
    for number in range(steps):
        params, state = (
            computed_again(step, params, state, number) if checkpoint else step(params, state, number)
        )  # fmt: skip
        yield params


def computed_again(compute: Callable[..., Point], *args: Any) -> Point:
    """Computes without a graph: the derivative computes again. Arguments may be nested in any way."""
    # Flat, since torch lets go of inputs that are tensors when it nests checkpoints, and not of those in a dict.
    values, form = pytree.tree_flatten(args)

    def of_values(*values: Any) -> Point:
        return compute(*pytree.tree_unflatten(values, form))

    # What is random in a step follows from seeds; the state of torch's generators has no part in it.
    outcome: Point = checkpoint_of(
        of_values, *values, use_reentrant=False, preserve_rng_state=False, context_fn=now_and_again
    )
    return outcome


def last(path: Iterator[Point]) -> Point:
    """The end of a path; what comes before it is not kept."""
    for end in path:
        final = end
    return final


def _zeros(params: Params) -> Params:
    return {name: torch.zeros_like(p) for name, p in params.items()}


def _root(squares: Tensor) -> Tensor:
    """√x, whose derivative at 0 is taken as 0: a parameter without a gradient does not move."""
    # A mean of squares that is carried from task to task may be rounded to less than 0.
    if not squares.requires_grad:
        return squares.clamp_min(0).sqrt()
    # Twice: the derivative of a branch that is not taken is infinite at 0, and 0 · ∞ is not a number.
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


# Implicit gradients


def conjugate_gradient(product: Callable[[Params], Params], right: Params, steps: int) -> tuple[Params, Tensor]:
    """Solves A x = b from x = b, for every task by itself (Hestenes and Stiefel 1952).

    Args:
        product: v ↦ A v. A must be symmetric; only a system with a positive definite A is solved.
        right: b, each [t, …].
        steps: the most steps. A task stops early if its residual is zero, or if b or a direction shows that its A is
            not positive definite.

    Returns:
        x, and ‖A x − b‖ / ‖b‖ [t].
    """
    x, image = right, product(right)  # from b: iMAML's first solution is then first-order MAML's gradient
    residual = direction = {name: value - image[name] for name, value in right.items()}
    before, going = _dot(residual, residual), _dot(right, image) > 0
    for _ in range(steps):  # no early end: all tasks are computed together, and a GPU would have to be waited for
        image = product(direction)
        curvature = _dot(direction, image)
        going = going & (curvature > 0)
        length = torch.where(going, _ratio(before, curvature), 0.0)
        x, residual = _along(x, direction, length), _along(residual, image, -length)
        now = _dot(residual, residual)
        direction = _along(residual, direction, _ratio(now, before))
        before = now
    return x, _ratio(before, _dot(right, right)).sqrt()


def _dot(a: Params, b: Params) -> Tensor:
    """The inner product of every task's parameters, [t]."""
    return torch.stack([(a[name] * b[name]).reshape(len(a[name]), -1).sum(dim=1) for name in a]).sum(dim=0)


def _along(start: Params, direction: Params, lengths: Tensor) -> Params:
    """start + length · direction; each task has its own length [t]."""
    return {name: p + lengths.view(-1, *[1] * (p.dim() - 1)) * direction[name] for name, p in start.items()}


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))
