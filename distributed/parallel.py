"""Decorators: a function whose call is a remote call."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, cast

from distributed.engine.names import named
from distributed.partition import Partitioner
from distributed.reduce import Reducer, mean_reducer
from distributed.remote import remote_async_call, remote_sync_call

P = ParamSpec("P")

_UNDECORATED = "__undecorated__"


@dataclass(frozen=True)
class _Undecorated:
    """The function under a `parallelize`, found by its name on the worker."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = named(self.module, self.name)
        return getattr(found, _UNDECORATED, found)(*args, **kwargs)


def parallelize(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """A decorator: calling the function, or the method, is a `remote_sync_call` of it.

    Without a partitioner: `batch_partitioner`, and then without a reducer: `mean_reducer`.

    Raises:
        TypeError: a function that workers cannot find by name: a lambda, a nested or a bound one, a partial;
            or `@parallelize` without its brackets.
    """
    return _decorator(remote_sync_call, partitioner, reducer, timeout)


parallelize_sync = parallelize


def parallelize_async(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """As `parallelize`, by `remote_async_call`: the call returns a future."""
    return _decorator(remote_async_call, partitioner, reducer, timeout)


def _decorator(
    call: Callable[..., Any], partitioner: Partitioner | None, reducer: Reducer | None, timeout: float | None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    if inspect.isfunction(partitioner) and _is_being_defined(partitioner):
        raise TypeError(f"@parallelize on {partitioner.__qualname__}: the brackets are missing; type @parallelize()")
    if partitioner is None and reducer is None:
        reducer = mean_reducer

    def decorate(func: Callable[P, Any]) -> Callable[P, Any]:
        _check_findable(func)
        remote = _Undecorated(func.__module__, func.__qualname__)

        @functools.wraps(func)
        def parallel(*args: P.args, **kwargs: P.kwargs) -> Any:
            return call(remote, args=args, kwargs=kwargs, partitioner=partitioner, reducer=reducer, timeout=timeout)

        setattr(parallel, _UNDECORATED, func)  # decorators put on top of this one copy it upward
        return cast(Callable[P, Any], parallel)

    return decorate


def _is_being_defined(func: Callable[..., Any]) -> bool:
    """Whether this is a module's or class's function whose `def` has not been left yet, as under a bare decorator."""
    if "<" in func.__qualname__:
        return False  # a partitioner made on the spot
    try:
        found = named(func.__module__, func.__qualname__)
    except AttributeError:
        return True
    except ImportError:
        return False  # of a module that was not imported by its name
    return found is not func and inspect.unwrap(found) is not inspect.unwrap(func)


def _check_findable(func: Callable[..., Any]) -> None:
    name = getattr(func, "__qualname__", None)
    if not isinstance(name, str) or "<" in name or inspect.ismethod(func) or not hasattr(func, "__module__"):
        raise TypeError(
            f"parallelize({func!r}): workers find a function by its module and name, so it must be defined "
            "with def at the top of a module or of a class"
        )
