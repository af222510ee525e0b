"""The worker's side of a remote call: unpacks the order, runs its items one after the other, packs the answer.

An order is a function and the worker's items. The answer is the results of the items, or the first failure, and the
anchor that `distributed.autograd` needs.

Also: the calls made under each distributed autograd context, and the contexts whose backward pass can no longer end. A
caller records its call (`calls_of`), and a worker the calls of the function that it computes (`compute`). A call that
is lost spoils its context (`spoil`). `distributed.autograd` reads all this before a backward pass, and says why.
"""

import contextlib
import functools
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import autograd, rpc
from torch.futures import Future

from distributed.calls.message import Carries, Packed, own_copy, pack, unpack
from distributed.calls.session import current, default_timeout, serving, use_own_gpu
from distributed.partition import Args, KwArgs

F = TypeVar("F", bound=Callable[..., Any])

Item = tuple[int, Args, KwArgs]  # one call of the function: its number among all items, and its arguments


class Failure(NamedTuple):
    """An exception in a form that can always be sent. `error` is the packed exception, or the tuple of its type and
    arguments, if one of these can be packed."""

    worker: str
    number: int | None
    type_name: str
    message: str
    traceback: str
    error: Packed | None


Outcome = dict[int, Packed] | Failure  # the packed results of a worker's items by number, or the first failure
Answer = tuple[Outcome, Tensor | None]  # and the anchor that `distributed.autograd` needs

_PURE = "__pure__"


def pure(func: F) -> F:
    """Declares that the function only computes its result, and changes nothing in place: a worker's items then share
    their arguments."""
    setattr(func, _PURE, True)
    return func


def is_pure(func: Callable[..., Any]) -> bool:
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, _PURE, False) is True


def serve(depth: int, caller: str, ctx: int | None, timeout: float, payload: bytes, carried: list[Any]) -> Answer:
    """Runs on the worker, called by the message of the worker `caller`, which waits `timeout` seconds for the answer to
    its packed order. `depth`: how deep the call is nested; `ctx`: the autograd context that it is made under."""
    use_own_gpu()
    sendable = functools.partial(carries, caller, any_device=True)
    deadline, thread = time.monotonic() + timeout, threading.get_ident()
    serving.add(thread)
    try:
        answer = compute(Packed(payload, carried), depth, caller, ctx, sendable, lambda: time.monotonic() > deadline)
    finally:
        serving.discard(thread)
    if ctx is not None:
        # A call made here may have spoiled the context. The caller hears of it before it gets its answer.
        reason = reason_against(ctx)
        if reason is not None and caller != current().name:
            args = (ctx, f"on {current().name}: {reason}")
            rpc.rpc_sync(caller, spoil, args, timeout=default_timeout())
    give_up(carried)
    return answer


def compute_here(order: Packed, depth: int, ctx: int | None, stop: Callable[[], bool]) -> Answer:
    """Computes the caller's own part as any other worker would: on copies of the arguments, and in the modes of torch
    that a new thread has."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        return compute(own_copy(order, graphs=ctx is not None), depth, current().name, ctx, lambda device: True, stop)


def compute(
    order: Packed, depth: int, caller: str, ctx: int | None, carries: Carries, stop: Callable[[], bool]
) -> Answer:
    """Runs the items of an order. Stops at the first item that fails, and if `stop` returns true between items."""
    calls = None if ctx is None else Calls(ctx)
    outer = _computed.set((depth, calls))
    try:
        outcome = _run(order, caller, carries, stop, graphs=ctx is not None)
        if calls is not None:
            calls.wait()
    finally:
        _computed.reset(outer)
    return outcome, None if calls is None else anchor_of(order.tensors(), calls.anchors, tensors_in(outcome))


def _run(order: Packed, caller: str, carries: Carries, stop: Callable[[], bool], *, graphs: bool) -> Outcome:
    me = current().name
    try:
        func, items = unpack(order)
    except Exception as error:  # a name does not exist here, or an object cannot be built
        return failure(error, me, None)
    results: dict[int, Packed] = {}
    # What another item, or the caller, changes in place must not reach this item's arguments and result. A pure
    # function changes nothing, and a single item shares with no other.
    alone = is_pure(func) or (len(items) == 1 and caller != me)
    for number, *arguments in itertools.takewhile(lambda _: not stop(), items):
        try:
            if not alone:
                arguments = unpack(own_copy(pack(arguments, graphs=graphs, carries=lambda _: True), graphs=graphs))
            args, kwargs = arguments
            results[number] = _pack_result(func(*args, **kwargs), number, carries, graphs=graphs)
            if not alone:
                results[number] = own_copy(results[number], graphs=graphs)
        except KeyboardInterrupt:  # this process computes its own part, and the user stops it
            raise
        except BaseException as error:  # an exit on a worker must not leave the caller waiting
            return failure(error, me, number)
    return results


def _pack_result(result: Any, number: int, carries: Carries, *, graphs: bool) -> Packed:
    """The packed result of an item. Without `graphs` its tensors leave their graphs before the next item begins. Raises
    TypeError or ValueError, which name the item, if the result cannot be sent."""
    try:
        packed = pack(result, graphs=graphs, carries=carries)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the result of item {number} cannot be sent: {error}") from error
    if graphs:
        return packed
    plain = [v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v for v in packed.carried]
    return packed._replace(carried=plain)


def carries(worker: str, device: torch.device, *, any_device: bool = False) -> bool:
    """Whether tensors on `device` can be sent to `worker`. `any_device`, for answers: on any GPU if one is mapped."""
    mapped = current().device_maps.get(worker, set())
    # torch sends an answer by the caller's device map, which this process does not know.
    return device.type == "cpu" or device in mapped or (any_device and bool(mapped) and device.type == "cuda")


def failure(error: BaseException, worker: str, number: int | None) -> Failure:
    """The failure of an item. It holds the exception with its attributes, else without them; else only its text."""
    sent = None
    for packable in (error, (type(error), error.args)):
        with contextlib.suppress(TypeError, ValueError):  # of an attribute: a lock, or a tensor that cannot be sent
            packed = pack(packable, graphs=False, carries=lambda device: device.type == "cpu")
            # Leaves, too: under a context torch would make a tensor that requires a gradient part of the backward pass.
            sent = packed._replace(carried=[v.detach() if isinstance(v, Tensor) else v for v in packed.carried])
            break
    trace = "".join(traceback.format_exception(error))
    return Failure(worker, number, type(error).__qualname__, str(error), trace, sent)


def tensors_in(outcome: Outcome) -> list[Tensor]:
    """All tensors of the results."""
    return [] if isinstance(outcome, Failure) else [t for packed in outcome.values() for t in packed.tensors()]


def anchor_of(received: list[Tensor], nested: list[Tensor], returned: list[Tensor]) -> Tensor | None:
    """An empty sum over one tensor of each message that must take part in the backward pass."""
    ties = [t for t in received if t.requires_grad][:1] + nested
    if not ties:  # the answer is then the only message that must take part
        ties = [t for t in returned if t.requires_grad][:1]
    return sum((tie.reshape(-1)[:0].sum().cpu() for tie in ties), start=torch.zeros(())) if ties else None


# Calls under distributed autograd contexts


class Calls:
    """The remote calls made under a context by its thread, or by one function that is computed under it."""

    def __init__(self, ctx: int) -> None:
        self.ctx = ctx  # the context's id
        self.anchors: list[Tensor] = []  # one for each answer so far
        self.unread: set[Future[Any]] = set()  # asynchronous calls whose answers are not read yet
        self.spoiled: str | None = None  # why no backward pass can end, noted in the record of the context

    def wait(self) -> None:
        """Waits for all answers. Every call has its own time limit; one that fails spoils the context."""
        while values := [*self.unread]:
            for value in values:
                with contextlib.suppress(Exception):  # of the function; its answer has come nevertheless
                    value.wait()
                self.unread.discard(value)


_lock = threading.Lock()
_contexts: dict[int, Calls] = {}
# Of the call that this thread computes: how deep it is nested, 0 if it computes none; and the calls of its function, if
# it is computed under a context. A context variable, since to Python torch's threads are new at every message, and
# thread-locals are slow to make.
_computed: ContextVar[tuple[int, Calls | None]] = ContextVar("computed", default=(0, None))


def depth_here() -> int:
    """How deep the call is nested that this thread computes; 0 if it computes none."""
    return _computed.get()[0]


def current_context() -> int | None:
    """The id of the context that this thread is in, or None."""
    if autograd._get_debug_info()["num_autograd_contexts"] == "0":
        return None  # ten times as fast as the error below
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:
        return None


def is_open(ctx: int) -> bool:
    """Whether this process knows such a context."""
    try:
        autograd._retrieve_context(ctx)
    except RuntimeError:
        return False
    return True


def calls_of(ctx: int) -> Calls:
    """The record for a call that this thread makes under the context."""
    _, calls = _computed.get()
    return calls if calls is not None and calls.ctx == ctx else _of_context(ctx)


def _of_context(ctx: int) -> Calls:
    with _lock:
        if ctx not in _contexts:
            for closed in [other for other in _contexts if not is_open(other)]:  # torch's own class reports no end
                del _contexts[closed]
            _contexts[ctx] = Calls(ctx)
        return _contexts[ctx]


def forget(ctx: int) -> None:
    """Called when a context has ended."""
    with _lock:
        _contexts.pop(ctx, None)


def spoil(ctx: int, reason: str) -> None:
    """Notes that no backward pass of this context can end, and why."""
    if is_open(ctx):
        calls = _of_context(ctx)
        with _lock:  # the first of several reasons is the cause
            calls.spoiled = calls.spoiled or reason


def reason_against(ctx: int) -> str | None:
    """Why no backward pass of this context can end; None if it can."""
    calls = _contexts.get(ctx)
    return None if calls is None else calls.spoiled


# References to values of other workers, and how a worker gives them back
#
# torch tells the owner of an RRef when the last reference to it on another worker is gone. While it does, it holds a
# lock of its own, and may have to wait for Python's. A second thread that gives up a reference at the same time has
# Python's lock and waits for torch's: neither goes on, nor does any other thread that needs Python. torch gives up the
# arguments of a call in this way, when the call is done, so a worker that computes several calls with references stands
# still, if rarely. So they are taken out of the arguments, and given up here, one at a time.

_one_at_a_time = threading.Lock()


def fetched(references: "list[rpc.RRef[Any]]", timeout: float) -> Any:
    """The value of the only reference in a list that came with a call. The list is empty afterwards. Raises
    RuntimeError if the value did not come within `timeout` seconds, or could not be computed."""
    try:
        return references[0].to_here(timeout=timeout)
    finally:
        give_up(references)


def give_up(carried: list[Any]) -> None:
    """Empties a list that came with a call, if there are references in it."""
    if any(isinstance(value, rpc.PyRRef) for value in carried):
        with _one_at_a_time:
            carried.clear()
