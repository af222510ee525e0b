"""The outer optimisers and the schedules of their rate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from metalearn.runs.checkpoint import Snapshot
from metalearn.training.optimizers import (
    Clipping,
    FlatOptimizer,
    OuterOptimizer,
    Rates,
    adam,
    adamw,
    joined,
    muon,
    scheduled,
    sgd,
)
from metalearn.training.trainer import TrainState
from metalearn.types import Params


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.775, 0.55, 0.325]),  # in four equal parts from 1 to 0.1, reached after the last step
        ("cosine", [1.0, 0.8681980515339464, 0.55, 0.23180194846605362]),  # 0.1 + 0.9 (1 + cos(π · 0, ¼, ½, ¾)) / 2
        ("step", [1.0, 1.0, 0.3, 0.3]),
    ],
)
def test_the_rate_falls_as_its_schedule_says(schedule: str, rates: list[float]) -> None:
    rate = scheduled(Rates(lr=1.0, schedule=schedule, min_lr=0.1, decay=0.3, decay_every=2, warmup=0))
    assert [rate(step, 4) for step in range(1, 5)] == pytest.approx(rates)


def test_a_step_stays_above_the_lowest_rate() -> None:
    rate = scheduled(Rates(lr=1.0, schedule="step", min_lr=0.2, decay=0.5, decay_every=3, warmup=0))
    assert [rate(step, 12) for step in (1, 3, 4, 6, 7, 9, 10, 12)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


def test_warm_up_rises_to_the_schedule() -> None:
    rate = scheduled(Rates(lr=0.6, schedule="constant", min_lr=0, decay=0.5, decay_every=1, warmup=2))
    assert [rate(step, 10) for step in range(1, 5)] == pytest.approx([0.2, 0.4, 0.6, 0.6])


RATES = Rates(0.01)
OF_ADAM: dict[str, float] = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-5}
OF_TORCHS_ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5}
PAIRS = {
    "adam": (adam(rates=RATES, **OF_ADAM), lambda params: torch.optim.Adam(params.values(), **OF_TORCHS_ADAM)),
    "sgd": (sgd(rates=RATES, momentum=0), lambda params: torch.optim.SGD(params.values(), lr=0.01)),
    "momentum": (sgd(rates=RATES, momentum=0.7), lambda ps: torch.optim.SGD(ps.values(), lr=0.01, momentum=0.7)),
}
"""Our optimisers, and torch's."""


class Several:
    """Optimisers of torch side by side, with what is done to parameters and gradients before their step."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], before: Callable[[float], object] = float) -> None:
        self._optimizers, self._before = optimizers, before
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        self._before(self.param_groups[0]["lr"])
        for optimizer in self._optimizers:
            optimizer.step()


def decayed_sgd(params: Params) -> Several:
    def shrink(rate: float) -> None:
        for value in params.values():
            value.mul_(1 - rate * 0.2)

    return Several([torch.optim.SGD(params.values(), lr=0.01, momentum=0.7)], shrink)


def torchs_muon(params: Params) -> Several:
    """Muon has the matrices: a filter of four dimensions is one of two, as a view of the same numbers."""
    matrices, others = ({n: v for n, v in params.items() if (v.dim() >= 2) == wide} for wide in (True, False))
    views = [value.detach().view(len(value), -1).requires_grad_() for value in matrices.values()]

    def give_gradients(rate: float) -> None:
        for view, value in zip(views, matrices.values(), strict=True):
            assert value.grad is not None
            view.grad = value.grad.view_as(view)

    of_matrices = torch.optim.Muon(views, lr=0.01, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    of_others = torch.optim.AdamW(others.values(), **OF_TORCHS_ADAM, weight_decay=0.2)
    return Several([of_matrices, of_others], give_gradients)


def clipped_adam(params: Params) -> Several:
    def clip(rate: float) -> None:
        torch.nn.utils.clip_grad_value_(params.values(), 0.5)
        torch.nn.utils.clip_grad_norm_(params.values(), 2.0)

    return Several([torch.optim.Adam(params.values(), **OF_TORCHS_ADAM)], clip)


FURTHER: dict[str, tuple[OuterOptimizer, Callable[[Params], Any]]] = {
    "adamw": (
        adamw(rates=RATES, **OF_ADAM, weight_decay=0.2),
        lambda params: torch.optim.AdamW(params.values(), **OF_TORCHS_ADAM, weight_decay=0.2),
    ),
    "sgd with decay": (sgd(rates=RATES, momentum=0.7, weight_decay=0.2), decayed_sgd),
    "muon": (muon(rates=RATES, **OF_ADAM, momentum=0.9, weight_decay=0.2), torchs_muon),
    "clipped": (adam(rates=RATES, **OF_ADAM, clipping=Clipping(clip_norm=2.0, clip_value=0.5)), clipped_adam),
}


def drawn(seed: int, dtype: torch.dtype) -> Params:
    """Tensors of many sizes, so that vectors of the processor are left half full at many places."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 3), "b": (1,), "c": (), "d": (5, 3, 3, 3), "e": (257,)}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def steps_of(learner: TrainState, first: int, last: int) -> None:
    """The steps from `first` to `last`, at rates that change."""
    for step in range(first, last + 1):
        grads = drawn(step, learner.params["a"].dtype)
        learner.update({name: value * learner.params[name].detach() for name, value in grads.items()}, 0.02 / step)
        learner.step = step


def equal(first: Params, second: Params) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", [*PAIRS, *FURTHER])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_they_compute_what_torch_does_to_the_same_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "bfloat16", dtype)  # Muon rounds so, and ours does not; up to torch 2.14 by a method
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    made, theirs = (PAIRS | FURTHER)[name]
    ours, torchs = (TrainState.new(drawn(0, dtype), start) for start in (made.start, theirs))
    for learner in (ours, torchs):
        steps_of(learner, 1, 300 if name in PAIRS else 40)
    if name == "clipped":  # torch adds up the norms of the parameters, and rounds otherwise
        torch.testing.assert_close(ours.params, torchs.params, rtol=1e-5, atol=1e-6)
    elif name == "muon":  # ours has several matrices in a product
        torch.testing.assert_close(ours.params, torchs.params, rtol=1e-4, atol=1e-5)
    else:
        assert equal(ours.params, torchs.params)


@pytest.mark.parametrize("name", FURTHER)
def test_a_state_goes_on_to_the_same_bits(name: str) -> None:
    start = FURTHER[name][0].start
    whole, stopped = (TrainState.new(drawn(0, torch.float32), start) for _ in range(2))
    steps_of(whole, 1, 20)
    steps_of(stopped, 1, 10)
    resumed = TrainState.restored(stopped.snapshot({}, {}), start)
    steps_of(resumed, 11, 20)
    assert equal(resumed.params, whole.params)


@pytest.mark.parametrize("name", FURTHER)
def test_a_step_on_a_device_is_that_of_the_host_or_none(name: str) -> None:
    """What a GPU computes, here on the CPU, whose fused Adam rounds otherwise."""
    start = FURTHER[name][0].start
    host, device = (TrainState.new(drawn(0, torch.float32), start) for _ in range(2))
    assert isinstance(device.optimizer, FlatOptimizer)
    flat = joined(device.params.values()).detach()
    for step in range(1, 11):
        grads, rate = drawn(step, torch.float32), 0.02 / step
        host.update(grads, rate)
        before = flat.clone()
        device.optimizer.step_of_device(flat, joined(grads.values()), torch.tensor(rate), torch.tensor(1.0))
        assert torch.equal(flat, before)
        device.optimizer.step_of_device(flat, joined(grads.values()), torch.tensor(rate), torch.tensor(0.0))
    torch.testing.assert_close(flat, joined(host.params.values()).detach(), rtol=1e-5, atol=1e-6)


def test_muon_says_what_it_updates() -> None:
    assert FURTHER["muon"][0].in_words(drawn(0, torch.float32)) == "Muon updates a, d; AdamW updates b, c, e"
    deep = {f"layer{number}": torch.zeros(2, 2) for number in range(9)}
    assert FURTHER["muon"][0].in_words(deep) == "Muon updates 9 parameters such as layer0; AdamW updates nothing"


def test_a_large_gradient_has_a_finite_norm() -> None:
    clipped = Clipping(clip_norm=1.0).of(torch.full((4,), 1e30))
    torch.testing.assert_close(clipped, torch.full((4,), 0.5))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("stops", ["torch", "ours"])
def test_torchs_optimizer_state_and_ours_are_the_same(name: str, stops: str, tmp_path: Path) -> None:
    """Earlier checkpoints hold a state of torch's. It goes through a file, as they do."""
    made, theirs = PAIRS[name]
    starts = [theirs, made.start] if stops == "torch" else [made.start, theirs]
    whole, stopped = (TrainState.new(drawn(0, torch.float32), start) for start in (theirs, starts[0]))
    steps_of(whole, 1, 20)
    steps_of(stopped, 1, 10)
    torch.save(stopped.snapshot({}, {}).state, tmp_path / "state.pt")
    saved = Snapshot(stopped.params, torch.load(tmp_path / "state.pt", weights_only=True), {"step": 10})
    resumed = TrainState.restored(saved, starts[1])
    assert resumed.step == 10
    steps_of(resumed, 11, 20)
    assert equal(resumed.params, whole.params)


def test_a_saved_state_does_not_change_with_the_next_step() -> None:
    learner = TrainState.new(drawn(0, torch.float32), PAIRS["adam"][0].start)
    steps_of(learner, 1, 1)
    saved = learner.optimizer.state_dict()["state"][0]
    before = {name: value.clone() for name, value in saved.items()}
    steps_of(learner, 2, 2)
    assert equal(saved, before)


def test_a_restored_optimizer_keeps_the_configs_settings() -> None:
    """The next step of Adam with β₁ = 0.5, written out, from a state that β₁ = 0.9 has made."""
    common: dict[str, Any] = {"rates": Rates(0.1), "beta2": 0.9, "eps": 1e-3}
    before = TrainState.new({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}, adam(beta1=0.9, **common).start)
    gradient = torch.tensor([0.5, -0.25], dtype=torch.float64)
    before.update({"w": gradient}, 0.1)

    learner = TrainState.restored(before.snapshot({}, {}), adam(beta1=0.5, **common).start)
    start = learner.params["w"].detach().clone()
    learner.update({"w": gradient}, 0.1)
    m = 0.5 * (0.1 * gradient) + 0.5 * gradient
    v = 0.9 * (0.1 * gradient**2) + 0.1 * gradient**2
    expected = start - 0.1 * (m / (1 - 0.5**2)) / ((v / (1 - 0.9**2)).sqrt() + 1e-3)
    torch.testing.assert_close(learner.params["w"].detach(), expected, rtol=1e-12, atol=0)


def test_parameters_of_any_layout_are_learned_in_one() -> None:
    """That which checkpoints and messages give them: in another one, the last bits of products may differ."""
    turned = torch.arange(6.0).reshape(2, 3).t()
    learner = TrainState.new({"w": turned}, sgd(rates=Rates(lr=0.1), momentum=0.0).start)
    assert learner.params["w"].is_contiguous() and learner.params["w"].equal(turned)
