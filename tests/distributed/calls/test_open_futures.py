"""Functions that return futures."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import rpc

import distributed as todist
from distributed.calls import session
from tests.distributed import call_functions as functions
from tests.distributed import remote_functions
from tests.distributed.worlds import WORLD, comes_true

pytestmark = pytest.mark.usefixtures("workers")

EACH = todist.dim_partitioner(0, exclusive=True, keepdim=False)
ON_ONE = todist.dim_partitioner(0, exclusive=True, keepdim=False, workers=[1])


def becomes(function: Callable[[], int], worker: int, count: int) -> bool:
    return comes_true(lambda: todist.remote_async_call(function, partitioner=worker).wait() == [count])


def release(worker: int, value: Any) -> None:
    todist.remote_sync_call(functions.release, args=(value,), partitioner=worker)


def test_open_futures_hold_no_thread_and_answer_in_order() -> None:
    for worker in (1, 0):
        calls = [
            todist.remote_async_call(
                functions.wait_for_release, args=(torch.arange(30),),
                partitioner=todist.dim_partitioner(0, exclusive=True, workers=[worker]),
            )
            for _ in range(session.MAX_WINDOW - 1)
        ]  # fmt: skip
        assert becomes(functions.open_here, worker, 30 * len(calls))
        assert becomes(functions.computed_here, worker, 1)  # the call that counts
        release(worker, "free")
        assert [call.wait() for call in calls] == [[(i, "free") for i in range(30)]] * len(calls)


@pytest.mark.parametrize("partitioner", [EACH, todist.dynamic_partitioner(keepdim=False)], ids=["dealt", "free"])
def test_nested_calls_with_then(partitioner: todist.PartitionFunction) -> None:
    expected = [(i**2, 1, 1) for i in range(9)]
    call = {"args": (torch.arange(9),), "partitioner": partitioner}
    assert todist.remote_sync_call(functions.asks_next, **call) == expected
    assert todist.remote_async_call(functions.asks_next, **call).wait() == expected
    assert sorted(todist.as_completed(functions.asks_next, **call)) == list(enumerate(expected))
    assert functions.squares(9) == expected


def test_results_of_futures_come_as_they_are_there() -> None:
    arrived = todist.as_completed(functions.at_once_or_later, args=(torch.arange(6),), partitioner=ON_ONE)
    assert sorted(next(arrived)[0] for _ in range(3)) == [0, 2, 4]
    release(1, None)
    assert sorted(number for number, _ in arrived) == [1, 3, 5]


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [(3, LookupError, "no three"), (4, ArithmeticError, "no four in the callback"), (5, LookupError, "no five at all")],
)
def test_failures_of_futures_are_whole(number: int, kind: type[Exception], message: str) -> None:
    items = torch.tensor([0, number, 1])
    ways: list[Callable[[], Any]] = [
        lambda: todist.remote_sync_call(functions.fails_later, args=(items,), partitioner=ON_ONE),
        lambda: todist.remote_async_call(functions.fails_later, args=(items,), partitioner=ON_ONE).wait(),
        lambda: list(todist.as_completed(functions.fails_later, args=(items,), partitioner=ON_ONE)),
        lambda: todist.remote_sync_call(
            functions.fails_later, args=(items,), partitioner=todist.dynamic_partitioner(keepdim=False)
        ),
    ]
    for way in ways:
        with pytest.raises(kind, match=message) as caught:
            way()
        assert any("by item 1 of the call" in note for note in caught.value.__notes__)


def test_the_limit_holds_and_what_is_given_up_is_ended() -> None:
    for partitioner in (1, 0):
        with pytest.raises(TimeoutError, match=rf"worker{partitioner} did not answer within 0\.3 s"):
            todist.remote_sync_call(functions.wait_for_release, args=(5,), partitioner=partitioner, timeout=0.3)
        assert becomes(functions.open_calls, partitioner, 0)
    for _ in range(session.MAX_WINDOW + 1):
        arrived = todist.as_completed(functions.at_once_or_later, args=(torch.arange(2),), partitioner=ON_ONE)
        assert next(arrived)[0] == 0
        arrived.close()
    assert todist.remote_sync_call(remote_functions.rank, partitioner=1, timeout=5) == [1]


def test_values_at_once_and_what_cannot_be_sent() -> None:
    assert todist.remote_sync_call(functions.at_once, args=(7,), partitioner=1) == [7]
    with pytest.raises(TypeError, match=r"the result of item 0 cannot be sent: cannot pickle"):
        todist.remote_sync_call(functions.lock_later, partitioner=1)
    with pytest.raises(TypeError, match=r"the result of item 0 cannot be sent.*write @distributed\.async_execution"):
        todist.remote_sync_call(functions.undeclared, partitioner=1)
    assert rpc.rpc_sync("worker1", functions.asks_next, (3,)) == (9, 0, 0)


def test_graphs_are_kept_in_a_context() -> None:
    net, x = nn.Linear(3, 2), torch.randn(2 * WORLD, 3)
    with todist.autograd.context() as ctx:
        losses = todist.remote_sync_call(functions.scaled_elsewhere, args=(net, x), partitioner=EACH)
        grads = todist.autograd.grad(ctx, torch.stack(losses).sum(), [*net.parameters()])
    for ours, theirs in zip(grads, torch.autograd.grad(net(x).square().sum(), [*net.parameters()]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_future_that_has_failed_can_be_read_twice_and_ends() -> None:
    class Token:
        pass

    def read(token: Token) -> None:
        for args, kind in (("path", FileNotFoundError), ("attributes", remote_functions.OwnError)):
            future = todist.remote_async_call(remote_functions.fail_with_attributes, args=(args,), partitioner=1)
            for _ in range(2):
                with pytest.raises(kind) as caught:
                    future.wait()
                assert sum(note.startswith("raised on worker1") for note in caught.value.__notes__) == 1
                assert args != "path" or caught.value.filename == "/no/such/file"
        assert future.done() and token is not None

    token = Token()
    there = weakref.ref(token)
    read(token)
    del token
    gc.collect()
    assert there() is None
