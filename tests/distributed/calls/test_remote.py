"""Remote calls on real processes: the cases in which the original hung or gave wrong values, and bad input."""

import copy
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import distributed as todist
from distributed.api import parallelize, remote_async_call, remote_sync_call
from distributed.calls import session
from distributed.calls.message import traffic
from tests.distributed import remote_functions as functions
from tests.distributed.worlds import WORLD, comes_true

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_calls_end(depth: int) -> None:
    assert functions.nested(depth, torch.ones(2)) == 2 * WORLD**depth


def test_nested_calls_end_on_all_workers_at_once() -> None:
    x = torch.ones(16, 1)
    partitioner = todist.dim_partitioner(0, exclusive=True, keepdim=False)
    results = remote_sync_call(functools.partial(functions.nested, 2), args=(x,), partitioner=partitioner)
    assert results == [WORLD**2] * 16


def test_what_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(RecursionError, match=f"nested {session.MAX_DEPTH + 1} deep"):
        functions.nested(session.MAX_DEPTH + 1, torch.ones(1))
    assert remote_sync_call(functions.rank, partitioner=1) == [1]


def test_more_calls_at_once_than_there_are_threads() -> None:
    calls = [remote_async_call(functions.concurrent, args=(60,), partitioner=w) for w in range(WORLD)]
    assert [call.wait() for call in calls] == [[sum(range(60))]] * WORLD
    assert functions.concurrent(300) == sum(range(300))


def test_no_worker_writes_to_the_callers_arguments() -> None:
    for worker in range(WORLD):
        x, values = torch.ones(3), [torch.ones(2), nn.Parameter(torch.ones(1))]
        (result,) = remote_sync_call(functions.spoil, args=(x, values), partitioner=worker)
        assert x.sum() == 3 and values[0].sum() == 2 and values[1].sum() == 1
        assert result.sum() == 0


ONE_BY_ONE = todist.dim_partitioner(0, exclusive=True, keepdim=False)


def test_no_item_meets_what_another_has_changed() -> None:
    """As in the original, where each item is a call of its own."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(7, 4, 3)
    expected = [functions.trained(copy.deepcopy(network), item.clone()) for item in x]
    assert remote_sync_call(functions.trained, args=(network, x), partitioner=ONE_BY_ONE) == expected
    leaf = torch.ones(7, 2, requires_grad=True)
    with todist.autograd.context() as context:
        results = remote_sync_call(functions.times_three, args=(leaf * 1,), partitioner=ONE_BY_ONE)
        todist.autograd.backward(context, torch.stack(results).sum())
    torch.testing.assert_close(leaf.grad, torch.full((7, 2), 18.0))


def test_an_item_that_changes_what_is_expanded() -> None:
    for worker in range(WORLD):
        (result,) = remote_sync_call(functions.times_three, args=(torch.ones(1).expand(4),), partitioner=worker)
        assert result == 36


def test_a_result_is_that_of_its_item() -> None:
    results = remote_sync_call(functions.count, args=(torch.arange(12),), partitioner=ONE_BY_ONE)
    assert len({(rank, int(counted)) for rank, counted in results}) == 12
    ((_, own),) = remote_sync_call(functions.count, args=(0,), partitioner=0)
    own.add_(1000)
    assert functions.COUNTED < 1000


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_modes_of_the_caller_are_nobodys(mode: Callable[[], Any]) -> None:
    with mode():
        found = [remote_sync_call(functions.modes, partitioner=worker) for worker in range(WORLD)]
    assert found == [[(True, False, torch.float32)]] * WORLD


def test_without_a_context_results_have_no_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    for worker in range(WORLD):
        (result,) = remote_sync_call(functions.total, args=(x * 2,), partitioner=worker)
        assert result == 6 and not result.requires_grad


def test_views_travel_without_what_they_are_cut_from() -> None:
    big = torch.arange(1_000_000.0)
    before = traffic()
    assert remote_sync_call(functions.total, args=(big[5:9],), partitioner=1) == [5 + 6 + 7 + 8]
    assert traffic().since(before).sent < 1000


def test_parameters_travel_once_a_message() -> None:
    weights = torch.ones(50_000)
    before = traffic()
    remote_sync_call(
        functions.with_weights,
        args=(todist.whole(weights), torch.arange(30)),
        partitioner=todist.dim_partitioner(0, exclusive=True, workers=[1]),
    )
    spent = traffic().since(before)
    assert 200_000 <= spent.sent < 210_000 and 0 < spent.received.total() < 10_000


# Decorators


def test_methods_partials_lambdas_and_bare_decorators() -> None:
    assert functions.Counter(5).plus(2) == [107]
    assert remote_sync_call(functools.partial(functions.same, 7), partitioner=1) == [7]
    assert remote_sync_call(functions.Counter, args=(3,), partitioner=2)[0].start == 3
    for refused in (lambda x: x, functools.partial(functions.same, 1), functions.Counter(1).plus, print_nested()):
        with pytest.raises(TypeError, match="at the top of a module"):
            parallelize()(refused)
    with pytest.raises(TypeError, match=r"brackets are missing; type @parallelize\(\)"):
        exec_module("import distributed as todist\n@todist.parallelize\ndef f(x): return x\n")
    with pytest.raises(TypeError, match="brackets are missing"):
        exec_module("import distributed as todist\nclass C:\n  @todist.parallelize_async\n  def f(self): return 1\n")
    exec_module(
        "import distributed as todist\ndef deal(*a): return [(0, a, None)]\n"
        "@todist.parallelize(deal)\ndef f(x): return x\nassert f(3) == [3]\n"
    )


def print_nested() -> object:
    def inner() -> None:
        return None

    return inner


def exec_module(text: str) -> None:
    """Imports a module of this text, as a program's own file is imported."""
    sys.modules["written_by_test"] = module = types.ModuleType("written_by_test")
    try:
        exec(text, module.__dict__)
    finally:
        del sys.modules["written_by_test"]


# Time limits


def test_limits_that_torch_would_not_keep_are_refused() -> None:
    for timeout in (0.0009, 2_000_001, 3e6, float("inf"), -3, True):
        with pytest.raises(ValueError, match=r"must be a number of seconds from 0.001 to 2000000"):
            remote_sync_call(functions.rank, partitioner=1, timeout=timeout)
    assert remote_sync_call(functions.rank, partitioner=1, timeout=2_000_000) == [1]
    with pytest.raises(TimeoutError):
        remote_sync_call(functions.sleep, args=(0.2,), partitioner=1, timeout=0.001)


def test_a_queue_that_does_not_move_is_named() -> None:
    slow = [
        remote_async_call(functions.sleep, args=(2.0,), partitioner=1, timeout=20) for _ in range(session.MAX_WINDOW)
    ]
    with pytest.raises(TimeoutError, match=r"worker1 is busy: none of the calls.*for 0\.5 s, so this one was not sent"):
        remote_sync_call(functions.rank, partitioner=1, timeout=0.5)
    assert [len(call.wait()) for call in slow] == [1] * session.MAX_WINDOW
    assert remote_sync_call(functions.rank, partitioner=1, timeout=0.5) == [1]


def test_an_answer_with_fewer_items_is_late() -> None:
    """A worker whose time is over begins no other item. The results that it has must not pass for all of them."""
    try:
        with pytest.raises(TimeoutError, match=r"worker1 did not answer within 60 s"):
            parts = [(1, (), {"passes": True})] * 2
            remote_sync_call(functions.let_time_pass, partitioner=lambda: parts, reducer=todist.mean_reducer)
    finally:
        assert remote_sync_call(functions.let_time_pass, kwargs={"passes": False}, partitioner=1) == [False]


# Errors


def test_exceptions_keep_their_type_text_and_origin() -> None:
    for worker in range(WORLD):
        errors = {}
        for kind, of_type, text in (
            ("path", FileNotFoundError, "No such file or directory: '/no/such/file'"),
            ("attributes", functions.OwnError, "of old age"),
            ("lock", functions.OwnError, "holds a lock"),
            ("rephrased", functions.RephrasedError, "bad weather"),
        ):
            with pytest.raises(of_type, match=text) as caught:
                remote_sync_call(functions.fail_with_attributes, args=(kind,), partitioner=worker)
            errors[kind] = caught.value
        old: Any = errors["attributes"]
        assert old.age == 99 and old.add is torch.add
        assert old.__notes__[0] == "a note of its own"
        assert old.__notes__[1].startswith(f"raised on worker{worker} by item 0")
        assert errors["path"].filename == "/no/such/file"  # type: ignore[attr-defined]
        assert str(errors["rephrased"]) == "bad weather"
    with pytest.raises(RuntimeError, match="StopIteration: no more"):
        remote_sync_call(functions.stop, args=(1,), partitioner=1)


def test_tensors_of_an_exception_have_no_gradient() -> None:
    """Under a context they would be part of the backward pass."""
    with todist.autograd.context(), pytest.raises(functions.OwnError) as caught:
        remote_sync_call(functions.fail_with_attributes, args=("leaf",), partitioner=1)
    assert not caught.value.weights.requires_grad  # type: ignore[attr-defined]


def test_a_result_that_cannot_be_rebuilt_is_named() -> None:
    with pytest.raises(TypeError, match="a result from worker1 cannot be rebuilt: LookupError: not at"):
        remote_sync_call(functions.OnlyAtHome, partitioner=1)
    each = todist.dim_partitioner(0, exclusive=True, workers=[1])
    with pytest.raises(TypeError, match="a result from worker1 cannot be rebuilt: LookupError") as caught:
        remote_sync_call(functions.odd_ones_stay, args=(torch.arange(6),), partitioner=each)
    assert "in _at_home" in caught.value.__notes__[0]


# Bad input


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"func=.*lambda.*define it with def at the top of a module"):
        remote_sync_call(lambda x: x, args=(1,), partitioner=1)
    with pytest.raises(TypeError, match="argument 1 of item 0: cannot be sent to worker1: cannot pickle"):
        remote_sync_call(functions.same, args=(1, threading.Lock()), partitioner=1)
    with pytest.raises(TypeError, match="argument 'label' of item 0"):
        remote_sync_call(functions.size_and_rank, args=(torch.ones(3),), kwargs={"label": threading.Lock()})
    with pytest.raises(ValueError, match=r"argument 0 of item 0.*shape \(2,\) on meta.*tensor.cpu\(\)"):
        remote_sync_call(functions.same, args=(torch.ones(2, device="meta"),), partitioner=1)
    assert remote_sync_call(functions.rank, partitioner=1) == [1]


def test_partitioners_may_return_any_iterable() -> None:
    def generated(*args: int) -> Iterator[tuple[int, tuple[int, ...], None]]:
        yield from ((worker, args, None) for worker in (2, 1))

    for partitioner in (
        generated,
        lambda *args: zip((2, 1), (args, args), (None, None), strict=True),
        lambda *args: map(functools.partial(functions.part_for, args), (2, 1)),
    ):
        assert remote_sync_call(functions.same, args=(7,), partitioner=partitioner) == [7, 7]


def test_sparse_tensors_travel_and_leave_no_slot_behind() -> None:
    dense = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    sparse = dense.to_sparse()
    for worker in [0] + [1] * (session.MAX_WINDOW + 1):
        (result,) = remote_sync_call(functions.same, args=(sparse,), partitioner=worker)
        assert result.is_sparse and result.to_dense().tolist() == dense.tolist()
    assert remote_sync_call(functions.same, args=([sparse, dense],), partitioner=1)[0][1].tolist() == dense.tolist()
    with todist.autograd.context(), pytest.raises(ValueError, match=r"argument 0 of item 0.*loses its graph"):
        remote_sync_call(functions.same, args=(dense.to_sparse().requires_grad_(),), partitioner=1)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "coalesced", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_that_has_come_is_not_held(layout: str, tmp_path: Path) -> None:
    """torch's own reading held each until the next `torch.load`, which warned about them."""
    dense = torch.arange(16.0).view(4, 4) * torch.eye(4)
    at, values = torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0])
    sparse = {
        "coo": lambda: torch.sparse_coo_tensor(at, values, (4, 4), check_invariants=True),  # one place, two values
        "coalesced": dense.to_sparse,
        "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)), "bsc": lambda: dense.to_sparse_bsc((2, 2)),
    }[layout]()  # fmt: skip
    (result,) = remote_sync_call(functions.same, args=(sparse,), partitioner=1)
    assert result.layout is sparse.layout and result.to_dense().equal(sparse.to_dense())
    assert layout != "coo" or not result.is_coalesced()
    held = weakref.ref(result)
    del result
    assert comes_true(lambda: held() is None)
    torch.save(dense, tmp_path / "dense.pt")
    assert torch.load(tmp_path / "dense.pt", weights_only=True).equal(dense)


def test_bad_partitioners_send_nothing() -> None:
    before = traffic()
    for partitioner, kind, message in [
        (lambda: [(1, None, None), (9, None, None)], ValueError, "worker=9: the world has the workers 0 to 2"),
        (lambda: [("worker7", None, None)], ValueError, "worker='worker7': the workers are worker0"),
        (lambda: [(-1, None, None)], ValueError, "worker=-1"),
        (lambda: None, ValueError, "returned no part"),
        (lambda: iter(()), ValueError, "returned no part"),
        (lambda: 5, TypeError, "returned 5; it must return a list of parts"),
        (lambda: [(0, ())], ValueError, "a part is"),
        (1.5, TypeError, "partitioner"),
        (lambda: [(1, 5, None)], TypeError, "args is a tuple or None"),
        (lambda: [(1, None, 5)], TypeError, "kwargs a dict or None"),
        (functions.Counter(1), TypeError, "must be a worker's rank or name, or a function"),
    ]:
        with pytest.raises(kind, match=message):
            remote_sync_call(functions.rank, partitioner=partitioner)
    assert traffic() == before


def test_failing_reducers_and_exits_are_reported() -> None:
    def bad_reducer(results: list[int]) -> int:
        raise ArithmeticError("cannot reduce")

    with pytest.raises(ArithmeticError, match="cannot reduce"):
        remote_sync_call(functions.rank, partitioner=1, reducer=bad_reducer)
    with pytest.raises(ArithmeticError, match="cannot reduce"):
        remote_async_call(functions.rank, partitioner=1, reducer=bad_reducer).wait()
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        remote_sync_call(functions.leave, partitioner=1)

    def leaving(_: Any) -> NoReturn:
        raise SystemExit("enough")

    reduced = remote_async_call(functions.rank, partitioner=1, reducer=leaving)
    assert comes_true(reduced.done)
    with pytest.raises(RuntimeError, match="SystemExit: enough"):
        reduced.wait()
    assert remote_sync_call(functions.rank, partitioner=1) == [1]
