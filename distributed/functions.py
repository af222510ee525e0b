"""Declarations about functions that remote calls run, and the search for a function by its name."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_PURE = "__pure__"
_ASYNC = "_wrapped_async_rpc_function"  # the mark that torch's own decorator sets


def pure(func: F) -> F:
    """Declares that the function only computes its result, and changes nothing in place: a worker's items then share
    their arguments."""
    setattr(func, _PURE, True)
    return func


def is_pure(func: Callable[..., Any]) -> bool:
    return getattr(_inner(func), _PURE, False) is True


def async_execution(func: F) -> F:
    """Declares that the function returns a future, whose value is the result: `torch.futures.Future`, as from
    `remote_async_call(…)` or its `then`. It may also return a value that it has at once.

    The worker starts all items of its part, one after the other, and answers when all futures are done; the results
    are in the order of the items, as ever. Until then the call holds no thread of the worker, so any number of futures
    can be open in one call. The caller's limit of `session.MAX_WINDOW` messages to one worker holds nevertheless.

    Two kinds of calls do hold their thread, and wait for each item's future before they start the next item: those
    under `autograd.context()`, which belongs to the thread; and those with items for free workers
    (`dynamic_partitioner`), since a worker that waits is not free.

    A future that fails is a failure of the call, with its own exception. A future that is still open at the time limit
    is a TimeoutError of the caller. `.then` of the futures of `remote_async_call` keeps the exceptions of its callback,
    and remote calls in that callback count as nested; `.then` of torch's own futures does neither.

    `torch.distributed.rpc.functions.async_execution` has the same effect.
    """
    setattr(func, _ASYNC, func)
    return func


def is_async(func: Callable[..., Any]) -> bool:
    return bool(getattr(_inner(func), _ASYNC, False))


def _inner(func: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(func, functools.partial):
        func = func.func
    return func


# Names


def import_name(module: str, name: str) -> Any:
    """The object with the dotted name `name` in `module`, which is imported if it is not yet."""
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


def find_function(argument: str, name: str) -> Callable[..., Any]:
    """The function with a dotted name such as `my_module.my_function`.

    Raises:
        ValueError: there is no such function; the message names `argument`.
    """
    module, _, attribute = str(name).rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument}={name}: {error}; must be MODULE.FUNCTION, importable from here") from error
    if not callable(function):
        raise ValueError(f"{argument}={name}: is not a function")
    return function  # type: ignore[no-any-return]
