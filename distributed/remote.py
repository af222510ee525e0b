"""Remote calls as map-reduce: a partitioner splits a call into items, workers compute them, a reducer combines the
results.

One message goes to each worker, and the worker runs its items one after the other. So a call takes one thread of each
worker, and no number of items can block a worker. How calls can be nested: see `session`.
"""

import contextlib
import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import rpc
from torch.futures import Future
from torch.utils import _pytree as pytree

from distributed import autograd
from distributed.engine import contexts, worker
from distributed.engine.errors import worker_error
from distributed.engine.info import check_timeout
from distributed.engine.leaving import cancel
from distributed.engine.message import Packed, pack, send
from distributed.engine.session import MAX_DEPTH, Session, current
from distributed.engine.slots import Slots
from distributed.engine.traffic import note_received, note_sent
from distributed.engine.worker import Answer, Failure, Item, Order, Outcome, QueueAddress
from distributed.partition import Args, KwArgs, Partitioner, Whole, batch_partitioner
from distributed.reduce import Reducer
from distributed.world import get_worker_id

T = TypeVar("T")

UNSET_RPC_TIMEOUT = rpc.constants.UNSET_RPC_TIMEOUT
"""torch's value for the default time limit; None means the same here."""


_numbers = itertools.count()


class _Call:
    """A remote call: split into items and sent when it is made; `results` waits.

    `compute_own_part`: whether `results` computes the caller's own items; else they are sent as to any other worker.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        args: Args | None,
        kwargs: KwArgs | None,
        partitioner: Partitioner | None,
        timeout: float | None,
        *,
        compute_own_part: bool,
    ) -> None:
        session = current()
        self._names = session.workers
        self.timeout = session.timeout if timeout in (None, UNSET_RPC_TIMEOUT) else timeout
        check_timeout(self.timeout)
        self._depth = worker.depth() + 1
        if self._depth > MAX_DEPTH:
            raise RecursionError(f"this remote call would be nested {self._depth} deep; at most {MAX_DEPTH} are served")
        self._ctx = autograd.current_context()
        self._calls = None if self._ctx is None else contexts.calls_of(self._ctx)
        self._me = session.rank
        self._number = next(_numbers)
        items, free, shared = _split_up(partitioner, args or (), kwargs or {})
        self._expected = len(free) + sum(map(len, items.values()))
        takers = self._takers(len(free))
        orders = {rank: Order(func, own_items, []) for rank, own_items in items.items()}
        orders |= {rank: Order(func, items.get(rank, []), shared) for rank in takers}
        packed = {rank: self._pack(order, rank) for rank, order in orders.items()}
        if self._ctx is None:
            self._calls = contexts.of_a_function(tensor for order in packed.values() for tensor in order.tensors())
            if self._calls is not None:
                self._ctx = self._calls.ctx
                packed = {rank: self._pack(order, rank) for rank, order in orders.items()}
        self._queue = worker.open_queue([self._pack_item(item, shared) for item in free]) if free else None
        self._source = None if self._queue is None else QueueAddress(session.name, self._queue)
        self._own_order = packed.pop(self._me, None) if compute_own_part else None
        self._sent: dict[int, tuple[Future[Answer], Slots]] = {}
        self._arrived: SimpleQueue[int] = SimpleQueue()
        self._has_failed = False
        try:
            for rank, order in packed.items():
                self._send(session, rank, order, takes=rank in takers)
        except BaseException:
            self._abandon()
            raise
        for rank, (future, _) in self._sent.items():
            future.add_done_callback(functools.partial(self._note_answer, rank))

    def _takers(self, free: int) -> list[int]:
        """The ranks that take items from the queue: the caller, then the others, at most as many as there are items."""
        if not free:
            return []
        return [self._me, *(rank for rank in range(len(self._names)) if rank != self._me)][:free]

    def note_unread(self, value: Future[Any]) -> None:
        """Until `note_read`, a backward pass must wait for this value."""
        if self._calls is not None:
            self._calls.unread.add(value)

    def note_read(self, value: Future[Any]) -> None:
        if self._calls is not None:
            self._calls.unread.discard(value)

    def _pack(self, order: Order, rank: int) -> Packed:
        """Raises TypeError or ValueError that names the value that cannot be sent."""
        name = self._names[rank]
        packed = functools.partial(pack, graphs=self._ctx is not None, carries=functools.partial(worker.carries, name))
        try:
            return packed((order.func, [tuple(item) for item in order.items], order.shared))
        except (TypeError, ValueError):
            for what, value in _labelled_values(order):
                try:
                    packed(value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{what}: cannot be sent to {name}: {error}") from error
            raise

    def _pack_item(self, item: Item, shared: list[Whole]) -> Packed:
        """An item for any free worker. That worker is not known yet, so tensors must be on the CPU."""
        graphs = self._ctx is not None
        try:
            return pack(tuple(item), graphs=graphs, carries=lambda device: device.type == "cpu", shared=shared)
        except (TypeError, ValueError) as error:
            raise type(error)(f"item {item.number}: cannot be sent: {error}") from error

    def _send(self, session: Session, rank: int, order: Packed, *, takes: bool) -> None:
        slot = session.slots[rank, self._depth]
        if not slot.acquire(self.timeout):
            raise TimeoutError(
                f"{self._names[rank]} is busy: none of the {slot.size} calls under way to it has ended for "
                f"{self.timeout:g} s, so this one was not sent"
            )
        head = (self._depth, session.name, self._number, self._queue if takes else None, self._ctx, self.timeout)
        try:
            with contexts.entered(self._ctx):
                future: Future[Answer] = send(session.infos[rank], worker.serve, head, order, self.timeout)
        except BaseException as error:
            slot.release()
            if isinstance(error, RuntimeError):
                raise worker_error(self._names[rank], error, self.timeout) from error
            raise
        self._sent[rank] = future, slot
        note_sent(order.size())

    def _note_answer(self, rank: int, answered: Future[Answer]) -> None:
        """Runs when a worker has answered, or is lost. After a failure the other workers get no more items."""
        if _state(answered) is not _State.DONE:
            self._has_failed = True
            if self._queue is not None:
                worker.close_queue(self._queue)
        self._arrived.put(rank)

    def when_ended(self, action: Callable[[], None]) -> None:
        """Calls `action` once, as soon as `results` need not wait."""
        futures = [future for future, _ in self._sent.values()]
        first = threading.Lock()

        def act_if_ended(_: Future[Answer]) -> None:
            states = [_state(future) for future in futures]
            ended = (
                _State.OPEN not in states or _State.LOST in states or (self._ctx is None and _State.FAILED in states)
            )
            if ended and first.acquire(blocking=False):
                action()

        for future in futures:
            future.add_done_callback(act_if_ended)

    def results(self) -> list[Any]:
        """Waits for all workers, or for the first failure; returns the results in the order of the items."""
        ordered: dict[int, Any] = {}
        failures = []
        try:
            for outcome in self._outcomes():
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                else:
                    ordered.update(outcome)
                if failures and self._arrived.empty() and self._ctx is None:
                    break
        finally:
            self._abandon()
        if failures:
            worker.raise_failure(min(failures, key=lambda failure: -1 if failure.number is None else failure.number))
        assert len(ordered) == self._expected
        return [ordered[number] for number in sorted(ordered)]

    def _outcomes(self) -> Iterator[Outcome]:
        """The outcomes of the workers in the order in which they come; the caller's own is the first."""
        if self._own_order is not None:
            answer = worker.compute_here(
                self._own_order, self._depth, self._source, self._ctx, stop=lambda: self._has_failed
            )
            yield self._read(answer, self._me)
        while self._sent:
            rank = self._arrived.get()
            yield self._outcome(rank, *self._sent.pop(rank))

    def _abandon(self) -> None:
        """Closes the queue and cancels the messages that are under way, which release their slots when they end."""
        if self._queue is not None:
            worker.close_queue(self._queue)
        if self._ctx is not None and self._sent:
            names = " and ".join(self._names[rank] for rank in self._sent)
            contexts.spoil(self._ctx, f"a call to {names} was given up before its answer came")
        for rank, (future, slot) in self._sent.items():
            future.add_done_callback(functools.partial(_release, slot))
            if not future.done():
                with contextlib.suppress(RuntimeError):  # the worker is lost, or leaves
                    rpc.rpc_async(
                        self._names[rank], cancel, (self._names[self._me], self._number), timeout=self.timeout
                    )

    def _outcome(self, rank: int, future: Future[Answer], slot: Slots) -> Outcome:
        try:
            answer = future.wait()
        except RuntimeError as error:
            cause = worker_error(self._names[rank], error, self.timeout)
            if self._ctx is not None:
                contexts.spoil(self._ctx, str(cause))
            raise cause from error
        finally:
            slot.release()
        note_received(Packed(answer[1], answer[2]).size(), rank)
        return self._read(answer, rank)

    def _read(self, answer: Answer, rank: int) -> Outcome:
        (numbers, _, _, anchor) = answer
        if numbers is None and self._queue is not None:
            worker.close_queue(self._queue)
        if self._calls is not None and anchor is not None:
            self._calls.anchors.append(anchor)
        return worker.read_answer(answer, self._names[rank])


class _State(Enum):
    """What has become of a message: not answered yet, answered with results or a failure, or lost with its worker."""

    OPEN, DONE, FAILED, LOST = range(4)


def _state(future: Future[Answer]) -> _State:
    if not future.done():
        return _State.OPEN
    try:
        (numbers, *_) = future.value()
    except RuntimeError:
        return _State.LOST
    return _State.FAILED if numbers is None else _State.DONE


def _labelled_values(order: Order) -> Iterator[tuple[str, Any]]:
    """The values of an order, each with its name for an error message."""
    hint = "; workers find a function by its module and name, so define it with def at the top of a module"
    yield f"func={order.func!r}{hint}", order.func
    for item in order.items:
        for argument, value in [*enumerate(item.args), *item.kwargs.items()]:
            yield f"argument {argument!r} of item {item.number}", value
    for value in order.shared:
        yield "an argument sent whole", value


def _release(slot: Slots, _: Future[Answer]) -> None:
    slot.release()


def _split_up(
    partitioner: Partitioner | None, args: Args, kwargs: KwArgs
) -> tuple[dict[int, list[Item]], list[Item], list[Whole]]:
    """Each worker's items, by rank; the items for free workers; and the values that the latter share."""
    if isinstance(partitioner, int | str):
        return {get_worker_id(partitioner): [Item(0, args, kwargs)]}, [], []
    items: defaultdict[int, list[Item]] = defaultdict(list)
    free: list[Item] = []
    for number, (name, part_args, part_kwargs) in enumerate(parts_of(partitioner, args, kwargs)):
        item = Item(number, part_args or (), part_kwargs or {})
        (free if name is None else items[get_worker_id(name)]).append(item)
    leaves = (leaf for item in free for leaf in pytree.tree_leaves((item.args, item.kwargs)))
    return items, free, list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Whole)}.values())


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


def remote_sync_call(
    func: Callable[..., T],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
) -> Any:
    """Calls `func` on the workers and waits. In the meantime the caller computes its own part.

    The first failure is raised at once, also if other workers still compute.

    Every worker, also the caller, computes on copies of the arguments. Under `autograd.context()` parameters and
    modules keep their graph, and so do the results. Without a context, results come back without a graph.

    Args:
        func: a function that the workers can import.
        args, kwargs: its arguments.
        partitioner: a worker's rank or name; or a function that is called with the arguments and returns
            parts `(worker, args or None, kwargs or None)`, with the worker None for the first free worker;
            None: `batch_partitioner`.
        reducer: from the list of results, in the order of the parts, to the value returned; None: the list.
        timeout: seconds that a worker may take for its part, from when that is sent; None: the session's. A part is
            sent when fewer than `session.MAX_WINDOW` others are under way to the worker. Waiting for that does not
            count, unless none of them ends for this long.

    Raises:
        ConnectionError: a worker does not answer; the message names it.
        TimeoutError: a worker did not answer in time.
        RecursionError: the call is nested deeper than `session.MAX_DEPTH`.
        TypeError, ValueError: an argument cannot be sent, or a worker does not exist.
        Exception: the exception of `func`, of the same type if it can be rebuilt.
    """
    call = _Call(func, args, kwargs, partitioner, timeout, compute_own_part=True)
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
    """As `remote_sync_call`, but returns a future of the value when the messages are sent.

    It waits before that only if `session.MAX_WINDOW` calls to the same worker are under way already.
    """
    call = _Call(func, args, kwargs, partitioner, timeout, compute_own_part=False)
    value: Future[Any] = Future()
    call.note_unread(value)

    def finish() -> None:
        try:
            results = call.results()
            value.set_result(results if reducer is None else reducer(results))
        except Exception as error:
            value.set_exception(error)
        call.note_read(value)

    call.when_ended(finish)
    return value
