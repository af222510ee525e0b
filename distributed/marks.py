"""Decorators that declare what remote calls may do with a function."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_PURE = "__pure__"
_ASYNC = "_wrapped_async_rpc_function"  # torch's own mark


def pure(func: F) -> F:
    """Declares that the function only computes its result: a second computation gives the same, and does no harm.

    Only such functions can be called with `retries`.
    """
    setattr(func, _PURE, True)
    return func


def is_pure(func: Callable[..., Any]) -> bool:
    return getattr(_inner(func), _PURE, False) is True


def _inner(func: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(func, functools.partial):
        func = func.func
    return func
