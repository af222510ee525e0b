"""Bilevel programs without the trainer: derivatives of an inner minimum, or of the steps to it, by outer variables.

Variables are trees: tensors in dictionaries, lists and tuples, nested as you like. `inner(w, outer, step)` is the inner
loss, one number, a pure function of the inner variables `w`, the outer ones, and the number of the step (from 0); a
module takes part through `torch.func.functional_call`.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, jvp, vjp
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states

from metalearn.algorithms.common.arithmetic import conjugate_gradient
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, adam, momentum, rmsprop, sgd
from metalearn.errors import Invalid, first_line, one_of, real_number, whole_number
from metalearn.nn.attention import plain_attention, second_order_attention

__all__ = [
    "InnerOptimizer", "adam", "descent", "forward", "functional_call", "implicit", "momentum", "rmsprop", "sgd"
]  # fmt: skip

Tree = Any
InnerLoss = Callable[[Tree, Tree, int], Tensor]
Rate = float | Callable[[Tree, int], Any]


@second_order_attention()
def descent(
    inner: InnerLoss, start: Tree, outer: Tree, *, steps: int, rate: Rate, optimizer: InnerOptimizer = SGD,
    memory: str = "all", last: int | None = None,
) -> Tree:  # fmt: skip
    """The inner variables after some steps of descent, with their graph to `outer` and `start`. Raises ValueError for a
    number out of range, another `memory`, or an inner loss that does not depend on `w`.

    Args:
        inner: the inner loss.
        start: the inner variables at the start.
        outer: all that the derivative is wanted of; what `inner` takes from elsewhere counts as constant unless
            `memory` is `all`.
        steps: inner steps.
        rate: a number; or a function of `outer` and the step to a number, or to a tree of rates like `start`.
        optimizer: of this module.
        memory: `all` keeps the graph of every step. `points` keeps the variables after every step, and the derivative
            computes each step once again (Chen et al. 2016, arXiv 1604.06174). `log` keeps log₂(steps) points of the
            path, and computes each step up to log₂(steps) times again (Griewank 1992). A step that is computed again
            draws the same random numbers of torch. Only `all` has a second derivative.
        last: only this number of last steps has a derivative (Shaban et al. 2019, arXiv 1810.10667), and `start` has
            none; None: all have.
    """
    whole_number("steps", steps, at_least=0)
    one_of("memory", memory, ("all", "points", "log"))
    step = _step_of(inner, rate, optimizer, plain=memory != "all")
    point = (start, optimizer.start(_named(start)))
    first = 0
    if last is not None:
        whole_number("last", last, at_least=0, at_most=steps)
        first = steps - last
        with torch.no_grad():
            point = _detached(_walk(step, point, outer, 0, first))
    if memory == "all":
        return _walk(step, point, outer, first, steps)[0]
    tensors, whole = _parted(outer)
    leaves, form = pytree.tree_flatten((point, tensors))
    whole_step: _Step = lambda point, tensors, number: step(point, whole(tensors), number)  # noqa: E731
    ends = _ComputedAgain.apply(whole_step, form, first, steps, memory == "points", *leaves)
    return pytree.tree_unflatten(ends, pytree.tree_structure(point))[0]


def forward(
    inner: InnerLoss, start: Tree, outer: Tree, direction: Tree, *, steps: int, rate: Rate,
    optimizer: InnerOptimizer = SGD,
) -> tuple[Tree, Tree]:  # fmt: skip
    """As `descent`, in forward mode: also the derivative of the end along a direction of `outer`. Its memory is that of
    one step, whatever their number; each direction costs a descent (Franceschi et al. 2017, arXiv 1703.01785). An
    inner loss may not depend on `w`."""
    whole_number("steps", steps, at_least=0)
    step = _step_of(inner, rate, optimizer)

    def end(outer: Tree) -> Tree:
        return _walk(step, (start, optimizer.start(_named(start))), outer, 0, steps)[0]

    # What torch imports for it is made by its deprecated torch.jit.script; our attention has no forward mode.
    with warnings.catch_warnings(), plain_attention():
        warnings.simplefilter("ignore", FutureWarning)
        pair = jvp(end, (outer,), (direction,))
    return pair[0], pair[1]


@second_order_attention()
def implicit(
    inner: InnerLoss, objective: Callable[[Tree, Tree], Tensor], w: Tree, outer: Tree, *, solver: str = "cg",
    steps: int = 20, rate: float | None = None,
) -> Tree:  # fmt: skip
    """The gradient of `objective(w*(outer), outer)` by `outer`, where `w` is a minimum w* of the inner loss at step 0,
    however it was found: ∂O/∂λ − ∂²L/∂λ∂w · (∂²L/∂w²)⁻¹ ∂O/∂w, by the implicit function theorem. It is None for what is
    no tensor of real numbers. Raises ValueError for another solver, a number out of range, or a rate without use.

    Args:
        inner, outer: as for `descent`.
        objective: `objective(w, outer)`, the outer loss, one number.
        w: a minimum, at which the Hessian is positive definite.
        solver: `cg`: conjugate gradient (Pedregosa 2016, arXiv 1602.02355). `neumann`: the first terms of the series
            rate · Σ (I − rate · H)ᵏ (Lorraine et al. 2020, arXiv 1911.02590).
        steps: of conjugate gradient; or terms of the series.
        rate: of the series; below 2 / the largest eigenvalue of H.

    Warns:
        UserWarning: `w` is no minimum, or the solver has not solved the system to 5%.
    """
    one_of("solver", solver, ("cg", "neumann"))
    whole_number("steps", steps, at_least=1)
    if (rate is None) == (solver == "neumann"):
        raise Invalid("rate", rate, "belongs to solver='neumann', which needs it", "give both, or neither")
    w, outer = _detached(w), _detached(outer)
    tensors, whole = _parted(outer)
    of_w, of_outer = grad(lambda w, tensors: objective(w, whole(tensors)), argnums=(0, 1))(w, tensors)
    slope: Callable[[Tree], Tree] = lambda at: grad(inner)(at, outer, 0)  # noqa: E731
    at_w, pull = vjp(slope, w)[:2]
    form = pytree.tree_structure(w)

    def curvature(v: dict[str, Tensor]) -> dict[str, Tensor]:
        """H v; the functions of the library have tasks as their first dimension, here one."""
        (product,) = pull(pytree.tree_unflatten([value[0] for value in v.values()], form))
        return {name: value.unsqueeze(0) for name, value in _named(product).items()}

    _warn_if(lambda: _why_no_minimum(w, _named(at_w), _named(pull(at_w)[0]), inner(w, outer, 0)))
    right = {name: value.unsqueeze(0) for name, value in _named(of_w).items()}
    if rate is None:
        solution, residual = conjugate_gradient(curvature, right, steps)
        _warn_if(lambda: _why_unsolved(float(residual), steps))
    else:
        real_number("rate", rate, above=0)
        term = solution = right
        for _ in range(steps - 1):
            image = curvature(term)
            term = {name: value - rate * image[name] for name, value in term.items()}
            solution = {name: value + term[name] for name, value in solution.items()}
        solution = {name: rate * value for name, value in solution.items()}
        _warn_if(lambda: _why_unsolved(_norm(term) / max(_norm(right), 1e-300), steps, rate))
    cross = vjp(lambda tensors: grad(inner)(w, whole(tensors), 0), tensors)[1]
    (indirect,) = cross(pytree.tree_unflatten([value[0] for value in solution.values()], form))
    return whole(pytree.tree_map(torch.sub, of_outer, indirect), keep=False)


TOLERANCE = 0.05  # what may be left of a system, or of the way to a minimum, without a warning


def _warn_if(fault: Callable[[], str]) -> None:
    """Warns of what `fault` says, if anything."""
    try:
        text = fault()
    except RuntimeError:  # torch.func.vmap cannot look at numbers
        return
    if text:
        warnings.warn(f"implicit: {text}", stacklevel=4)  # where `implicit` is called, through its decorator


def _norm(values: dict[str, Tensor]) -> float:
    return float(torch.stack([value.square().sum() for value in values.values()]).sum().sqrt())


def _why_no_minimum(w: Tree, slope: dict[str, Tensor], image: dict[str, Tensor], loss: Tensor) -> str:
    """Empty unless the best step down the gradient moves `w` and lowers the loss; `image` is H times the slope."""
    square, along = _norm(slope) ** 2, sum(float((value * image[name]).sum()) for name, value in slope.items())
    length = square / along if along > 0 else float("inf")
    fall = square * length / 2 if square else 0.0
    size = max(_norm(_named(w)), torch.finfo(loss.dtype).eps ** 0.5)  # a minimum may be at 0
    if fall <= TOLERANCE * abs(float(loss)) or length * square**0.5 <= TOLERANCE * size:
        return ""
    return "w is no minimum of the inner loss, which falls along its gradient: descend longer before"


def _why_unsolved(left: float, steps: int, rate: float | None = None) -> str:
    """Empty if little of the right-hand side is left after conjugate gradient, or of the terms of a series."""
    if left <= TOLERANCE:
        return ""
    if rate is None:
        text = f"after steps={steps} of conjugate gradient {left:.1g} of the right-hand side is left: type more steps"
        return f"{text}, if the Hessian of the inner loss is positive definite at w"
    text = f"the last of steps={steps} terms of the series is {left:.1g} times the first: type more steps"
    return f"{text}, or a smaller rate where it grows"


# The steps

_Point = tuple[Tree, dict[str, Any]]  # inner variables, and the state of their optimiser
_Step = Callable[[_Point, Tree, int], _Point]


def _step_of(inner: InnerLoss, rate: Rate, optimizer: InnerOptimizer, plain: bool = False) -> _Step:
    """With `plain`, no tensor belongs to a transform of `torch.func`, whose gradients always keep a graph of their
    own."""
    slope = partial(_slope, inner) if plain else grad(inner)
    if not callable(rate):
        real_number("rate", rate, above=0)

    def step(point: _Point, outer: Tree, number: int) -> _Point:
        w, state = point
        slopes = slope(w, outer, number)
        if number == 0:
            _check_depends(inner, w, outer, slopes)
        directions, state = optimizer.direct(_named(slopes), state, number)
        rates = rate(outer, number) if callable(rate) else rate
        leaves, form = pytree.tree_flatten(w)
        try:  # a tree of rates goes by the names of the variables
            each = [rates] * len(leaves) if isinstance(rates, float | int | Tensor) else form.flatten_up_to(rates)
        except ValueError as error:
            text = f"rate: gives other rates than one for each inner variable ({first_line(error)})"
            raise ValueError(text) from error
        moved = [leaf - size * way for leaf, size, way in zip(leaves, each, directions.values(), strict=True)]
        return pytree.tree_unflatten(moved, form), state

    return step


def _check_depends(inner: InnerLoss, w: Tree, outer: Tree, slopes: Tree) -> None:
    """Raises ValueError if the inner loss does not depend on `w`; slopes of zeros may be those of a minimum, too."""
    learns = []
    try:
        if any(bool(slope.any()) for slope in pytree.tree_leaves(slopes)):
            return
        copies = pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(), w)
        learns = pytree.tree_leaves(copies)
        with torch.enable_grad():
            loss = inner(copies, _detached(outer), 0)
        grads = torch.autograd.grad(loss, learns, allow_unused=True) if loss.requires_grad else [None]
    except RuntimeError:  # within a transform of torch.func, which allows none of this
        return
    if learns and all(slope is None for slope in grads):
        raise ValueError("inner: its loss at step 0 does not depend on w; compute it from the first argument")


def _slope(inner: InnerLoss, w: Tree, outer: Tree, number: int) -> Tree:
    """The gradient of the inner loss, by autograd; it has a graph where the caller's tensors may have one."""
    graph = torch.is_grad_enabled()
    leaves, form = pytree.tree_flatten(w)
    with torch.enable_grad():
        # Views, since `outer` may have the same tensors.
        copies = [
            leaf.view_as(leaf) if graph and leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves
        ]
        loss = inner(pytree.tree_unflatten(copies, form), outer, number)
    slopes = torch.autograd.grad(loss, copies, create_graph=graph, allow_unused=True, materialize_grads=True)
    return pytree.tree_unflatten(slopes, form)


def _walk(step: _Step, point: _Point, outer: Tree, first: int, end: int) -> _Point:
    for number in range(first, end):
        point = step(point, outer, number)
    return point


class _ComputedAgain(torch.autograd.Function):
    """The end of a path, whose derivative computes the steps again: from every point of the path, if these are `kept`;
    else it goes back by halves, and keeps the point in the middle of each. A point goes with the state of torch's
    random numbers there: an inner loss with dropout has the same masks again."""

    @staticmethod
    def forward(
        ctx: Any, step: _Step, form: Any, first: int, end: int, kept: bool, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*leaves)
        ctx.step, ctx.form, ctx.first, ctx.end, ctx.points = step, form, first, end, []
        point, outer = pytree.tree_unflatten(leaves, form)
        ctx.noise = noise = _noise(point)
        for number in range(first, end):
            if kept:
                if not noise[0].equal((now := _noise(point))[0]) or now[1][0]:  # else 5 kB a step for nothing
                    noise = now
                ctx.points.append((point, noise))
            point = step(point, outer, number)
        return tuple(value.clone() for value in pytree.tree_leaves(point))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        point, outer = pytree.tree_unflatten(ctx.saved_tensors, ctx.form)
        sums = pytree.tree_map(torch.zeros_like, outer)

        def back(point: _Point, noise: _Noise, slope: _Point, first: int, end: int) -> _Point:
            nonlocal sums
            if end == first:
                return slope
            _set_noise(noise)
            if end - first > 1:
                middle = (first + end) // 2
                halfway = _walk(ctx.step, point, outer, first, middle)
                slope = back(halfway, _noise(halfway), slope, middle, end)
                return back(point, noise, slope, first, middle)
            leaves, form = pytree.tree_flatten(_detached((point, outer)))
            learns = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
            with torch.enable_grad():
                ends = pytree.tree_leaves(ctx.step(*pytree.tree_unflatten(leaves, form), first))
            moves = [place for place, value in enumerate(ends) if value.requires_grad]
            upstream = pytree.tree_leaves(slope)
            computed = iter(torch.autograd.grad(
                [ends[place] for place in moves], learns, [upstream[place] for place in moves], allow_unused=True,
                materialize_grads=True,
            ))  # fmt: skip
            grads = [next(computed) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves]
            slope, of_outer = pytree.tree_unflatten(grads, form)
            sums = pytree.tree_map(torch.add, sums, of_outer)
            return slope

        slope = pytree.tree_unflatten(slopes, pytree.tree_structure(point))
        after = _noise(point)
        with second_order_attention():
            for number, (kept, noise) in reversed(list(enumerate(ctx.points, ctx.first))):
                slope = back(kept, noise, slope, number, number + 1)
            if not ctx.points:
                slope = back(point, ctx.noise, slope, ctx.first, ctx.end)
        _set_noise(after)
        return None, None, None, None, None, *pytree.tree_leaves((slope, sums))


_Noise = tuple[Tensor, tuple[list[int], list[Tensor]]]  # the states of torch's random numbers on the host and on GPUs


def _noise(point: _Point) -> _Noise:
    return torch.get_rng_state(), get_device_states(*pytree.tree_leaves(point))


def _set_noise(noise: _Noise) -> None:
    torch.set_rng_state(noise[0])
    set_device_states(*noise[1])


def _named(tree: Tree) -> dict[str, Tensor]:
    """The tensors of a tree by their places."""
    return {str(place): leaf for place, leaf in enumerate(pytree.tree_leaves(tree))}


def _detached(tree: Tree) -> Tree:
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _parted(outer: Tree) -> tuple[list[Tensor], Callable[..., Tree]]:
    """The tensors of `outer` that may have a derivative, and a function that puts such tensors in their places again;
    the others, labels, plain numbers and None, it keeps, or leaves None in their places."""
    leaves, form = pytree.tree_flatten(outer)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def whole(tensors: list[Tensor], *, keep: bool = True) -> Tree:
        put = dict(zip(places, tensors, strict=True))
        return pytree.tree_unflatten(
            [put.get(place, leaf if keep else None) for place, leaf in enumerate(leaves)], form
        )

    return [leaves[place] for place in places], whole
