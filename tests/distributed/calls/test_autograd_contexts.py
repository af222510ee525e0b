"""What may happen to a context before and after its backward pass: the pass ends, or says who is to blame."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import distributed as todist
from distributed.api import remote_async_call, remote_sync_call
from distributed.calls import worker
from tests.distributed import remote_functions as functions
from tests.distributed.test_autograd import X, assert_equal
from tests.distributed.worlds import WORLD, run_program

pytestmark = pytest.mark.usefixtures("workers")

autograd = todist.autograd


def params(net: nn.Module) -> list[nn.Parameter]:
    return list(net.parameters())


def gradient(net: nn.Module, factor: float = 1.0, x: Tensor = X) -> tuple[Tensor, ...]:
    """Of `factor` times the product, in one process."""
    return torch.autograd.grad(factor * functions.product(net, x), params(net))


def in_threads(count: int, work: Callable[[], None]) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(count) as pool:
            for done in [pool.submit(work) for _ in range(count)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)


def test_a_pass_waits_for_calls_that_it_does_not_use(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        later = remote_async_call(functions.late_product, args=(net, X, 0.5), partitioner=1)
        (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=2)
        assert_equal(autograd.grad(ctx, loss, params(net)), gradient(net))
        assert_equal(autograd.grad(ctx, later.wait(), params(net)), gradient(net))


def test_a_call_that_failed_by_its_time_limit_spoils_the_context(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=2)
        with pytest.raises(TimeoutError):
            remote_sync_call(functions.late_product, args=(net, X, 1.0), partitioner=1, timeout=0.2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"wait for ever: worker1 did not answer within 0.2 s.*repeat"):
                autograd.backward(ctx, loss)
    assert all(p.grad is None for p in net.parameters())
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=1)
        assert_equal(autograd.grad(ctx, loss, params(net)), gradient(net))


def test_an_async_call_that_fails_spoils_the_context(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        remote_async_call(functions.late_product, args=(net, X, 1.0), partitioner=1, timeout=0.2)
        (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=2)
        with pytest.raises(RuntimeError, match=r"worker1 did not answer within 0\.2 s"):
            autograd.backward(ctx, loss)


def test_a_nested_call_that_came_too_late_spoils_the_context(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product_despite_a_late_call, args=(net, X), partitioner=1)
        with pytest.raises(RuntimeError, match=r"on worker1: worker2 did not answer within 0.2 s"):
            autograd.backward(ctx, loss)


@pytest.mark.parametrize("clone", [False, True], ids=["as-it-is", "cloned"])
def test_calls_and_gradients_in_a_loop(net: nn.Linear, clone: bool) -> None:
    with autograd.context() as ctx:
        for number in range(4):
            sent = todist.module_clone(net, by="clone") if clone else net
            (loss,) = remote_sync_call(functions.product, args=(sent, X), partitioner=number % WORLD)
            gradients = autograd.grad(ctx, (number + 1) * loss, params(net))
            assert_equal(gradients, gradient(net, number + 1))
            with torch.no_grad():
                for parameter, value in zip(net.parameters(), gradients, strict=True):
                    assert value is not None
                    parameter -= 0.01 * value


@pytest.mark.parametrize("worker", [1, 2])
def test_two_losses_have_a_pass_each(net: nn.Linear, worker: int) -> None:
    with autograd.context() as ctx:
        (first, second) = remote_sync_call(
            functions.product, partitioner=lambda: [(1, (net, X), None), (worker, (net, 3 * X), None)]
        )
        assert_equal(autograd.grad(ctx, first, params(net)), gradient(net))
        assert_equal(autograd.grad(ctx, second, params(net)), gradient(net, x=3 * X))


def test_a_nested_asynchronous_call_need_not_be_used(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.product_beside_an_unused_call, args=(net, X), partitioner=1)
        assert_equal(autograd.grad(ctx, loss, params(net)), gradient(net))


def test_contexts_of_several_threads_do_not_meet(net: nn.Linear) -> None:
    """Every thread opens and closes many contexts."""
    expected = gradient(net)

    def work() -> None:
        for number in range(100):
            with autograd.context() as ctx:
                (loss,) = remote_sync_call(functions.product, args=(net, X), partitioner=number % WORLD)
                if number % 10 == 0:
                    assert_equal(autograd.grad(ctx, loss, params(net)), expected)

    in_threads(8, work)
    assert not worker._contexts


def test_a_failure_in_a_pass_names_the_worker_and_the_cause(net: nn.Linear) -> None:
    with autograd.context() as ctx:
        (loss,) = remote_sync_call(functions.fails_backward, args=(net, X), partitioner=2)
        with pytest.raises(RuntimeError, match=r"the backward pass failed on worker2: .*no gradient today"):
            autograd.backward(ctx, loss)
        with pytest.raises(RuntimeError, match="an earlier pass failed"):
            autograd.backward(ctx, loss)


@pytest.fixture(scope="module")
def ends() -> Iterator[str]:
    """What a program prints whose passes cannot end."""
    (code, output), *_ = run_program("passes_that_cannot_end", WORLD)
    assert code == 0, output
    yield output


def test_a_pass_ends_in_time_if_a_fetched_tensor_is_not_used(ends: str) -> None:
    assert "TimeoutError: the backward pass did not end within 2 s, and all workers answer" in ends


def test_a_worker_that_dies_in_a_pass_is_named(ends: str) -> None:
    assert "ConnectionError: worker1 does not answer in the backward pass: " in ends
