"""The worker's side of a remote call: unpacks the order, runs its items one after the other, packs the answer."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import rpc

from distributed.engine import contexts, exchange
from distributed.engine.answers import Answer, Failure, Outcome, anchor_of, carries, current_name, failure, pack_outcome
from distributed.engine.leaving import served
from distributed.engine.message import Carries, Packed, own_copy, unpack, without_graphs
from distributed.engine.session import default_timeout, use_own_gpu
from distributed.partition import Args, KwArgs


class Item(NamedTuple):
    """One call of the function: its number among all items, and its arguments."""

    number: int
    args: Args
    kwargs: KwArgs


class Order(NamedTuple):
    """What a worker shall compute: its own items, and the values that all items of the caller's queue share."""

    func: Callable[..., Any]
    items: list[Item]
    shared: list[Any]


# How deep the call is nested that this thread computes. A context variable, since to Python torch's threads are new at
# every message, and thread-locals are slow to make.
_depth: ContextVar[int] = ContextVar("depth", default=0)


def depth() -> int:
    """How deep the call is nested that this thread computes; 0 if it computes none."""
    return _depth.get()


def serve(
    depth: int,
    caller: str,
    number: int,
    queue: int | None,
    ctx: int | None,
    timeout: float,
    payload: bytes,
    carried: list[Any],
) -> Answer:
    """The function that the caller's message runs on the worker."""
    use_own_gpu()
    source = None if queue is None else exchange.QueueAddress(caller, queue)
    sendable = functools.partial(carries, caller, any_device=True)
    with served(caller, number, timeout) as call:
        answer = compute(Packed(payload, carried), depth, source, ctx, sendable, stop=lambda: call.cancelled)
        if ctx is not None:
            _report_spoiled(ctx, caller)
    return answer


def _report_spoiled(ctx: int, caller: str) -> None:
    """Tells the caller, before it gets its answer, that a call made here has spoiled their context."""
    reason = contexts.reason_against(ctx)
    if reason is not None and caller != current_name():
        rpc.rpc_sync(caller, contexts.spoil, (ctx, f"on {current_name()}: {reason}"), timeout=default_timeout())


def compute_here(
    order: Packed, depth: int, source: exchange.QueueAddress | None, ctx: int | None, stop: Callable[[], bool]
) -> Answer:
    """Computes the caller's own part, on copies of the arguments as on any other worker."""
    return compute(own_copy(order, graphs=ctx is not None), depth, source, ctx, lambda device: True, stop)


def compute(
    packed: Packed,
    depth: int,
    source: exchange.QueueAddress | None,
    ctx: int | None,
    carries: Carries,
    stop: Callable[[], bool],
) -> Answer:
    """Runs the items of an order. Stops at the first item that fails, and if `stop` returns true between items."""
    me = current_name()
    outer = _depth.set(depth)
    try:
        with contexts.computing(ctx) as calls:
            outcome = _outcome(packed, source, me, ctx, stop)
            if calls is not None:
                calls.wait()
    finally:
        _depth.reset(outer)
    numbers, answer = pack_outcome(outcome, me, ctx, carries)
    if calls is None:
        plain = [v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v for v in answer.carried]
        return numbers, answer.payload, plain, None
    return numbers, answer.payload, answer.carried, anchor_of(packed.tensors(), calls.anchors, answer.tensors())


def _outcome(
    packed: Packed, source: exchange.QueueAddress | None, me: str, ctx: int | None, stop: Callable[[], bool]
) -> Outcome:
    try:
        func, items, shared = unpack(packed)
        order = Order(func, [Item(*item) for item in items], shared)
    except Exception as error:  # a name does not exist here, or an object cannot be built
        return failure(error, me, None)
    return _run(order, source, me, ctx, stop)


def _run(
    order: Order, source: exchange.QueueAddress | None, me: str, ctx: int | None, stop: Callable[[], bool]
) -> Outcome:
    results = {}
    for item in itertools.takewhile(lambda _: not stop(), _items(order, source, ctx)):
        if isinstance(item, Failure):
            return item
        try:
            results[item.number] = _kept(order.func(*item.args, **item.kwargs), ctx)
        except KeyboardInterrupt:  # this process computes its own part, and the user stops it
            raise
        except BaseException as error:  # an exit on a worker must not leave the caller waiting
            return failure(error, me, item.number)
    return results


def _kept(result: Any, ctx: int | None) -> Any:
    """What stays of a result until the message ends. Outside a context the next item begins without its graph."""
    return result if ctx is not None else without_graphs(result)


def _items(order: Order, source: exchange.QueueAddress | None, ctx: int | None) -> Iterator[Item | Failure]:
    """The order's own items, then items from the caller's queue until it is empty."""
    yield from order.items
    while source is not None:
        try:
            pulled = exchange.pull(source, ctx)
            if pulled is None:
                return
            if ctx is not None:
                for tensor in [t for t in pulled.tensors() if t.requires_grad][:1]:
                    contexts.calls_of(ctx).anchors.append(tensor.reshape(-1)[:0].sum())
            yield Item(*unpack(pulled, order.shared))
        except Exception as error:
            yield failure(error, current_name(), None)
            return
