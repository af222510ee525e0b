"""The calls made under each distributed autograd context, and the contexts whose backward pass can no longer end.

A caller records its call (`calls_of`), and a worker the calls of the function that it computes (`computing`). A call
that is lost spoils its context (`spoil`). Before a backward pass, `distributed.autograd` reads all this.

torch's engine waits until every message sent under a context has taken part in the backward pass. So before a pass
every call must be answered, and every answer must be among the roots, by an anchor (see `distributed.autograd`).
"""

import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd
from torch.futures import Future

_NO_CONTEXT = -1
_FORCE_CONTEXT = "_ZN5torch11distributed8autograd21DistAutogradContainer21forceCurrentContextIdEl"


class Calls:
    """The remote calls made under a context by its thread, or by one function that is computed under it.

    Attributes:
        ctx: the context's id.
        anchors: one for each answer so far.
        unread: asynchronous calls whose answers are not read yet.
    """

    def __init__(self, ctx: int) -> None:
        self.ctx = ctx
        self.anchors: list[Tensor] = []
        self.unread: set[Future[Any]] = set()

    def wait(self) -> None:
        """Waits for all answers. Every call has its own time limit; one that fails spoils the context."""
        while values := [*self.unread]:
            for value in values:
                with suppress(Exception):  # of the function; its answer has come nevertheless
                    value.wait()
                self.unread.discard(value)


_MAIN_THREAD = threading.main_thread().ident
_ever_entered = False
_enter = autograd.context.__enter__


@functools.wraps(_enter)
def _noted_enter(self: autograd.context) -> int:
    global _ever_entered
    _ever_entered = True
    return _enter(self)


# torch's context class records its first use: to ask torch before each call takes a tenth of a small call's time.
autograd.context.__enter__ = _noted_enter  # type: ignore[method-assign]


def current_context() -> int | None:
    """The id of the context that this thread is in, or None."""
    if not _ever_entered and threading.get_ident() == _MAIN_THREAD:
        return None  # in other threads a message may have opened one
    if autograd._get_debug_info()["num_autograd_contexts"] == "0":
        return None  # ten times as fast as the error below
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:
        return None


_lock = threading.Lock()
_contexts: dict[int, Calls] = {}
_spoiled: dict[int, str] = {}
_functions: list[Calls] = []
"""The calls of each function that this process computes now."""

_function: ContextVar[Calls | None] = ContextVar("function", default=None)
"""The calls of the function that this thread computes under a context."""


def is_open(ctx: int) -> bool:
    """Whether this process knows such a context."""
    try:
        autograd._retrieve_context(ctx)
    except RuntimeError:
        return False
    return True


def calls_of(ctx: int) -> Calls:
    """The record for a call that this thread makes under the context."""
    function = _function.get()
    if function is not None and function.ctx == ctx:
        return function
    with _lock:
        if ctx not in _contexts:
            for closed in [other for other in _contexts if not is_open(other)]:  # torch's own class reports no end
                del _contexts[closed]
            _contexts[ctx] = Calls(ctx)
        return _contexts[ctx]


def close(ctx: int) -> None:
    """Forgets a context that has ended."""
    with _lock:
        _contexts.pop(ctx, None)
        _spoiled.pop(ctx, None)


@contextmanager
def computing(ctx: int | None) -> Iterator[Calls | None]:
    """While a function is computed by this thread: gives the record of the calls that it makes under the context."""
    calls = None if ctx is None else Calls(ctx)
    outer = _function.set(calls)
    if calls is not None:
        _functions.append(calls)
    try:
        yield calls
    finally:
        _function.reset(outer)
        if calls is not None:
            _functions.remove(calls)


def spoil(ctx: int, reason: str) -> None:
    """Notes that no backward pass of this context can end, and why."""
    with _lock:
        for closed in [other for other in _spoiled if not is_open(other)]:
            del _spoiled[closed]
        if is_open(ctx):
            _spoiled.setdefault(ctx, reason)


def reason_against(ctx: int) -> str | None:
    """Why no backward pass of this context can end; None if it can."""
    return _spoiled.get(ctx)


# Threads that a function under a context starts: torch does not know that they belong to the context.


def of_a_function(tensors: Iterable[Tensor]) -> Calls | None:
    """For a thread outside every context: the calls of the function that has made these tensors; None if none has.

    Raises:
        RuntimeError: the tensors have a graph, but it is not clear from which context.
    """
    functions = {calls.ctx: calls for calls in [*_functions]}
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    if not functions or not nodes:
        return None
    if len(functions) > 1:
        ctx = _receiver(nodes, [*functions])
        if ctx is None:
            raise RuntimeError(
                "a remote call from a thread that a function has started: this worker computes for several autograd "
                "contexts, and the arguments do not show which one is meant; call from the function's first thread"
            )
        return functions[ctx]
    return next(iter(functions.values()))


def _receiver(nodes: list[Any], contexts: list[int]) -> int | None:
    """Which of the contexts has received a tensor that the graph behind these nodes begins with; None if none has."""
    received = {
        node: ctx for ctx in contexts if is_open(ctx)
        for node in autograd._retrieve_context(ctx)._recv_functions().values()
    }  # fmt: skip
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node in received:
            return received[node]
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return None


@contextmanager
def entered(ctx: int | None) -> Iterator[None]:
    """Puts this thread into the context, unless it is in it. A thread that a function has started is in none.

    Raises:
        RuntimeError: this build of torch does not offer it.
    """
    if ctx is None or current_context() == ctx:
        yield
        return
    # torch offers Python no way into a context that exists; its C++ library has one, see `_FORCE_CONTEXT`.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    force = getattr(library, _FORCE_CONTEXT, None)
    if force is None:
        raise RuntimeError(f"ctx={ctx}: this torch cannot enter it in a second thread; make the call in the first")
    force(ctypes.c_int64(ctx))
    try:
        yield
    finally:
        force(ctypes.c_int64(_NO_CONTEXT))
