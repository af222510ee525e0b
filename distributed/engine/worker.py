"""The worker's side of a remote call: unpacks the order, runs its items one after the other, packs the answer."""

import functools
import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

from distributed.engine import contexts
from distributed.engine.errors import describe, message_of
from distributed.engine.leaving import served
from distributed.engine.message import Carries, Packed, own_copy, pack, unpack, without_graphs
from distributed.engine.session import current, default_timeout, use_own_gpu
from distributed.engine.traffic import note_sent
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


class QueueAddress(NamedTuple):
    """Where a free worker gets its next item: the caller's name, and the number of a queue there."""

    caller: str
    queue: int


class Failure(NamedTuple):
    """An exception in a form that can always be sent. `error` is the packed exception itself, if it can be packed."""

    worker: str
    number: int | None
    type_name: str
    message: str
    traceback: str
    error: Packed | None


Outcome = dict[int, Any] | Failure
"""The items' results by number, or the first failure."""

Answer = tuple[tuple[int, ...] | None, bytes, list[Any], Tensor | None]
"""(numbers, payload, carried, anchor): the items' numbers and their packed results (of a single item the result
alone), or None and a packed `Failure`; and the anchor that `distributed.autograd` needs."""


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
    source = None if queue is None else QueueAddress(caller, queue)
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
    order: Packed, depth: int, source: QueueAddress | None, ctx: int | None, stop: Callable[[], bool]
) -> Answer:
    """Computes the caller's own part, on copies of the arguments as on any other worker."""
    return compute(own_copy(order, graphs=ctx is not None), depth, source, ctx, lambda device: True, stop)


def compute(
    packed: Packed,
    depth: int,
    source: QueueAddress | None,
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
    numbers, answer = _packed(outcome, me, ctx, carries)
    if calls is None:
        plain = [v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v for v in answer.carried]
        return numbers, answer.payload, plain, None
    return numbers, answer.payload, answer.carried, _anchor(packed.tensors(), calls.anchors, answer.tensors())


def _outcome(
    packed: Packed, source: QueueAddress | None, me: str, ctx: int | None, stop: Callable[[], bool]
) -> Outcome:
    try:
        func, items, shared = unpack(packed)
        order = Order(func, [Item(*item) for item in items], shared)
    except Exception as error:  # a name does not exist here, or an object cannot be built
        return failure(error, me, None)
    return _run(order, source, me, ctx, stop)


def current_name() -> str:
    return current().name


def _run(order: Order, source: QueueAddress | None, me: str, ctx: int | None, stop: Callable[[], bool]) -> Outcome:
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


def _items(order: Order, source: QueueAddress | None, ctx: int | None) -> Iterator[Item | Failure]:
    """The order's own items, then items from the caller's queue until it is empty."""
    yield from order.items
    while source is not None:
        try:
            pulled = _pull(source, ctx)
            if pulled is None:
                return
            if ctx is not None:
                for tensor in [t for t in pulled.tensors() if t.requires_grad][:1]:
                    contexts.calls_of(ctx).anchors.append(tensor.reshape(-1)[:0].sum())
            yield Item(*unpack(pulled, order.shared))
        except Exception as error:
            yield failure(error, current_name(), None)
            return


# Queues of items for free workers

_queues: dict[int, deque[Packed]] = {}
_last_queue = 0
_queues_lock = threading.Lock()


def open_queue(items: Sequence[Packed]) -> int:
    """Opens a queue of items for free workers; returns its number."""
    global _last_queue
    with _queues_lock:
        _last_queue += 1
        _queues[_last_queue] = deque(items)
        return _last_queue


def close_queue(queue: int) -> None:
    """Closes a queue: no more items are given out."""
    _queues.pop(queue, None)


def take_item(queue: int, *, is_sent: bool = True) -> Packed | None:
    """The next item of a queue of this process; None if the queue is empty or closed."""
    try:
        packed = _queues[queue].popleft()
    except (KeyError, IndexError):
        return None
    if is_sent:
        note_sent(packed.size())
    return packed


def _pull(source: QueueAddress, ctx: int | None) -> Packed | None:
    """The next item of the caller's queue; None if there is none left."""
    if source.caller == current_name():
        taken = take_item(source.queue, is_sent=False)
        return None if taken is None else own_copy(taken, graphs=ctx is not None)
    try:
        pulled: Packed | None = rpc.rpc_sync(source.caller, take_item, (source.queue,), timeout=default_timeout())
    except RuntimeError as error:
        if ctx is not None:
            contexts.spoil(ctx, f"{source.caller} gave no item: {str(error).splitlines()[0]}")
        raise
    return pulled


# Answers


def carries(worker: str, device: torch.device, *, any_device: bool = False) -> bool:
    """Whether tensors on `device` can be sent to `worker`.

    `any_device` is for answers: torch sends them by the caller's device map, which is not known here. So any GPU is
    accepted if one is mapped.
    """
    mapped = current().device_maps.get(worker, set())
    return device.type == "cpu" or device in mapped or (any_device and bool(mapped) and device.type == "cuda")


def _packed(outcome: Outcome, me: str, ctx: int | None, carries: Carries) -> tuple[tuple[int, ...] | None, Packed]:
    if isinstance(outcome, Failure):
        return None, pack(outcome, graphs=False, carries=carries)
    numbers = tuple(outcome)
    values = [part for number, value in outcome.items() for part in (_Begin(number), value)]
    try:
        return numbers, pack(values[1] if len(numbers) == 1 else values, graphs=ctx is not None, carries=carries)
    except (TypeError, ValueError) as error:
        number = _first_that_fails(outcome, carries)
        refused = type(error)(f"the result of {_item(number)} cannot be sent: {error}")
        return None, pack(failure(refused, me, number), graphs=False, carries=carries)


class _Begin:
    """Stands before an item's result in a message, so that a result that cannot be rebuilt can be named."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return _begin, (self._number,)


_rebuilding: ContextVar[int | None] = ContextVar("rebuilding", default=None)
"""The item whose result this thread unpacks."""


def _begin(number: int) -> None:
    _rebuilding.set(number)


def read_answer(answer: Answer, sender: str) -> Outcome:
    """Unpacks what `compute` has returned on worker `sender`."""
    numbers, payload, carried, _ = answer
    _rebuilding.set(numbers[0] if numbers else None)
    try:
        values = unpack(Packed(payload, carried))
    except Exception as error:  # a class does not exist here, or may raise anything
        number = _rebuilding.get()
        refused = TypeError(f"the result of {_item(number)} from {sender} cannot be rebuilt: {describe(error)}")
        refused.__cause__ = error
        return failure(refused, current_name(), number)
    if numbers is None:
        assert isinstance(values, Failure)
        return values
    return {numbers[0]: values} if len(numbers) == 1 else dict(zip(numbers, values[1::2], strict=True))


def _first_that_fails(results: dict[int, Any], carries: Carries) -> int | None:
    for number, value in results.items():
        try:
            pack(value, graphs=False, carries=carries)
        except (TypeError, ValueError):
            return number
    return None


def _item(number: int | None) -> str:
    return "the call" if number is None else f"item {number}"


def _anchor(received: list[Tensor], nested: list[Tensor], returned: list[Tensor]) -> Tensor | None:
    """An empty sum over one tensor of each message that must take part in the backward pass."""
    request = next((t for t in received if t.requires_grad), None)
    ties = [*([] if request is None else [request]), *nested]
    if not ties:
        ties = [t for t in returned if t.requires_grad][:1]
    return sum((tie.reshape(-1)[:0].sum().cpu() for tie in ties), start=torch.zeros(())) if ties else None


# Failures


def failure(error: BaseException, worker: str, number: int | None) -> Failure:
    trace = "".join(traceback.format_exception(error))
    return Failure(worker, number, type(error).__qualname__, message_of(error), trace, _packed_error(error))


def _packed_error(error: BaseException) -> Packed | None:
    """The exception with its attributes, else without them; None if it cannot be sent at all."""
    for packable in (lambda: error, lambda: _Plain(type(error), error.args)):
        try:
            packed = pack(packable(), graphs=False, carries=lambda device: device.type == "cpu")
        except (TypeError, ValueError):
            continue
        return Packed(packed.payload, [v.detach() if isinstance(v, Tensor) else v for v in packed.carried])
    return None


class _Plain(NamedTuple):
    """An exception without its attributes."""

    kind: type[BaseException]
    args: tuple[Any, ...]


def raise_failure(failed: Failure) -> None:
    """Raises the worker's exception, of the same type if that can be rebuilt, with a note on its origin."""
    error = _rebuilt(failed)
    if error is None:
        error = RuntimeError(f"{failed.type_name}: {failed.message}")
    error.add_note(f"raised on {failed.worker} by {_item(failed.number)} of the call:\n{failed.traceback}")
    raise error


def _rebuilt(failed: Failure) -> Exception | None:
    """The exception; None if its class does not exist here, or takes other arguments than it keeps."""
    if failed.error is None:
        return None
    try:
        error = unpack(failed.error)
        if isinstance(error, _Plain):
            error = error.kind(*error.args)
    except Exception:  # a class may raise anything
        return None
    return error if isinstance(error, Exception) else None
