"""Inner optimisers, and descent by them, for all tasks of a chunk at once. Both can be differentiated.

Each optimiser computes what torch's of the same name does, as a pure function: from gradients and state it gives the
directions and the new state. A step subtracts the rate times the directions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as checkpoint_of

from metalearn.algorithms.common.functional import leaves, results
from metalearn.checks import fraction, real_number
from metalearn.nn.packing import is_packed
from metalearn.nn.surroundings import now_and_again
from metalearn.types import Batch, Model, Params


class TaskLoss(Protocol):
    def __call__(self, params: Params, step: int, /) -> Tensor:
        """Per-task losses [t] of per-task parameters, at an inner step (from 0)."""
        ...


@dataclass(frozen=True)
class SupportLoss:
    """The inner objective: each task's loss [t] on its own support set. `order` as for `descent`. It may compute more
    than its value: `gradient` and `stepped` give None where the network is not computed as a whole."""

    model: Model
    support: Batch
    order: int

    def __call__(self, params: Params, step: int) -> Tensor:
        return results(self.model, params, self.support, twice=self.order == 2)["loss"]

    def knows(self, params: Params) -> bool:
        """Whether the network is computed as a whole."""
        return self.model.network is not None and is_packed(params)

    def gradient(self, params: Params, step: int) -> Params | None:
        """The gradient of the sum of the losses."""
        network, (x, y) = self.model.network, self.support
        if network is None or not self.knows(params):
            return None
        return network.gradient(params, x, y, twice=self.order == 2)

    def stepped(self, params: Params, step: int, rate: float) -> Params | None:
        """The parameters after a step of plain gradient descent."""
        network, (x, y) = self.model.network, self.support
        if network is None or not self.knows(params):
            return None
        return network.stepped(params, x, y, rate, twice=self.order == 2)


Rate = float | Params
"""One rate for all parameters, or one for each, of a shape that broadcasts to the parameter's."""

State = dict[str, Params]

Checkpoint = bool | Literal["nested"]
"""Whether steps are computed again for their derivative; see `descent`."""

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
    loss: TaskLoss,
    params: Params,
    *,
    optimizer: InnerOptimizer,
    rate: Callable[[int], Rate],
    steps: int,
    order: int,
    checkpoint: Checkpoint = False,
) -> Iterator[Params]:
    """Descent on the losses of all tasks at once: yields `params`, then the parameters after each step.

    `order` says what the steps' derivative is. 2: the exact one. 1: each step's gradient counts as a constant
    (first-order MAML). 0: there is none, and no graph is kept (evaluation). With `checkpoint` and order 2, the graph of
    a step is not kept: the derivative computes each step again, and then drops it (Chen et al. 2016, arXiv 1604.06174).
    The values stay the same. True: the parameters and the optimiser's state after every step are kept. `nested`: only
    those in the middle of what is computed again, then of each half, and so on (the paper's recursive form). So they
    are kept after log₂(steps) steps at most, and a step is computed so often. Only the last parameters are yielded. A
    loss that does not know its gradient is differentiated inside each step, which torch cannot nest: `nested` is True.
    """

    def stepped(params: Params, state: State, step: int) -> tuple[Params, State]:
        moved = _moved_at_once(loss, params, step, rate(step), order) if optimizer.plain else None
        if moved is None:
            if order == 0:
                params = leaves(params)
            grads = _gradient(loss, params, step, order)
            with _graph_of(order):
                directions, state = optimizer.direct(grads, state, step)
                moved = _moved(params, directions, rate(step))
        return moved, state

    def through(params: Params, state: State, first: int, end: int) -> tuple[Params, State]:
        """From one step to another, by halves."""
        if end - first == 1:
            return stepped(params, state, first)
        middle = (first + end) // 2
        params, state = _computed_again(through, params, state, first, middle)
        return _computed_again(through, params, state, middle, end)

    yield params
    state = optimizer.start(params)
    if checkpoint == "nested" and order == 2 and steps and isinstance(loss, SupportLoss) and loss.knows(params):
        yield _computed_again(through, params, state, 0, steps)[0]
        return
    for step in range(steps):
        again = checkpoint and order == 2
        params, state = _computed_again(stepped, params, state, step) if again else stepped(params, state, step)
        yield params


def _computed_again(compute: Callable[..., tuple[Params, State]], *args: Any) -> tuple[Params, State]:
    """Computes without a graph: the derivative computes again. torch lets go of nested inputs that are tensors, and not
    of those in a dict."""
    values, form = pytree.tree_flatten(args)

    def of_values(*values: Any) -> tuple[Params, State]:
        return compute(*pytree.tree_unflatten(values, form))

    # What is random in a step follows from seeds; the state of torch's generators has no part in it.
    outcome: tuple[Params, State] = checkpoint_of(
        of_values, *values, use_reentrant=False, preserve_rng_state=False, context_fn=now_and_again
    )
    return outcome


def _moved_at_once(loss: TaskLoss, params: Params, step: int, rate: Rate, order: int) -> Params | None:
    """A step of plain gradient descent that the loss itself takes; None if it does not."""
    if not isinstance(loss, SupportLoss) or not isinstance(rate, float | int):
        return None
    with _graph_of(order):
        return loss.stepped(params, step, rate)


def _graph_of(order: int) -> torch.set_grad_enabled:
    """Within it, a step has a graph if its `order` and the caller want one."""
    return torch.set_grad_enabled(order > 0 and torch.is_grad_enabled())


def _gradient(loss: TaskLoss, params: Params, step: int, order: int) -> Params:
    """The gradient of the sum of the losses; its graph is kept for `order` 2."""
    with torch.enable_grad():
        direct = loss.gradient(params, step) if isinstance(loss, SupportLoss) else None
        if direct is not None:
            return direct
        total = loss(params, step).sum()
        grads = torch.autograd.grad(
            total, list(params.values()), create_graph=order == 2, allow_unused=True, materialize_grads=True
        )
    return dict(zip(params, grads, strict=True))


def last(path: Iterator[Point]) -> Point:
    """The end of a path; what comes before it is not kept."""
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
    """√x, whose derivative at 0 is taken as 0: a parameter without a gradient does not move. A carried mean of squares
    may be rounded to less than 0, which counts as 0."""
    if not squares.requires_grad:
        return squares.clamp_min(0).sqrt()
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
