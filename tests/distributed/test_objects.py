"""Objects on one worker whose methods others call."""

import copy
import functools
import gc

import pytest
import torch
from torch import nn

import distributed as todist
from tests.distributed import call_functions as functions
from tests.distributed import remote_functions
from tests.distributed.call_functions import Counter
from tests.distributed.worlds import comes_true

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("on", ["worker1", 2, 0])
def test_an_object_keeps_its_state_between_calls(on: int | str) -> None:
    counter = todist.remote_object(Counter, 5, on=on)
    assert counter.add(2) == 7 and counter.add(amount=3) == 10
    pending = [counter.rpc_async().add(1) for _ in range(20)]
    assert sorted(future.wait() for future in pending) == list(range(11, 31))
    assert counter.rpc_sync(timeout=5).where() == todist.get_worker_id(on)
    assert repr(counter) == f"<remote object on worker{todist.get_worker_id(on)}>"


def test_errors_are_whole_and_limits_hold() -> None:
    with pytest.raises(remote_functions.OwnError, match="begins below zero") as caught:
        todist.remote_object(Counter, -1, on=1)
    assert caught.value.__notes__[0].startswith("raised on worker1")
    counter = todist.remote_object(Counter, 5, on=1)
    for way in (lambda: counter.fail(), lambda: counter.rpc_async().fail().wait()):
        with pytest.raises(remote_functions.OwnError, match="the counter is at 5") as caught:
            way()
        assert caught.value.__notes__[0].startswith("raised on worker1")
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'ad'"):
        counter.ad(2)
    for way in (lambda: counter.rpc_sync(timeout=0.2).pause(2), lambda: counter.rpc_async(timeout=0.2).pause(2).wait()):
        with pytest.raises(TimeoutError, match=r"worker1 did not answer within 0\.2 s"):
            way()
    with pytest.raises(ValueError, match="worker=9: the world has the workers 0 to 2"):
        todist.remote_object(Counter, 5, on=9)
    with pytest.raises(TypeError, match=r"argument 2 of item 0"):
        todist.remote_object(Counter, functions.threading.Lock(), on=1)
    with pytest.raises(AttributeError, match="_value: only names without a leading underscore"):
        counter._value  # noqa: B018
    with pytest.raises(TimeoutError):
        todist.remote_object(functools.partial(Counter, timeout=2), 5, on=1, timeout=0.2)
    assert counter.add(1) == 6


def test_handles_travel_and_the_object_ends_with_the_last() -> None:
    def alive() -> int:
        gc.collect()
        return int(todist.remote_sync_call(functions.counters_alive, partitioner=1)[0])

    def holders() -> list[str]:
        return [functions.what_holds_counters(), *todist.remote_sync_call(functions.what_holds_counters, partitioner=1)]

    assert comes_true(lambda: alive() == 0), holders()  # also after the failures and the late answers of other tests
    counter = todist.remote_object(Counter, 5, on=1)
    assert todist.remote_sync_call(functions.add_to, args=(counter, 4), partitioner=2) == [9]
    assert todist.remote_sync_call(functions.keep, args=(counter,), partitioner=2) == [None]
    del counter
    assert todist.remote_sync_call(functions.add_to_kept, args=(1,), partitioner=2) == [10] and alive() == 1
    assert todist.remote_sync_call(functions.keep, args=(None,), partitioner=2) == [None]
    assert comes_true(lambda: alive() == 0), holders()


def test_a_module_on_a_worker_has_gradients() -> None:
    net = todist.remote_object(functions.Linear, 3, on=1)
    x = torch.randn(4, 3, requires_grad=True)
    with todist.autograd.context() as ctx:
        (ours,) = todist.autograd.grad(ctx, net.forward(x).square().sum(), [x])
    local = nn.Linear(3, 2)
    local.load_state_dict(net.state())
    (expected,) = torch.autograd.grad(local(x).square().sum(), [x])
    torch.testing.assert_close(ours, expected)


def test_a_copy_of_a_handle_is_the_same_object() -> None:
    counter = todist.remote_object(Counter, 5, on=0)
    assert copy.copy(counter).add(1) == 6 and counter.add(0) == 6
