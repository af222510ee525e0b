"""The outer optimisers and the schedules of their rate."""

import pytest
import torch

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
