"""Class means without training: by hand on pictures of one number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.drawn_pictures import PROTOCOLS, accuracy_of, frozen_features, source_of
from metalearn.types import Batch, Episode
from tests.runs import slow


class Tasks:
    """Task number i has class 0 with the support pictures 0 and 0.4, class 1 with 1, and a query of each at `asked`."""

    def __init__(self, *asked: tuple[float, float]) -> None:
        self.asked = asked

    def episodes(self, split: str, indices: Tensor) -> Episode:
        assert split == "test"
        support = torch.tensor([0.0, 0.4, 1.0]).view(1, 3, 1, 1, 1)
        query = torch.tensor(self.asked[int(indices)]).view(1, 2, 1, 1, 1)
        return Episode(Batch(support, torch.tensor([[0, 0, 1]])), Batch(query, torch.tensor([[0, 1]])))


def test_a_query_belongs_to_the_nearest_mean() -> None:
    source: Any = Tasks((0.1, 0.9), (0.59, 0.61), (0.61, 0.59))  # the means are 0.2 and 1
    accuracy, interval = accuracy_of(source, lambda pictures: pictures.flatten(1), 3)
    assert accuracy == pytest.approx((1 + 1 + 0) / 3)
    assert interval == pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5)


def test_the_protocols_are_tasks_of_the_sets() -> None:
    for name, protocols in PROTOCOLS.items():
        for protocol in protocols:
            assert source_of(name, protocol).classes("test") == protocol.ways


@slow
def test_a_picture_is_computed_once() -> None:
    features = frozen_features()
    pictures = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    first = features(pictures)
    assert torch.equal(features(pictures[[1, 0]]), first[[1, 0]])
    assert not torch.equal(first[0], first[1])
