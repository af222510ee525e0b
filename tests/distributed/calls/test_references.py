"""References that come with a call are given up one at a time: torch's own way stops a worker for ever, if rarely."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import rpc

from distributed.calls import worker
from tests.distributed import remote_functions as functions


@pytest.mark.usefixtures("workers")
def test_a_fetched_reference_is_gone_before_the_call_ends() -> None:
    there = rpc.RRef(torch.arange(3))
    value, gone = rpc.rpc_sync("worker1", functions.fetch_and_look, ([there],), timeout=20)
    assert value.tolist() == [0, 1, 2] and gone


@pytest.mark.usefixtures("workers")
def test_only_lists_with_references_are_emptied() -> None:
    tensors = [torch.ones(1)]
    mixed = [torch.ones(1), rpc.RRef(1)]
    worker.give_up(tensors)
    worker.give_up(mixed)
    assert len(tensors) == 1 and not mixed


def test_references_go_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]

    class Slow:
        def to_here(self, timeout: float) -> float:
            return timeout

        def __del__(self) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)  # lets other threads go on, as torch may
            inside[0] -= 1

    monkeypatch.setattr(worker.rpc, "PyRRef", Slow)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: worker.fetched([Slow()], 5.0), range(32))) == {5.0}
    assert most == [1]
