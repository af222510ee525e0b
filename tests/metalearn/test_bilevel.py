"""The toolbox for bilevel programs, in float64: against finite differences, closed forms, and each other."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from metalearn import bilevel
from metalearn.bilevel import descent, forward, functional_call, implicit

DOUBLE = torch.float64
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


X, Y, CLEAN_X, CLEAN_Y = (drawn(6, size, seed=seed) for seed, size in enumerate((3, 1, 3, 1)))
START = {name: drawn(*value.shape, seed=7) / 2 for name, value in NET.named_parameters()}
OUTER = {
    "weights": drawn(6, seed=8).abs(),
    "decay": [torch.tensor(0.3, dtype=DOUBLE)],
    "rate": torch.tensor(0.1, dtype=DOUBLE),
}


def inner(w: Any, outer: Any, step: int) -> Tensor:
    """A weighted loss of a network that depends on the step, and a decay."""
    errors = (functional_call(NET, w, (X,)) - Y).square().mean(dim=1)
    size = sum(value.square().sum() for value in w.values())
    return (outer["weights"] * errors).sum() / (step + 2) + outer["decay"][0] * size


def objective(w: Any, outer: Any) -> Tensor:
    return (functional_call(NET, w, (CLEAN_X,)) - CLEAN_Y).square().mean() + outer["weights"].sum() / 10


def of_outer(outer: Any, step: int) -> Tensor:
    return outer["rate"] / (step + 1)


OPTIMIZERS = {
    "sgd": bilevel.sgd(), "momentum": bilevel.momentum(momentum=0.8), "rmsprop": bilevel.rmsprop(decay=0.9, eps=0.1),
    "adam": bilevel.adam(beta1=0.9, beta2=0.99, eps=0.1),
}  # fmt: skip


def values_of(tree: Any) -> list[Tensor]:
    return pytree.tree_leaves(tree)


def gradient(steps: int, **settings: Any) -> list[Tensor]:
    leaves, form = pytree.tree_flatten((START, OUTER))
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    start, outer = pytree.tree_unflatten(leaves, form)
    end = descent(inner, start, outer, steps=steps, rate=of_outer, **settings)
    grads = torch.autograd.grad(objective(end, outer), leaves, allow_unused=True, materialize_grads=True)
    return list(grads)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("memory", ["all", "points", "log"])
def test_the_derivative_of_a_descent_is_a_finite_difference(name: str, memory: str) -> None:
    leaves, form = pytree.tree_flatten((START, OUTER))
    way = [drawn(*leaf.shape, seed=20 + place) for place, leaf in enumerate(leaves)]
    wanted = sum(
        (g * v).sum() for g, v in zip(gradient(5, optimizer=OPTIMIZERS[name], memory=memory), way, strict=True)
    )

    def at(length: float) -> Tensor:
        start, outer = pytree.tree_unflatten([leaf + length * v for leaf, v in zip(leaves, way, strict=True)], form)
        end = descent(inner, start, outer, steps=5, rate=of_outer, optimizer=OPTIMIZERS[name], memory=memory)
        return objective(end, outer)

    h = 1e-3  # of the sixth order: (45 (f₁ − f₋₁) − 9 (f₂ − f₋₂) + (f₃ − f₋₃)) / 60 h
    found = sum(c * (at(k * h) - at(-k * h)) for k, c in ((1, 45), (2, -9), (3, 1))) / (60 * h)
    assert abs(found - wanted) <= 1e-8 * max(1, abs(wanted))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_forward_mode_gives_the_whole_graphs_derivative(name: str, steps: int) -> None:
    kind = OPTIMIZERS[name]
    whole, *others = (gradient(steps, optimizer=kind, memory=memory) for memory in ("all", "points", "log"))
    for other in others:
        torch.testing.assert_close(other, whole, rtol=1e-10, atol=1e-12)
    way = pytree.tree_map(lambda leaf: torch.ones_like(leaf) / 3, OUTER)
    end, moved = forward(inner, START, OUTER, way, steps=steps, rate=of_outer, optimizer=kind)
    w = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), end)
    slopes = torch.autograd.grad(objective(w, OUTER), values_of(w))
    along = sum((a * b).sum() for a, b in zip(slopes, values_of(moved), strict=True)) + 6 / 3 / 10
    wanted = sum(value.sum() for value in whole[len(values_of(START)) :]) / 3
    torch.testing.assert_close(torch.as_tensor(along), wanted, rtol=1e-9, atol=1e-11)


def test_a_truncated_descent_is_that_of_its_last_steps() -> None:
    middle = descent(inner, START, OUTER, steps=3, rate=0.1)

    def later(w: Any, outer: Any, step: int) -> Tensor:
        return inner(w, outer, step + 3)

    def grads(**settings: Any) -> tuple[Tensor, ...]:
        outer = pytree.tree_map(lambda leaf: leaf.clone().requires_grad_(), OUTER)
        end = descent(outer=outer, rate=0.1, **settings)
        return torch.autograd.grad(objective(end, outer), (outer["weights"], outer["decay"][0]))

    wanted = grads(inner=later, start=middle, steps=2)
    for memory in ("all", "points", "log"):
        torch.testing.assert_close(grads(inner=inner, start=START, steps=5, last=2, memory=memory), wanted)


def ridge(w: Any, outer: Any, step: int) -> Tensor:
    return (X @ w["w"] - Y).square().sum() / 2 + outer["decay"] / 2 * w["w"].square().sum()


@pytest.mark.parametrize(("solver", "settings"), [("cg", {"steps": 3}), ("neumann", {"steps": 4000, "rate": 0.05})])
def test_ridges_implicit_gradient_is_its_closed_form(solver: str, settings: Any) -> None:
    def closed(decay: Tensor) -> Tensor:
        w = torch.linalg.solve(X.T @ X + decay * torch.eye(3, dtype=DOUBLE), X.T @ Y)
        return (CLEAN_X @ w - CLEAN_Y).square().sum() + decay

    decay = torch.tensor(0.7, dtype=DOUBLE, requires_grad=True)
    (wanted,) = torch.autograd.grad(closed(decay), decay)
    w = torch.linalg.solve(X.T @ X + 0.7 * torch.eye(3, dtype=DOUBLE), X.T @ Y)
    found = implicit(
        ridge, lambda w, outer: (CLEAN_X @ w["w"] - CLEAN_Y).square().sum() + outer["decay"], {"w": w},
        {"decay": decay}, solver=solver, **settings,
    )  # fmt: skip
    assert abs(found["decay"] - wanted) <= 1e-8 * abs(wanted)


def test_rates_go_by_name() -> None:
    rates = {name: torch.tensor(0.1 * (place + 1), dtype=DOUBLE) for place, name in enumerate(START)}
    turned = dict(reversed(rates.items()))
    for_each = [descent(inner, START, OUTER, steps=2, rate=lambda *_, r=r: r) for r in (rates, turned)]
    torch.testing.assert_close(for_each[0], for_each[1], rtol=0, atol=0)
    with pytest.raises(ValueError, match="rate: gives other rates than one for each inner variable"):
        descent(inner, START, OUTER, steps=1, rate=lambda *_: {"0.weight": 0.1})


@pytest.mark.parametrize("memory", ["all", "points", "log"])
def test_outer_may_hold_labels_numbers_and_nothing(memory: str) -> None:
    def classes(w: Any, outer: Any, step: int) -> Tensor:
        logits = X @ w + outer["shift"]
        return torch.nn.functional.cross_entropy(outer["sharp"] * logits, outer["labels"])

    shift = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    outer = {"labels": torch.arange(6) % 2, "sharp": 2.0, "shift": shift, "nothing": None}
    start = drawn(3, 2, seed=9)
    end = descent(classes, start, outer, steps=3, rate=0.1, memory=memory)
    (found,) = torch.autograd.grad(end.square().sum(), shift)
    (wanted,) = torch.autograd.grad(descent(classes, start, outer, steps=3, rate=0.1).square().sum(), shift)
    torch.testing.assert_close(found, wanted)
    alone = start.clone().requires_grad_()
    assert descent(lambda w, *_: w.square().sum(), alone, None, steps=2, rate=0.1, memory=memory).grad_fn is not None


def test_the_implicit_gradient_takes_labels_and_numbers() -> None:
    def some(w: Any, outer: Any, step: int) -> Tensor:
        return outer["factor"] * ((w["w"] - outer["goal"])[outer["rows"]] ** 2).sum()

    goal, rows = torch.arange(3.0, dtype=DOUBLE), torch.tensor([0, 1, 2])
    outer = {"factor": 2.0, "goal": goal, "rows": rows, "nothing": None}
    found = implicit(some, lambda w, outer: (w["w"][outer["rows"]] ** 2).sum(), {"w": goal}, outer)
    torch.testing.assert_close(found["goal"], 2 * goal)
    assert found["rows"] is None and found["factor"] is None and found["nothing"] is None


def test_log_memory_keeps_no_step_for_the_derivative() -> None:
    """The graph of 64 steps is one node, which keeps what the descent was given."""
    outer = OUTER | {"weights": OUTER["weights"].clone().requires_grad_()}
    end = descent(inner, START, outer, steps=64, rate=0.05, memory="log")
    (node,) = {value.grad_fn for value in end.values()}
    assert len(node.saved_tensors) == len(values_of((START, outer)))  # type: ignore[union-attr]
    assert {following for following, _ in node.next_functions if following is not None} == {  # type: ignore[union-attr]
        torch.autograd.graph.get_gradient_edge(outer["weights"]).node
    }


@pytest.mark.parametrize("memory", ["points", "log"])
def test_a_step_computed_again_draws_the_same_masks(memory: str) -> None:
    def dropped(w: Any, outer: Any, step: int) -> Tensor:
        errors = torch.nn.functional.dropout(X, 0.5) @ w - Y
        return errors.square().mean() + outer * w.square().sum()

    def of(memory: str) -> tuple[float, float]:
        torch.manual_seed(3)
        decay = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
        end = descent(dropped, drawn(3, 1, seed=9), decay, steps=9, rate=0.1, memory=memory)
        (slope,) = torch.autograd.grad(end.square().sum(), decay)
        return float(slope), float(torch.rand(()))

    assert of(memory) == pytest.approx(of("all"), rel=1e-12), "or the caller's numbers are others afterwards"


@pytest.mark.parametrize("memory", ["all", "points", "log"])
def test_an_inner_loss_without_its_variables_is_refused(memory: str) -> None:
    bias = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="inner: its loss at step 0 does not depend on w"):
        descent(lambda w, outer, step: outer * bias, drawn(3, seed=9), bias, steps=2, rate=0.1, memory=memory)
    saddle = descent(lambda w, outer, step: outer * w.square().sum(), torch.zeros(3), bias, steps=2, rate=0.1)
    assert saddle.equal(torch.zeros(3)) and forward(
        lambda w, outer, step: outer * w.square().sum(), torch.zeros(3), bias, bias, steps=2, rate=0.1
    )[1].equal(torch.zeros(3))


HESSIAN = {"apart": [0.1, 1.0, 10.0], "indefinite": [-1.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    ("hessian", "at", "settings", "message"),
    [
        ("apart", 1.0, {"steps": 1}, "after steps=1 of conjugate gradient 0.5 of the right-hand side is left"),
        ("apart", 0.0, {"steps": 3}, "w is no minimum of the inner loss"),
        ("indefinite", 1.0, {"steps": 1}, "if the Hessian of the inner loss is positive definite"),
        ("apart", 1.0, {"solver": "neumann", "steps": 9, "rate": 0.3}, "a smaller rate where it grows"),
        ("apart", 1.0, {"solver": "neumann", "steps": 9, "rate": 1e30}, "a smaller rate where it grows"),
        ("apart", 1.0, {"steps": 3}, None),
        ("apart", 1.0, {"solver": "neumann", "steps": 1500, "rate": 0.15}, None),
    ],
)
def test_what_the_implicit_gradient_lacks_is_said(hessian: str, at: float, settings: Any, message: str | None) -> None:
    """The minimum is at 1 in each direction; warnings are errors of tests."""
    curvature = torch.tensor(HESSIAN[hessian], dtype=DOUBLE)

    def bowl(w: Any, outer: Any, step: int) -> Tensor:
        return (curvature * (w - outer).square()).sum() / 2 + 1

    w, outer = torch.full((3,), at, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE)
    with nullcontext() if message is None else pytest.warns(UserWarning, match=re.escape(message)):
        slope = implicit(bowl, lambda w, outer: (w + 1).square().sum() / 2, w, outer, **settings)
    if message is None:
        torch.testing.assert_close(slope, torch.full((3,), 2.0, dtype=DOUBLE))


def test_the_implicit_gradient_is_mapped_and_quiet_at_zero() -> None:
    def bowl(w: Any, outer: Any, step: int) -> Tensor:
        return (w - outer).square().sum()

    def gradient(outer: Tensor) -> Any:
        return implicit(bowl, lambda w, outer: (w - 1).square().sum() / 2, outer + 1e-10, outer)

    torch.testing.assert_close(gradient(torch.zeros(3)), -torch.ones(3))
    torch.testing.assert_close(torch.func.vmap(gradient)(torch.zeros(2, 3)), -torch.ones(2, 3))
    with pytest.warns(UserWarning, match="w is no minimum") as said:
        implicit(bowl, lambda w, outer: w.square().sum(), torch.zeros(3), torch.ones(3))
    assert said[0].filename == __file__


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: descent(inner, START, OUTER, steps=-1, rate=0.1), "steps=-1: must be a whole number"),
        (lambda: descent(inner, START, OUTER, steps=2, rate=0.0), "rate=0.0: must be a finite number above 0"),
        (lambda: descent(inner, START, OUTER, steps=2, rate=0.1, last=3), "last=3: must be a whole number"),
        (lambda: descent(inner, START, OUTER, steps=2, rate=0.1, memory="some"), "must be one of all, points, log"),
        (lambda: implicit(inner, objective, START, OUTER, solver="lu"), "must be one of cg, neumann"),
        (lambda: implicit(inner, objective, START, OUTER, solver="neumann"), "rate=None: belongs to solver='neumann'"),
        (lambda: implicit(inner, objective, START, OUTER, rate=0.1), "rate=0.1: belongs to solver='neumann'"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
