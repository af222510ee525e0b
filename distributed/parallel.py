"""Decorators that make each call of a function a remote call."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, cast

from distributed.functions import import_name, is_async
from distributed.partition import Partitioner
from distributed.reduce import Reducer, mean_reducer
from distributed.remote import remote_async_call, remote_sync_call

P = ParamSpec("P")

_UNDECORATED = "__undecorated__"


@dataclass(frozen=True)
class _Undecorated:
    """Stands for the function under a `parallelize`; the worker finds the function by its name. The last field is the
    mark of `async_execution`."""

    module: str
    name: str
    _wrapped_async_rpc_function: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = import_name(self.module, self.name)
        return getattr(function, _UNDECORATED, function)(*args, **kwargs)


def parallelize(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """A decorator: each call of the function, or the method, becomes a `remote_sync_call`.

    The default partitioner is `batch_partitioner`. If neither is given, the reducer is `mean_reducer`.

    Raises:
        TypeError: workers cannot find the function by name: it is a lambda, a nested or bound function, or a
            partial; or `@parallelize` has no brackets.
    """
    return _decorator(remote_sync_call, partitioner, reducer, timeout)


parallelize_sync = parallelize


def parallelize_async(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """A decorator: each call of the function becomes a `remote_async_call`, which returns a future."""
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
        remote = _Undecorated(func.__module__, func.__qualname__, is_async(func))

        @functools.wraps(func)
        def parallel(*args: P.args, **kwargs: P.kwargs) -> Any:
            return call(remote, args=args, kwargs=kwargs, partitioner=partitioner, reducer=reducer, timeout=timeout)

        setattr(parallel, _UNDECORATED, func)  # decorators above this one copy the attribute
        return cast(Callable[P, Any], parallel)

    return decorate


def _is_being_defined(func: Callable[..., Any]) -> bool:
    """Whether the module's or class's name is not yet bound to this function, as under a decorator without brackets."""
    if "<" in func.__qualname__:
        return False  # a lambda or nested function, given as partitioner
    try:
        bound = import_name(func.__module__, func.__qualname__)
    except AttributeError:
        return True
    except ImportError:
        return False  # its module was not imported by name
    return bound is not func and inspect.unwrap(bound) is not inspect.unwrap(func)


def _check_findable(func: Callable[..., Any]) -> None:
    name = getattr(func, "__qualname__", None)
    if not isinstance(name, str) or "<" in name or inspect.ismethod(func) or not hasattr(func, "__module__"):
        raise TypeError(
            f"parallelize({func!r}): workers find a function by its module and name, so it must be defined "
            "with def at the top of a module or of a class"
        )
