"""Calls that run on although nobody waits for them any more."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from distributed.calls.shutdown import served


@contextmanager
def held_threads(count: int, timeout: float) -> Iterator[None]:
    """So many threads that serve a call each, and do not come back."""
    began, ends = threading.Barrier(count + 1), threading.Event()

    def serve(number: int) -> None:
        with served("worker0", number, timeout):
            began.wait(60)
            ends.wait(60)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    began.wait(60)
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)


def test_a_worker_warns_of_threads_held_past_their_limits(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        """What is said when the next call begins."""
        caplog.clear()
        with served("worker0", 99, 60.0):
            return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "distributed"):
        with held_threads(20, timeout=60.0):
            assert not lines()
        with held_threads(7, timeout=0.0):
            assert not lines()
            with held_threads(1, timeout=0.0):
                (line,) = lines()
                assert line.startswith("8 calls run on after their time limits; each holds a thread of this worker")
                assert "threading.py" in line, "where the first one is"
                assert not lines(), "at twice as many"
