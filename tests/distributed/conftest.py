import subprocess
from collections.abc import Iterator

import pytest

from tests.distributed.worlds import world


@pytest.fixture(scope="module")
def workers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A world of three; this process is rank zero."""
    with world() as others:
        yield others
