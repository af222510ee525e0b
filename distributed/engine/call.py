"""The caller's side of a remote call: sends each worker its order, and collects their answers.

One message goes to each worker, and the worker runs its items one after the other. So a call takes one thread of each
worker, and no number of items can block a worker. How calls can be nested: see `session`.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch.distributed import rpc
from torch.futures import Future

from distributed.engine import contexts, exchange, worker
from distributed.engine.answers import Answer, Failure, Outcome, carries, raise_failure, read_answer
from distributed.engine.errors import worker_error
from distributed.engine.info import check_timeout
from distributed.engine.leaving import cancel
from distributed.engine.message import Packed, pack, send
from distributed.engine.session import MAX_DEPTH, Session, current
from distributed.engine.slots import Slots
from distributed.engine.traffic import note_received, note_sent
from distributed.engine.worker import Item, Order
from distributed.partition import Whole

_numbers = itertools.count()


class Dealt(NamedTuple):
    """A call split up: each worker's items, by rank; the items for free workers; and the values that these share."""

    items: dict[int, list[Item]]
    free: list[Item]
    shared: list[Whole]


class Call:
    """A remote call, sent when it is made; `results` waits.

    `compute_own_part`: whether `results` computes the caller's own items; else they are sent as to any other worker.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        dealt: Dealt,
        timeout: float | None,
        *,
        compute_own_part: bool,
    ) -> None:
        session = current()
        self._names = session.workers
        self.timeout = session.timeout if timeout is None else timeout
        check_timeout(self.timeout)
        self._depth = worker.depth() + 1
        if self._depth > MAX_DEPTH:
            raise RecursionError(f"this remote call would be nested {self._depth} deep; at most {MAX_DEPTH} are served")
        self._ctx = contexts.current_context()
        self._calls = None if self._ctx is None else contexts.calls_of(self._ctx)
        self._me = session.rank
        self._number = next(_numbers)
        items, free, shared = dealt
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
        self._queue = exchange.open_queue([self._pack_item(item, shared) for item in free]) if free else None
        self._source = None if self._queue is None else exchange.QueueAddress(session.name, self._queue)
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
        packed = functools.partial(pack, graphs=self._ctx is not None, carries=functools.partial(carries, name))
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
                exchange.close_queue(self._queue)
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
            raise_failure(min(failures, key=lambda failure: -1 if failure.number is None else failure.number))
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
            exchange.close_queue(self._queue)
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
            exchange.close_queue(self._queue)
        if self._calls is not None and anchor is not None:
            self._calls.anchors.append(anchor)
        return read_answer(answer, self._names[rank])


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
