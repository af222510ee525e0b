"""The worker's side of a remote call: unpacks the order, runs its items one after the other, packs the answer.

While a call is under way, items and results move one by one, too. An `ItemQueue` of the caller holds items for free
workers: one that has computed its own items takes them (`pull`). `receivers` get results as soon as they are there
(`deliver`).
"""

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed import rpc
from torch.futures import Future

from distributed.calls import autograd_contexts
from distributed.calls.futures import OpenOrder, settled
from distributed.calls.message import Carries, Packed, own_copy, pack, send, unpack, without_graphs
from distributed.calls.orders import (
    Answer,
    Failure,
    Head,
    Item,
    Order,
    Outcome,
    anchor_of,
    carries,
    current_name,
    failure,
    message_anchors,
    pack_outcome,
    pack_results,
)
from distributed.calls.session import default_timeout, use_own_gpu
from distributed.calls.shutdown import keep_open, served
from distributed.functions import is_pure
from distributed.traffic import note_sent

T = TypeVar("T")

# How deep the call is nested that this thread computes. A context variable, since to Python torch's threads are new at
# every message, and thread-locals are slow to make.
_depth: ContextVar[int] = ContextVar("depth", default=0)


def depth() -> int:
    """The nesting depth of the call that this thread computes; 0 if it computes none."""
    return _depth.get()


def serve(fields: tuple[Any, ...], payload: bytes, carried: list[Any]) -> Answer:
    """Runs on the worker, called by the caller's message. `fields` are those of the `Head`."""
    use_own_gpu()
    head = Head(*fields)
    sendable = functools.partial(carries, head.caller, any_device=True)
    with served(head.caller, head.number, head.timeout) as call:
        answer = compute(Packed(payload, carried), head, sendable, stop=call.is_over)
        if head.ctx is not None:
            # A call made here may have spoiled the context. The caller hears of it before it gets its answer.
            reason = autograd_contexts.reason_against(head.ctx)
            if reason is not None and head.caller != current_name():
                args = (head.ctx, f"on {current_name()}: {reason}")
                rpc.rpc_sync(head.caller, autograd_contexts.spoil, args, timeout=default_timeout())
    give_up(carried)
    return answer


def serve_open(fields: tuple[Any, ...], payload: bytes, carried: list[Any]) -> Future[Answer]:
    """As `serve`, for a function that returns futures: starts all items, and answers when all futures are done."""
    head = Head(*fields)
    # Meanwhile it holds no thread, except in two cases: an autograd context belongs to its thread, and a worker takes
    # the next item of a queue when it is free. There this thread waits for the future of each item.
    if head.ctx is not None or head.queue is not None:
        answered: Future[Answer] = Future()
        answered.set_result(serve(fields, payload, carried))
        return answered
    use_own_gpu()
    with served(head.caller, head.number, head.timeout) as call:
        opened = _open(Packed(payload, carried), head, call.is_over)
    give_up(carried)
    late = TimeoutError(f"{head.caller} does not wait for this call any more")
    keep_open(call, opened.answer, lambda: opened.fail(late, None))
    return opened.answer


def _open(packed: Packed, head: Head, stop: Callable[[], bool]) -> OpenOrder:
    """Starts the items of an order."""
    opened = OpenOrder(head, current_name(), _deliver)
    number = None
    outer = _depth.set(head.depth)
    try:
        func, items, _ = unpack(packed)
        opened.items = len(items)
        alone = is_pure(func) or len(items) == 1
        for item in itertools.takewhile(lambda _: not stop(), items):
            number, args, kwargs = item if alone else _copy(item, None)
            opened.add(number, func(*args, **kwargs))
    except BaseException as error:  # an exit on a worker must not leave the caller waiting
        opened.fail(error, number)
    finally:
        _depth.reset(outer)
    return opened


def compute_here(order: Packed, head: Head, stop: Callable[[], bool]) -> Answer:
    """Computes the caller's own part as any other worker would: on copies of the arguments, and in the modes of torch
    that a new thread has."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        return compute(own_copy(order, graphs=head.ctx is not None), head, lambda device: True, stop)


def compute(packed: Packed, head: Head, carries: Carries, stop: Callable[[], bool]) -> Answer:
    """Runs the items of an order. Stops at the first item that fails, and if `stop` returns true between items."""
    me = current_name()
    outer = _depth.set(head.depth)
    try:
        with autograd_contexts.computing(head.ctx) as calls:
            outcome = _run(packed, head, me, stop)
            if calls is not None:
                calls.wait()
    finally:
        _depth.reset(outer)
    numbers, answer = pack_outcome(outcome, me, head.ctx, carries)
    anchor = None if calls is None else anchor_of(packed.tensors(), calls.anchors, answer.tensors())
    return numbers, answer.payload, answer.carried, anchor


def _run(packed: Packed, head: Head, me: str, stop: Callable[[], bool]) -> Outcome:
    try:
        func, items, shared = unpack(packed)
        order = Order(func, [Item(*item) for item in items], shared)
    except Exception as error:  # a name does not exist here, or an object cannot be built
        return failure(error, me, None)
    results: dict[int, Any] = {}
    failed: Failure | None = None
    delivered: Future[bool] | None = None
    # What another item, or the caller, changes in place must not reach this item's arguments and result. A pure
    # function changes nothing, and a single item shares with no other.
    alone = is_pure(order.func) or (len(order.items) == 1 and head.queue is None and head.caller != me)
    for item in itertools.takewhile(lambda _: not stop(), _items(order, head)):
        if isinstance(item, Failure):
            failed = item
            break
        try:
            result = _result(order.func, item, head, stop, alone=alone)
            if not head.streams:
                results[item.number] = result
            # One at a time: the answer to the last delivery says whether the caller wants more.
            elif delivered is None or delivered.wait():
                delivered = _deliver(item.number, result, head, me)
            else:  # the caller has left
                break
        except KeyboardInterrupt:  # this process computes its own part, and the user stops it
            raise
        except BaseException as error:  # an exit on a worker must not leave the caller waiting
            failed = failure(error, me, item.number)
            break
    if delivered is not None:  # the answer must not overtake it
        delivered.wait()
    return failed or results


def _result(func: Callable[..., Any], item: Item, head: Head, stop: Callable[[], bool], *, alone: bool) -> Any:
    """The result of an item. If it is not `alone`, of copies of the arguments; and a copy, if it can be sent."""
    _, args, kwargs = item if alone else _copy(item, head.ctx)
    result = func(*args, **kwargs)
    if head.opens:
        result = settled(result, stop)
    if head.ctx is None:  # so that the next item begins without this one's graph
        result = without_graphs(result)
    if alone:
        return result
    try:
        return _copy(result, head.ctx)
    except (TypeError, ValueError):  # `pack_results` will name it
        return result


def _copy(value: T, ctx: int | None) -> T:
    """A value as another worker would receive it."""
    copied: T = unpack(own_copy(pack(value, graphs=ctx is not None, carries=lambda _: True), graphs=ctx is not None))
    return copied


def _deliver(number: int, result: Any, head: Head, me: str) -> Future[bool]:
    """Sends the result of an item to the caller; the future tells whether the caller wants more.

    Raises:
        TypeError, ValueError: the result cannot be sent.
    """
    packed = pack_results({number: result}, head.ctx, functools.partial(carries, head.caller))
    to = rpc.get_worker_info(head.caller)
    with autograd_contexts.entered(head.ctx):
        return send(to, deliver, (head.number, me, number), packed, head.timeout)


def _items(order: Order, head: Head) -> Iterator[Item | Failure]:
    """The order's own items, then items from the caller's queue until it is empty."""
    yield from order.items
    while head.queue is not None:
        try:
            pulled = pull(head.caller, head.queue, head.ctx)
            if pulled is None:
                return
            if head.ctx is not None:
                autograd_contexts.calls_of(head.ctx).anchors += message_anchors(pulled.tensors())
            yield Item(*unpack(pulled, order.shared))
        except Exception as error:
            yield failure(error, current_name(), None)
            return


# References to values of other workers, and how a worker gives them back
#
# torch tells the owner of an RRef when the last reference to it on another worker is gone. While it does, it holds a
# lock of its own, and may have to wait for Python's. A second thread that gives up a reference at the same time has
# Python's lock and waits for torch's: neither goes on, nor does any other thread that needs Python. torch gives up the
# arguments of a call in this way, when the call is done, so a worker that computes several calls with references stands
# still, if rarely. So they are taken out of the arguments, and given up here, one at a time.

_one_at_a_time = threading.Lock()


def fetched(references: "list[rpc.RRef[Any]]", timeout: float) -> Any:
    """The value of the only reference in a list that came with a call. The list is empty afterwards.

    Raises:
        RuntimeError: the value did not come within `timeout` seconds, or could not be computed.
    """
    try:
        return references[0].to_here(timeout=timeout)
    finally:
        give_up(references)


def give_up(carried: list[Any]) -> None:
    """Empties a list that came with a call, if there are references in it."""
    if any(isinstance(value, rpc.PyRRef) for value in carried):
        with _one_at_a_time:
            carried.clear()


# Queues of items for free workers


_queues: dict[int, "ItemQueue"] = {}
_numbers = itertools.count(1)


class ItemQueue:
    """Items that wait for a free worker. Workers name the queue by its number, until it is closed."""

    def __init__(self, items: Sequence[Packed]) -> None:
        self.number = next(_numbers)
        self._waiting = deque(items)
        _queues[self.number] = self

    def take(self) -> Packed | None:
        try:
            return self._waiting.popleft()  # atomic
        except IndexError:
            return None

    def close(self) -> None:
        """No more items are given out."""
        _queues.pop(self.number, None)
        self._waiting.clear()


def take_item(queue: int, taker: str) -> Packed | None:
    """The next item of a queue of this process, for worker `taker`; None if the queue is empty or closed."""
    opened = _queues.get(queue)
    packed = None if opened is None else opened.take()
    if packed is not None and taker != current_name():
        note_sent(packed.size())
    return packed


def pull(caller: str, queue: int, ctx: int | None) -> Packed | None:
    """Runs on a worker: the next item of the caller's queue; None if there is none left."""
    me = current_name()
    if caller == me:
        taken = take_item(queue, me)
        return None if taken is None else own_copy(taken, graphs=ctx is not None)
    try:
        pulled: Packed | None = rpc.rpc_sync(caller, take_item, (queue, me), timeout=default_timeout())
    except RuntimeError as error:
        if ctx is not None:
            autograd_contexts.spoil(ctx, f"{caller} gave no item: {str(error).splitlines()[0]}")
        raise
    return pulled


# Results that come one by one


class ItemResult(NamedTuple):
    """The result of one item, packed, and the worker that has sent it."""

    sender: str
    number: int
    packed: Packed


receivers: dict[int, Callable[[ItemResult], None]] = {}
"""By the number of a call: called with each of its results, in a thread of torch's."""


def deliver(call: int, sender: str, number: int, payload: bytes, carried: list[Any]) -> bool:
    """Runs on the caller: a worker sends the result of an item. Returns whether the caller wants more."""
    receive = receivers.get(call)
    if receive is None:
        return False
    receive(ItemResult(sender, number, Packed(payload, carried)))
    return True
