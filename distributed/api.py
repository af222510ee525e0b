"""Remote calls as map-reduce: a partitioner splits a call into items, workers compute them, a reducer combines the
results. How items travel: see `calls.call`. The names are those of `torchopt.distributed.api`.
"""

import copy
import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar, cast

from torch.futures import Future

from distributed.calls.call import Call
from distributed.calls.session import current
from distributed.calls.worker import Item
from distributed.errors import as_exception
from distributed.partition import (
    Args,
    KwArgs,
    Partitioner,
    PartitionFunction,
    TensorDimensionPartitioner,
    batch_partitioner,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from distributed.reduce import Reducer, mean_reducer, sum_reducer
from distributed.world import get_worker_id

__all__ = [
    "UNSET_RPC_TIMEOUT", "PartitionFunction", "Partitioner", "TensorDimensionPartitioner", "batch_partitioner",
    "dim_partitioner", "exclusive_batch_partitioner", "mean_reducer", "parallelize", "parallelize_async",
    "parallelize_sync", "remote_async_call", "remote_sync_call", "sum_reducer",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

UNSET_RPC_TIMEOUT = -1.0  # torch's value for the default time limit; None means the same here


def parts_of(partitioner: Partitioner | None, args: Args, kwargs: KwArgs) -> Sequence[Any]:
    """The parts (worker, args, kwargs) that a partitioner makes of a call.

    Raises:
        TypeError, ValueError: `partitioner` is no partitioner, or returns something else than parts.
    """
    if partitioner is None:
        partitioner = batch_partitioner
    if isinstance(partitioner, int | str):
        return [(partitioner, args, kwargs)]
    if not callable(partitioner):
        raise TypeError(f"partitioner={partitioner!r}: must be a worker's rank or name, or a function")
    parts = partitioner(*args, **kwargs)
    try:
        parts = list(() if parts is None else parts)
    except TypeError as error:
        raise TypeError(f"partitioner={partitioner!r} returned {parts!r}; it must return a list of parts") from error
    if not parts:
        raise ValueError(f"partitioner={partitioner!r} returned no part; every call needs at least one")
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 3:
            raise ValueError(f"partitioner={partitioner!r} returned {part!r}; a part is (worker, args, kwargs)")
        _, part_args, part_kwargs = part
        if not isinstance(part_args, tuple | list | None) or not isinstance(part_kwargs, dict | None):
            raise TypeError(
                f"partitioner={partitioner!r} returned {part!r}; args is a tuple or None, kwargs a dict or None"
            )
    return parts


def _start(
    func: Callable[..., Any], args: Args | None, kwargs: KwArgs | None, partitioner: Partitioner | None,
    timeout: float | None, *, compute_own_part: bool = False,
) -> Call:  # fmt: skip
    current()
    items: defaultdict[int, list[Item]] = defaultdict(list)
    for number, (name, part_args, part_kwargs) in enumerate(parts_of(partitioner, args or (), kwargs or {})):
        items[get_worker_id(name)].append(Item(number, part_args or (), part_kwargs or {}))
    limit = None if timeout == UNSET_RPC_TIMEOUT else timeout
    return Call(func, items, limit, compute_own_part=compute_own_part)


def remote_sync_call(
    func: Callable[..., T], *, args: Args | None = None, kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None,
) -> Any:  # fmt: skip
    """Calls `func` on the workers and waits. In the meantime the caller computes its own part.

    The first failure is raised at once, also if other workers still compute; under `autograd.context()`, when all have
    answered.

    Every worker, also the caller, computes on copies of the arguments, and in torch's default modes (gradients are
    computed, nothing is autocast). Each item has copies of its own, as if it were a call of its own; the items that a
    worker computes of a `pure` function share them. Under `autograd.context()` parameters and
    modules keep their graph, and so do the results. Without a context, results come back without a graph.

    Args:
        func: a function that the workers can import.
        args, kwargs: its arguments.
        partitioner: a worker's rank or name; or a function that is called with the arguments and returns
            parts `(worker, args or None, kwargs or None)`; None: `batch_partitioner`.
        reducer: from the list of results, in the order of the parts, to the value returned; None: the list.
        timeout: seconds that a worker may take for its part, from when that is sent; None: the session's. A part is
            sent when fewer than `session.MAX_WINDOW` others are under way to the worker. Waiting for that has
            the same limit, and does not count.

    Raises:
        ConnectionError: a worker does not answer; the message names it.
        TimeoutError: a worker did not answer in time.
        RecursionError: the call is nested deeper than `session.MAX_DEPTH`.
        TypeError, ValueError: an argument cannot be sent, or a worker does not exist.
        Exception: the exception of `func`, of the same type if it can be rebuilt.
    """
    call = _start(func, args, kwargs, partitioner, timeout, compute_own_part=True)
    results = call.results()
    return results if reducer is None else reducer(results)


def remote_async_call(
    func: Callable[..., T], *, args: Args | None = None, kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None,
) -> Future[Any]:  # fmt: skip
    """As `remote_sync_call`, but returns a future of the value when the messages are sent.

    It waits before that only if `session.MAX_WINDOW` calls to the same worker are under way already.
    """
    call = _start(func, args, kwargs, partitioner, timeout)
    value: Future[Any] = Future()
    call.note_unread(value)

    def finish() -> None:
        try:
            results = call.results()
            value.set_result(results if reducer is None else reducer(results))
        except BaseException as error:  # an exit in the reducer must not leave who waits for the value waiting
            _set_exception(value, as_exception(error))
        finally:
            call.note_read(value)

    call.when_ended(finish)
    return value


def _set_exception(value: Future[Any], error: Exception) -> None:
    """As torch's, but each reader gets a copy of the exception."""
    # The kept one must not collect the readers' frames. They hold the future, and Python cannot see that the future
    # holds the exception, so none of them would ever be freed.
    kept = error.with_traceback(None)

    def raise_copy(_: Any) -> None:
        try:
            copied = copy.copy(kept)
            same = copied.args == kept.args
        except Exception:  # a class may raise anything
            raise kept from kept.__cause__
        raise (copied if same else kept) from kept.__cause__

    value._set_unwrap_func(raise_copy)
    value.set_result(kept)


# Decorators that make each call of a function a remote call


_UNDECORATED = "__undecorated__"


@dataclass(frozen=True)
class _Undecorated:
    """Stands for the function under a `parallelize`; the worker finds the function by its name."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = attrgetter(self.name)(importlib.import_module(self.module))
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
        name = getattr(func, "__qualname__", None)
        if not isinstance(name, str) or "<" in name or inspect.ismethod(func) or not hasattr(func, "__module__"):
            raise TypeError(
                f"parallelize({func!r}): workers find a function by its module and name, so it must be defined "
                "with def at the top of a module or of a class"
            )
        remote = _Undecorated(func.__module__, func.__qualname__)

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
        bound = attrgetter(func.__qualname__)(importlib.import_module(func.__module__))
    except AttributeError:
        return True
    except ImportError:
        return False  # its module was not imported by name
    return bound is not func and inspect.unwrap(bound) is not inspect.unwrap(func)
