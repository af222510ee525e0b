from collections.abc import Iterator

import pytest

from tests.distributed.worlds import world
from tests.forks import Forked


@pytest.fixture(scope="package")
def workers() -> Iterator[list[Forked]]:
    """A world of three for all tests of this folder; this process is rank zero."""
    with world() as others:
        yield others
