"""Remote calls as map-reduce: a partitioner splits a call into items, workers compute them, a reducer combines the
results. The names are those of `torchopt.distributed.api`."""

import copy
import functools
import importlib
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Literal, ParamSpec, TypeVar, cast

from torch.futures import Future

from distributed.calls import worker
from distributed.calls.message import Packed, note_traffic, pack, send, unpack
from distributed.calls.session import MAX_DEPTH, MAX_WINDOW, current, get_worker_id
from distributed.calls.worker import Answer, Failure, Item, carries, failure, tensors_in
from distributed.errors import describe, worker_error
from distributed.info import check_timeout
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

__all__ = [
    "UNSET_RPC_TIMEOUT", "PartitionFunction", "Partitioner", "TensorDimensionPartitioner", "batch_partitioner",
    "dim_partitioner", "exclusive_batch_partitioner", "mean_reducer", "parallelize", "parallelize_async",
    "parallelize_sync", "remote_async_call", "remote_sync_call", "sum_reducer",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")
UNSET_RPC_TIMEOUT = -1.0  # torch's value for the default time limit; None means the same here
_FIRST_NODE = 2**62  # a number above those that torch gives to nodes, and below those of its accumulators


def parts_of(partitioner: Partitioner | None, args: Args, kwargs: KwArgs) -> Sequence[Any]:
    """The parts (worker, args, kwargs) that a partitioner makes of a call. Raises TypeError or ValueError if
    `partitioner` is none, or returns something else than parts."""
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
        if not isinstance(part[1], tuple | list | None) or not isinstance(part[2], dict | None):
            raise TypeError(
                f"partitioner={partitioner!r} returned {part!r}; args is a tuple or None, kwargs a dict or None"
            )
    return parts


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
    return _Call(func, args, kwargs, partitioner, timeout, compute_own_part=True).value(reducer)


def remote_async_call(
    func: Callable[..., T], *, args: Args | None = None, kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None,
) -> Future[Any]:  # fmt: skip
    """As `remote_sync_call`, but returns a future of the value when the messages are sent. It waits before that only if
    `session.MAX_WINDOW` calls to the same worker are under way already."""
    return _Call(func, args, kwargs, partitioner, timeout).future(reducer)


_UNDECORATED = "__undecorated__"


def _undecorated(module: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls the function under a `parallelize`, which the worker finds by its name."""
    function = attrgetter(name)(importlib.import_module(module))
    return getattr(function, _UNDECORATED, function)(*args, **kwargs)


def parallelize(
    partitioner: Partitioner | None = None, reducer: Reducer | None = None, timeout: float | None = None
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """A decorator: each call of the function, or the method, becomes a `remote_sync_call`. The default partitioner is
    `batch_partitioner`. If neither is given, the reducer is `mean_reducer`. Raises TypeError if workers cannot find the
    function by name (it is a lambda, a nested or bound function, or a partial), or `@parallelize` has no brackets."""
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
        remote = functools.partial(_undecorated, func.__module__, func.__qualname__)

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


class _Call:
    """The caller's side of a remote call: sends each worker its order when it is made; `value` collects the answers.

    One message goes to each worker, and the worker runs its items one after the other. So a call takes one thread of
    each worker, and no number of items can block a worker. How calls can be nested: see `calls.session`.
    `compute_own_part`: `value` computes the caller's own items; else they are sent as to any other worker.
    """

    def __init__(
        self, func: Callable[..., Any], args: Args | None, kwargs: KwArgs | None, partitioner: Partitioner | None,
        timeout: float | None, *, compute_own_part: bool = False,
    ) -> None:  # fmt: skip
        self._session = session = current()
        self._names, self._me = session.workers, session.rank
        items: defaultdict[int, list[Item]] = defaultdict(list)
        for number, (name, part_args, part_kwargs) in enumerate(parts_of(partitioner, args or (), kwargs or {})):
            items[get_worker_id(name)].append((number, part_args or (), part_kwargs or {}))
        self._timeout = session.timeout if timeout is None or timeout == UNSET_RPC_TIMEOUT else timeout
        check_timeout(self._timeout)
        self._depth = worker.depth_here() + 1
        if self._depth > MAX_DEPTH:
            raise RecursionError(f"this remote call would be nested {self._depth} deep; at most {MAX_DEPTH} are served")
        self._ctx = worker.current_context()
        self._calls = None if self._ctx is None else worker.calls_of(self._ctx)
        # All are packed before the first is sent: an error then leaves no worker at work.
        graphs = self._ctx is not None
        packed = {rank: _pack_order(func, part, self._names[rank], graphs=graphs) for rank, part in items.items()}
        self._counts = {rank: len(part) for rank, part in items.items()}
        self._own = packed.pop(self._me, None) if compute_own_part else None
        self._under_way: dict[int, Future[Answer]] = {}
        self._arrived: SimpleQueue[int] = SimpleQueue()
        self._has_failed = False
        try:
            for rank, order in packed.items():
                self._send(rank, order)
        except BaseException:
            self._abandon()
            raise

    def _send(self, rank: int, order: Packed) -> None:
        slots = self._session.slots[rank, self._depth]
        # The call's time limit begins when it is sent. To wait here for other calls does not use it up.
        if not slots.acquire(timeout=self._timeout):
            raise TimeoutError(
                f"{self._names[rank]} is busy: none of the calls under way to it, at most {MAX_WINDOW}, has ended for "
                f"{self._timeout:g} s, so this one was not sent"
            )
        try:
            head = self._depth, self._session.name, self._ctx, self._timeout
            future = send(self._session.infos[rank], worker.serve, head, order, self._timeout)
        except BaseException as error:
            slots.release()
            if isinstance(error, RuntimeError):
                raise worker_error(self._names[rank], error, self._timeout) from error
            raise
        self._under_way[rank] = future
        note_traffic(sent=order.size())

        def note_answer(answered: Future[Answer]) -> None:
            """Runs when the worker has answered, or is lost."""
            slots.release()
            self._has_failed = self._has_failed or _state(answered) in ("failed", "lost")
            self._arrived.put(rank)

        future.add_done_callback(note_answer)

    def future(self, reducer: Reducer | None) -> Future[Any]:
        """A future of `value`, which is computed as soon as it need not wait, or a worker is lost."""
        reduced: Future[Any] = Future()
        if self._calls is not None:  # a backward pass must wait for it
            self._calls.unread.add(reduced)
        futures = list(self._under_way.values())
        # Several threads of torch's may find at the same time that the call has ended; the first one goes on.
        first = threading.Lock()

        def finish_if_ended(_: Future[Answer]) -> None:
            states = [_state(future) for future in futures]
            ended = "open" not in states or "lost" in states or (self._ctx is None and "failed" in states)
            if not ended or not first.acquire(blocking=False):
                return
            try:
                reduced.set_result(self.value(reducer))
            except BaseException as error:  # an exit in the reducer must not leave who waits for the value waiting
                _set_exception(reduced, error if isinstance(error, Exception) else RuntimeError(describe(error)))
            finally:
                if self._calls is not None:
                    self._calls.unread.discard(reduced)

        for future in futures:
            future.add_done_callback(finish_if_ended)
        return reduced

    def value(self, reducer: Reducer | None) -> Any:
        """Waits for all workers, or for the first failure; returns the results in the order of the items, reduced."""
        ordered: dict[int, Any] = {}
        failures = []
        try:
            for outcome in self._outcomes():
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                else:
                    ordered.update(outcome)
                # Under a context every answer must come, or the backward pass would wait for it without end.
                if failures and self._arrived.empty() and self._ctx is None:
                    break
        finally:
            self._abandon()
        if failures:
            _raise_failure(min(failures, key=lambda failure: -1 if failure.number is None else failure.number))
        results = [ordered[number] for number in sorted(ordered)]
        return results if reducer is None else reducer(results)

    def _outcomes(self) -> Iterator[dict[int, Any] | Failure]:
        """Of each worker the results by item, or its failure, as they come; the caller's are the first."""
        if self._own is not None:
            answer = worker.compute_here(self._own, self._depth, self._ctx, stop=lambda: self._has_failed)
            yield self._read(answer, self._me)
        while self._under_way:
            rank = self._arrived.get()
            future = self._under_way.pop(rank)
            try:
                answer = future.wait()
            except Exception as error:  # of the worker's `serve`, torch raises whatever it was
                cause = worker_error(self._names[rank], error, self._timeout)
                if self._ctx is not None:
                    worker.spoil(self._ctx, str(cause))
                raise cause from error
            yield self._read(answer, rank)

    def _abandon(self) -> None:
        """Notes that answers which are under way will not be read."""
        if self._ctx is not None and self._under_way:
            names = " and ".join(self._names[rank] for rank in self._under_way)
            worker.spoil(self._ctx, f"a call to {names} was given up before its answer came")

    def _read(self, answer: Answer, rank: int) -> dict[int, Any] | Failure:
        outcome, anchor = answer
        if self._calls is not None and anchor is not None:
            self._calls.anchors.append(anchor)
        if rank != self._me:
            # The backward pass begins with the tensors that came in one message. torch takes the node with the highest
            # number first, and gives received tensors low ones. This worker would compute its own part before it sends
            # others their gradients; now both sides compute at the same time.
            tensors = [*tensors_in(outcome), *([] if anchor is None else [anchor])]
            node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
            if node is not None:
                node._set_sequence_nr(_FIRST_NODE)  # type: ignore[attr-defined]
        if isinstance(outcome, Failure):
            return outcome
        if len(outcome) < self._counts[rank] and not self._has_failed:  # its time was over, before torch's own ended
            raise TimeoutError(f"{self._names[rank]} did not answer within {self._timeout:g} s")
        if rank != self._me:
            note_traffic(received={rank: sum(packed.size() for packed in outcome.values())})
        try:
            return {number: unpack(packed) for number, packed in outcome.items()}
        except Exception as error:  # a class does not exist here, or may raise anything
            refused = TypeError(f"a result from {self._names[rank]} cannot be rebuilt: {describe(error)}")
            refused.__cause__ = error
            return failure(refused, self._session.name, None)


def _state(future: Future[Answer]) -> Literal["open", "done", "failed", "lost"]:
    """Of a message: not answered; answered with results, or with a failure; lost with its worker."""
    if not future.done():
        return "open"
    try:
        outcome, _ = future.value()
    except Exception:  # of the worker's `serve`, torch raises whatever it was
        return "lost"
    return "failed" if isinstance(outcome, Failure) else "done"


def _pack_order(func: Callable[..., Any], items: Sequence[Item], to: str, *, graphs: bool) -> Packed:
    """A function and one worker's items as a message to worker `to`. `graphs`: see `pack`. Raises TypeError, ValueError
    if a value cannot be sent; the message names it."""
    packed = functools.partial(pack, graphs=graphs, carries=functools.partial(carries, to))
    try:
        return packed((func, items))
    except (TypeError, ValueError):  # only now is each value packed alone, to name the one that fails
        hint = "workers find a function by its module and name, so define it with def at the top of a module"
        labelled = [(f"func={func!r}; {hint}", func)]
        for number, args, kwargs in items:
            for argument, value in [*enumerate(args), *kwargs.items()]:
                labelled.append((f"argument {argument!r} of item {number}", value))
        for what, value in labelled:
            try:
                packed(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{what}: cannot be sent to {to}: {error}") from error
        raise


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


def _raise_failure(failed: Failure) -> None:
    """Raises the worker's exception, of the same type if that can be rebuilt, with a note on its origin."""
    error: Any = None
    if failed.error is not None:
        try:
            error = unpack(failed.error)
            if isinstance(error, tuple):
                kind, args = error
                error = kind(*args)
            if isinstance(error, Exception) and str(error) != failed.message:  # its class made a text of a text
                error.args = (failed.message,)
        except Exception:  # its class may not exist here, take other arguments than it keeps, or raise anything
            error = None
    if not isinstance(error, Exception) or isinstance(error, StopIteration):  # which would only end the caller's loop
        error = RuntimeError(f"{failed.type_name}: {failed.message}")
    item = "the call" if failed.number is None else f"item {failed.number}"
    error.add_note(f"raised on {failed.worker} by {item} of the call:\n{failed.traceback}")
    raise error
