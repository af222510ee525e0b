"""The side of a remote call that computes: reads the order, runs its items in turn, packs the answer."""

import pickle
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc

from distributed import autograd
from distributed.engine.message import Carries, Packed, own_copy, pack, unpack
from distributed.engine.names import named
from distributed.engine.session import current, default_timeout
from distributed.engine.traffic import note_sent
from distributed.partition import Args, KwArgs


class Item(NamedTuple):
    """One call of the function: its place among all, and what it is called with."""

    number: int
    args: Args
    kwargs: KwArgs


class Order(NamedTuple):
    """What a worker is to do: its own items, and what those that it takes from a queue have in common."""

    func: Callable[..., Any]
    items: list[Item]
    shared: list[Any]


class Source(NamedTuple):
    """Where a free worker gets its next item: a queue of the caller's."""

    caller: str
    queue: int


class Failure(NamedTuple):
    """An exception, in a form that always travels."""

    worker: str
    number: int | None
    module: str
    type_name: str
    args: tuple[Any, ...] | None
    message: str
    traceback: str


Outcome = dict[int, Any] | Failure
"""The items' results by number, or what has gone wrong."""

Answer = tuple[tuple[int, ...] | None, bytes, list[Any], Tensor | None]
"""The items' numbers and their packed results (of one item the result alone), or None and a packed `Failure`; and
the anchor that `autograd` needs."""


# What this thread is computing for: how deep the call is nested, and the anchors of the calls that it has made.
# Context variables, since torch's threads are new to Python at every message, and thread-locals are slow to make.
_depth: ContextVar[int] = ContextVar("depth", default=0)
_anchors: ContextVar[list[Tensor] | None] = ContextVar("anchors", default=None)


def depth() -> int:
    """How deep the call is nested that this thread computes for; 0 where it computes for none."""
    return _depth.get()


def keep_anchor(ctx: int, anchor: Tensor) -> None:
    """Ties a call made from here to the one that this thread computes for, or to the context."""
    anchors = _anchors.get()
    if anchors is None:
        autograd.leave_anchor(ctx, anchor)
    else:
        anchors.append(anchor)


def serve(depth: int, caller: str, queue: int | None, ctx: int | None, payload: bytes, carried: list[Any]) -> Answer:
    """What the caller's message runs on the worker."""
    source = None if queue is None else Source(caller, queue)
    packed = Packed(payload, carried)
    return compute(packed, depth, source, ctx, carries=lambda device: carries(caller, device, any_device=True))


def compute_here(order: Packed, depth: int, source: Source | None, ctx: int | None) -> Answer:
    """The caller's own part, on copies of its own as on any other worker."""
    return compute(own_copy(order, graphs=ctx is not None), depth, source, ctx, carries=lambda device: True)


def compute(packed: Packed, depth: int, source: Source | None, ctx: int | None, carries: Carries) -> Answer:
    """Runs an order to its end, or to the first item that fails."""
    me = current_name()
    anchors: list[Tensor] = []
    outer = _depth.set(depth), _anchors.set(anchors)
    try:
        func, items, shared = unpack(packed)
        order = Order(func, [Item(*item) for item in items], shared)
    except Exception as error:  # names that are not here, classes that refuse
        outcome: Outcome = failure(error, me, None)
    else:
        outcome = _run(order, source, me, ctx)
    finally:
        _depth.reset(outer[0])
        _anchors.reset(outer[1])
    numbers, answer = _packed(outcome, me, ctx, carries)
    if ctx is None:
        plain = [v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v for v in answer.carried]
        return numbers, answer.payload, plain, None
    return numbers, answer.payload, answer.carried, _anchor(packed.tensors(), anchors, answer.tensors())


def current_name() -> str:
    return current().name


def _run(order: Order, source: Source | None, me: str, ctx: int | None) -> Outcome:
    results = {}
    for item in _items(order, source, ctx):
        if isinstance(item, Failure):
            return item
        try:
            results[item.number] = order.func(*item.args, **item.kwargs)
        except KeyboardInterrupt:  # of this process, which computes its own part
            raise
        except BaseException as error:  # an exit there must not leave the caller waiting
            return failure(error, me, item.number)
    return results


def _items(order: Order, source: Source | None, ctx: int | None) -> Iterator[Item | Failure]:
    """The order's own items, then those that its source still has."""
    yield from order.items
    while source is not None:
        try:
            pulled = _pull(source, ctx)
            if pulled is None:
                return
            if ctx is not None:
                for tensor in [t for t in pulled.tensors() if t.requires_grad][:1]:
                    keep_anchor(ctx, tensor.reshape(-1)[:0].sum())
            yield Item(*unpack(pulled, order.shared))
        except Exception as error:
            yield failure(error, current_name(), None)
            return


# Queues of items that whoever is free takes from

_queues: dict[int, deque[Packed]] = {}
_last_queue = 0
_queues_lock = threading.Lock()


def open_queue(items: Sequence[Packed]) -> int:
    """Offers items to free workers; returns the queue's number."""
    global _last_queue
    with _queues_lock:
        _last_queue += 1
        _queues[_last_queue] = deque(items)
        return _last_queue


def close_queue(queue: int) -> None:
    """Nothing more is given out."""
    _queues.pop(queue, None)


def take(queue: int, *, leaves_here: bool = True) -> Packed | None:
    """The next item of a queue of this process, or None if there is none left."""
    try:
        packed = _queues[queue].popleft()
    except (KeyError, IndexError):
        return None
    if leaves_here:
        note_sent(packed.size())
    return packed


def _pull(source: Source, ctx: int | None) -> Packed | None:
    if source.caller == current_name():
        taken = take(source.queue, leaves_here=False)
        return None if taken is None else own_copy(taken, graphs=ctx is not None)
    pulled: Packed | None = rpc.rpc_sync(source.caller, take, (source.queue,), timeout=default_timeout())
    return pulled


# Answers


def carries(worker: str, device: torch.device, *, any_device: bool = False) -> bool:
    """Whether tensors on `device` can be sent to `worker`; of answers only the devices' reverse map is known."""
    mapped = current().device_maps.get(worker, set())
    return device.type == "cpu" or device in mapped or (any_device and bool(mapped) and device.type == "cuda")


def _packed(outcome: Outcome, me: str, ctx: int | None, carries: Carries) -> tuple[tuple[int, ...] | None, Packed]:
    if isinstance(outcome, Failure):
        return None, pack(outcome, graphs=False, carries=carries)
    numbers, values = tuple(outcome), list(outcome.values())
    try:
        return numbers, pack(values[0] if len(values) == 1 else values, graphs=ctx is not None, carries=carries)
    except (TypeError, ValueError) as error:
        number = _first_that_fails(outcome, carries)
        named = type(error)(f"the result of {_item(number)} cannot be sent: {error}")
        return None, pack(failure(named, me, number), graphs=False, carries=carries)


def read_answer(answer: Answer) -> Outcome:
    """What `compute` has sent."""
    numbers, payload, carried, _ = answer
    values = unpack(Packed(payload, carried))
    if numbers is None:
        assert isinstance(values, Failure)
        return values
    return {numbers[0]: values} if len(numbers) == 1 else dict(zip(numbers, values, strict=True))


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
    """An empty sum over one tensor of each message that has to take part in the backward pass."""
    request = next((t for t in received if t.requires_grad), None)
    ties = [*([] if request is None else [request]), *nested]
    if not ties:
        ties = [t for t in returned if t.requires_grad][:1]
    return sum((tie.reshape(-1)[:0].sum().cpu() for tie in ties), start=torch.zeros(())) if ties else None


# Failures


def failure(error: BaseException, worker: str, number: int | None) -> Failure:
    kind = type(error)
    args: tuple[Any, ...] | None = error.args
    try:
        pickle.dumps(args)
    except Exception:  # an argument may refuse in any way
        args = None
    trace = "".join(traceback.format_exception(error))
    return Failure(worker, number, kind.__module__, kind.__qualname__, args, str(error), trace)


def raise_failure(failed: Failure) -> None:
    """The worker's exception, of the same type where that can be rebuilt, with where it came from."""
    try:
        error = named(failed.module, failed.type_name)(*(failed.args or (failed.message,)))
        if not isinstance(error, Exception):
            raise TypeError(f"{failed.type_name} is not an exception")
    except Exception:  # the class may be unknown here, or take other arguments than it keeps
        error = RuntimeError(f"{failed.type_name}: {failed.message}")
    error.add_note(f"raised on {failed.worker} by {_item(failed.number)} of the call:\n{failed.traceback}")
    raise error
