"""Remote calls as map-reduce: a partitioner deals a call out, workers compute, a reducer gathers.

One message goes to each worker; the worker runs its items in turn. So the number of items never
exceeds the number of threads that serve them, and no number of items can block a worker.
"""

import functools
import importlib
import pickle
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch.distributed import rpc
from torch.futures import Future

from distributed.partition import Args, KwArgs, Partitioner, batch_partitioner, unwrap
from distributed.reduce import Reducer, mean_reducer
from distributed.world import check_timeout, default_timeout, get_worker_id, get_world_rank, worker_infos

P = ParamSpec("P")
T = TypeVar("T")

UNSET_TIMEOUT = -1
"""What torch means by "the default"; None means the same here."""


class _Item(NamedTuple):
    """One call of the function: its place among all, and what it is called with."""

    number: int
    args: Args
    kwargs: KwArgs


class _Failure(NamedTuple):
    """An exception, in a form that always travels."""

    worker: str
    number: int
    module: str
    type_name: str
    args: tuple[Any, ...] | None
    message: str
    traceback: str


def _run_items(func: Callable[..., T], items: Sequence[_Item], worker: str) -> list[T] | _Failure:
    """Runs on the worker; stops at the first item that fails."""
    results = []
    for item in items:
        try:
            args, kwargs = unwrap((item.args, item.kwargs))
            results.append(func(*args, **kwargs))
        except Exception as error:
            return _failure(error, worker, item.number)
    return results


def _failure(error: Exception, worker: str, number: int) -> _Failure:
    kind = type(error)
    args: tuple[Any, ...] | None = error.args
    try:
        pickle.dumps(args)
    except Exception:  # an argument may refuse in any way
        args = None
    return _Failure(worker, number, kind.__module__, kind.__qualname__, args, str(error), traceback.format_exc())


def _raise(failure: _Failure) -> None:
    """The worker's exception, of the same type where that can be rebuilt, with where it came from."""
    try:
        error = _named(failure.module, failure.type_name)(*(failure.args or (failure.message,)))
        if not isinstance(error, Exception):
            raise TypeError(f"{failure.type_name} is not an exception")
    except Exception:  # the class may be unknown here, or take other arguments than it keeps
        error = RuntimeError(f"{failure.type_name}: {failure.message}")
    error.add_note(f"raised on {failure.worker} by item {failure.number} of the call:\n{failure.traceback}")
    raise error


def _named(module: str, name: str) -> Any:
    """What `module` calls `name`, imported if need be."""
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found


def _worker_error(worker: str, error: RuntimeError, timeout: float) -> Exception:
    first = str(error).splitlines()[0]
    if "timeout" in first.lower() or "timed out" in first.lower():
        return TimeoutError(f"{worker} did not answer within {timeout:g} s: {first}")
    if any(sign in first.lower() for sign in ("eof", "pipe", "connection", "connect", "closed", "shutting down")):
        return ConnectionError(f"{worker} does not answer: {first}")
    return RuntimeError(f"{worker}: {first}")


class _Call:
    """A call that has been dealt out and sent."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: Args | None,
        kwargs: KwArgs | None,
        partitioner: Partitioner | None,
        timeout: float | None,
        *,
        own_part_here: bool,
    ) -> None:
        self.timeout = default_timeout() if timeout in (None, UNSET_TIMEOUT) else timeout
        check_timeout(self.timeout)
        self._func = func
        self._names = [worker.name for worker in worker_infos()]
        self._items: dict[int, list[_Item]] = defaultdict(list)
        for number, part in enumerate(_partition(args or (), kwargs or {}, partitioner)):
            worker, part_args, part_kwargs = part
            self._items[get_worker_id(worker)].append(_Item(number, part_args or (), part_kwargs or {}))
        me = get_world_rank()
        self._own = self._items[me] if own_part_here and me in self._items else []
        self.futures = {
            worker: rpc.rpc_async(
                self._names[worker], _run_items, args=(func, items, self._names[worker]), timeout=self.timeout
            )
            for worker, items in self._items.items()
            if not (self._own and worker == me)
        }

    def results(self) -> list[Any]:
        """Waits for all and puts the results in order of the items."""
        outcomes: dict[int, list[Any] | _Failure] = {}
        if self._own:
            me = get_world_rank()
            outcomes[me] = _run_items(self._func, self._own, self._names[me])
        for worker, future in self.futures.items():
            try:
                outcomes[worker] = future.wait()
            except RuntimeError as error:
                raise _worker_error(self._names[worker], error, self.timeout) from error
        ordered: dict[int, Any] = {}
        failures = []
        for worker, outcome in outcomes.items():
            if isinstance(outcome, _Failure):
                failures.append(outcome)
            else:
                ordered |= zip((item.number for item in self._items[worker]), outcome, strict=True)
        if failures:
            _raise(min(failures, key=lambda failure: failure.number))
        return [ordered[number] for number in sorted(ordered)]


def _partition(args: Args, kwargs: KwArgs, partitioner: Partitioner | None) -> Sequence[Any]:
    if partitioner is None:
        partitioner = batch_partitioner
    if isinstance(partitioner, int | str):
        return [(partitioner, args, kwargs)]
    if not callable(partitioner):
        raise TypeError(f"partitioner={partitioner!r}: must be a worker's rank or name, or a function")
    parts = partitioner(*args, **kwargs)
    if not parts:
        raise ValueError(f"partitioner={partitioner!r} returned no part; every call needs at least one")
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 3:
            raise ValueError(f"partitioner={partitioner!r} returned {part!r}; a part is (worker, args, kwargs)")
    return parts


def remote_sync_call(
    func: Callable[..., T],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
) -> Any:
    """Calls `func` on the workers and waits. The caller computes its own part meanwhile.

    Args:
        func: a function that the workers can import.
        args, kwargs: what it is called with.
        partitioner: a worker's rank or name; or a function that is called with the arguments and returns
            parts `(worker, args or None, kwargs or None)`; None: `batch_partitioner`.
        reducer: from the list of results, in order of the parts, to the value returned; None: the list.
        timeout: seconds a worker may take; None: the session's.

    Raises:
        ConnectionError: a worker is gone (its name is in the message).
        TimeoutError: a worker did not answer in time.
        Exception: what `func` raised, of the same type where it can be rebuilt.
    """
    call = _Call(func, args, kwargs, partitioner, timeout, own_part_here=True)
    results = call.results()
    return results if reducer is None else reducer(results)


def remote_async_call(
    func: Callable[..., T],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
) -> Future[Any]:
    """As `remote_sync_call`, but returns at once with a future of the value."""
    call = _Call(func, args, kwargs, partitioner, timeout, own_part_here=False)
    value: Future[Any] = Future()

    def finish(_: Any) -> None:
        try:
            results = call.results()
            value.set_result(results if reducer is None else reducer(results))
        except Exception as error:
            value.set_exception(error)

    torch.futures.collect_all(list(call.futures.values())).add_done_callback(finish)
    return value


_UNDECORATED = "__undecorated__"


@dataclass(frozen=True)
class _Undecorated:
    """The function under a `parallelize`, found by its name on the worker."""

    module: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _named(self.module, self.name)
        return getattr(found, _UNDECORATED, found)(*args, **kwargs)


def _parallelized(call: Callable[..., Any], **options: Any) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    def decorate(func: Callable[P, Any]) -> Callable[P, Any]:
        name = getattr(func, "__qualname__", None)
        if name is None or "<" in name:
            raise TypeError(
                f"parallelize({func!r}): workers find a function by its module and name, so it must be defined "
                "with def at the top of a module"
            )
        remote = _Undecorated(func.__module__, name)

        @functools.wraps(func)
        def parallel(*args: P.args, **kwargs: P.kwargs) -> Any:
            return call(remote, args=args, kwargs=kwargs, **options)

        setattr(parallel, _UNDECORATED, func)  # decorators put on top of this one copy it upward
        return cast(Callable[P, Any], parallel)

    return decorate


def parallelize(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """A decorator: calling the function is a `remote_sync_call` of it.

    Without a partitioner: `batch_partitioner`, and then without a reducer: `mean_reducer`.

    Raises:
        TypeError: a function that workers cannot find by name.
    """
    reducer = mean_reducer if partitioner is None and reducer is None else reducer
    return _parallelized(remote_sync_call, partitioner=partitioner, reducer=reducer, timeout=timeout)


parallelize_sync = parallelize


def parallelize_async(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """As `parallelize`, by `remote_async_call`: the call returns a future."""
    reducer = mean_reducer if partitioner is None and reducer is None else reducer
    return _parallelized(remote_async_call, partitioner=partitioner, reducer=reducer, timeout=timeout)
