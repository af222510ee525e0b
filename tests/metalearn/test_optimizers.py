"""The outer optimisers and the schedules of their rate."""

import pytest
import torch

from metalearn.training.loop import Progress, new_learner, restore, snapshot, update
from metalearn.training.optimizers import OuterOptimizer, adam, scheduled, sgd


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        (
            "linear",
            [1.0, 0.775, 0.55, 0.325],
        ),  # in four equal parts from 1 to 0.1, which it would reach after the last step
        ("cosine", [1.0, 0.8681980515339464, 0.55, 0.23180194846605362]),  # 0.1 + 0.9 (1 + cos(π · 0, ¼, ½, ¾)) / 2
        ("step", [1.0, 1.0, 0.3, 0.3]),
    ],
)
def test_the_rate_falls_as_its_schedule_says(schedule: str, rates: list[float]) -> None:
    rate = scheduled(lr=1.0, schedule=schedule, min_lr=0.1, decay=0.3, decay_every=2, warmup=0)
    assert [rate(step, 4) for step in range(1, 5)] == pytest.approx(rates)


def test_a_step_stays_above_the_lowest_rate() -> None:
    rate = scheduled(lr=1.0, schedule="step", min_lr=0.2, decay=0.5, decay_every=3, warmup=0)
    assert [rate(step, 12) for step in (1, 3, 4, 6, 7, 9, 10, 12)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


def test_warm_up_rises_to_the_schedule() -> None:
    rate = scheduled(lr=0.6, schedule="constant", min_lr=0, decay=0.5, decay_every=1, warmup=2)
    assert [rate(step, 10) for step in range(1, 5)] == pytest.approx([0.2, 0.4, 0.6, 0.6])


@pytest.mark.parametrize(
    ("made", "theirs"),
    [
        (
            adam(
                lr=0.1,
                beta1=0.8,
                beta2=0.9,
                eps=1e-3,
                schedule="constant",
                min_lr=0,
                decay=0.5,
                decay_every=1,
                warmup=0,
            ),
            lambda p: torch.optim.Adam([p], lr=0.1, betas=(0.8, 0.9), eps=1e-3),
        ),
        (
            sgd(lr=0.1, momentum=0.7, schedule="constant", min_lr=0, decay=0.5, decay_every=1, warmup=0),
            lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.7),
        ),
    ],
    ids=["adam", "sgd"],
)
def test_they_compute_what_torch_does(made: OuterOptimizer, theirs: object) -> None:
    assert callable(theirs)
    values = []
    for start in (lambda p: made.start({"x": p}), theirs):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        optimizer = start(x)
        for _ in range(3):
            optimizer.zero_grad()
            (x**3).sum().backward()
            optimizer.step()
        values.append(x.detach())
    assert torch.equal(*values)


def test_a_restored_optimizer_has_the_state_of_the_checkpoint_and_the_settings_of_the_config() -> None:
    """The next step of Adam with β₁ = 0.5, written out, from a state that β₁ = 0.9 has made."""
    common = {"lr": 0.1, "beta2": 0.9, "eps": 1e-3, "schedule": "constant"}
    common |= {"min_lr": 0, "decay": 0.5, "decay_every": 1, "warmup": 0}
    before = new_learner({"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}, adam(beta1=0.9, **common).start)  # type: ignore[arg-type]
    gradient = torch.tensor([0.5, -0.25], dtype=torch.float64)
    update(before, {"w": gradient}, 0.1)

    learner, _ = restore(snapshot(before, Progress(1), {"config": {}}, {}), adam(beta1=0.5, **common).start)  # type: ignore[arg-type]
    start = learner.params["w"].detach().clone()
    update(learner, {"w": gradient}, 0.1)
    m = 0.5 * (0.1 * gradient) + 0.5 * gradient
    v = 0.9 * (0.1 * gradient**2) + 0.1 * gradient**2
    expected = start - 0.1 * (m / (1 - 0.5**2)) / ((v / (1 - 0.9**2)).sqrt() + 1e-3)
    torch.testing.assert_close(learner.params["w"].detach(), expected, rtol=1e-12, atol=0)
