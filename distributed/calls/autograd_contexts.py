"""The calls made under each distributed autograd context, and the contexts whose backward pass can no longer end.

A caller records its call (`calls_of`), and a worker the calls of the function that it computes (`computing`). A call
that is lost spoils its context (`spoil`). `distributed.autograd` reads all this before a backward pass, and says why.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.distributed import autograd
from torch.futures import Future


class Calls:
    """The remote calls made under a context by its thread, or by one function that is computed under it."""

    def __init__(self, ctx: int) -> None:
        self.ctx = ctx  # the context's id
        self.anchors: list[Tensor] = []  # one for each answer so far
        self.unread: set[Future[Any]] = set()  # asynchronous calls whose answers are not read yet

    def wait(self) -> None:
        """Waits for all answers. Every call has its own time limit; one that fails spoils the context."""
        while values := [*self.unread]:
            for value in values:
                with suppress(Exception):  # of the function; its answer has come nevertheless
                    value.wait()
                self.unread.discard(value)


def current_context() -> int | None:
    """The id of the context that this thread is in, or None."""
    if autograd._get_debug_info()["num_autograd_contexts"] == "0":
        return None  # ten times as fast as the error below
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:
        return None


_lock = threading.Lock()
_contexts: dict[int, Calls] = {}
_spoiled: dict[int, str] = {}
# The calls of the function that this thread computes under a context.
_function: ContextVar[Calls | None] = ContextVar("function", default=None)


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
    try:
        yield calls
    finally:
        _function.reset(outer)


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
