from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.distributed.worlds import world
from tests.forks import Forked


@pytest.fixture(scope="package")
def workers() -> Iterator[list[Forked]]:
    """A world of three for all tests of this folder; this process is rank zero."""
    with world() as others:
        yield others


@pytest.fixture
def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3).double()
