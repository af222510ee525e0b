"""Tables of structural causal models: what a table has, and that most of them can be learned."""

from typing import Any

import numpy as np
import pytest
import torch

from metalearn.app.prior_check import learners, source_of
from metalearn.tasks.priors.source import PriorTasks
from tests.runs import slow

GROUPS = range(0, 40 * 64, 64)


def tables(**settings: Any) -> PriorTasks:
    return source_of("table", settings, [])


def test_a_table_has_its_groups_shape_and_all_classes() -> None:
    made, missing, seen = tables(), 0, set()
    for number in GROUPS:
        shape, (support, query) = (
            made.shape("val", number // 64),
            made.episodes("val", torch.tensor([number, number + 1])),
        )
        assert [*support.x.shape] == [2, shape.support, shape.features]
        assert support.x.shape[1] + query.x.shape[1] == shape.rows >= 15 * (shape.classes or 0)
        for task in range(2):
            labels = set(support.y[task].tolist())
            assert len(labels) > 1 and set(query.y[task].tolist()) <= labels
        missing += bool(support.x.isnan().any())
        seen.add(shape.classes)
    assert 5 < missing < 35 and {2, 10} <= seen and len(seen) > 5


def test_a_table_alone_has_the_bits_of_a_chunk() -> None:
    made = tables()
    together = made.episodes("train", torch.arange(64, 72))
    for number in range(8):
        alone = made.episodes("train", torch.tensor([64 + number]))
        for batch, own in zip(together, alone, strict=True):
            assert np.array_equal(batch.x[number].numpy(), own.x[0].numpy(), equal_nan=True)
            assert torch.equal(batch.y[number], own.y[0])


def test_settings_leave_out_what_they_name() -> None:
    made = tables(missing=0.0, classes=None, functions={"trees": 1.0, "graph": 0.0, "network": 0.0, "products": 0.0},
                  noise=1e-9, categories=0.0, features=3, rows=200)  # fmt: skip
    for number in (0, 64, 128):
        (support, query) = made.episodes("train", torch.tensor([number]))
        y = torch.cat([support.y, query.y], dim=1)
        assert not support.x.isnan().any() and support.x.shape[2] == 3 and y.dtype == torch.float32
        assert len(y.round(decimals=4).unique()) <= 8, "a tree of three questions has eight answers"


def test_the_target_of_half_of_the_tasks_has_further_noise() -> None:
    settings = {"classes": None, "features": 3, "rows": 200, "missing": 0.0}
    alike, weaker = 0, list[float]()
    little, much = (tables(**settings, target_noise=noise) for noise in (1e-9, 2.0))
    for number in range(0, 64 * 64, 64):
        first, second = (made.episodes("train", torch.tensor([number])) for made in (little, much))
        assert first.support.x.equal(second.support.x)
        if torch.allclose(first.query.y, second.query.y, atol=1e-6):
            alike += 1
        else:
            both = torch.stack([first.query.y.flatten(), second.query.y.flatten()])
            weaker.append(float(both.corrcoef()[0, 1]))
    assert 20 < alike < 44 and 0.2 < np.mean(weaker) < 0.7  # 1 / √(1 + 2²) of targets of variance 1 is 0.45


@slow
def test_a_forest_learns_most_of_the_tasks() -> None:
    learn = learners()
    if learn is None:
        pytest.skip("needs scikit-learn, of the extra tables")
    for made, least, most in ((tables(), 0.8, 0.15), (tables(target_noise=[0.1, 2]), 0.72, 0.3)):
        tasks = [made.episodes("val", torch.tensor([number])) for number in range(0, 6400, 64)]
        areas = np.array([learn(task)["forest"] for task in tasks])
        assert areas.mean() > least and (areas < 0.6).mean() < most
