"""The caller's side of a remote call: sends each worker its order, and collects their answers.

One message goes to each worker, and the worker runs its items one after the other. So a call takes one thread of each
worker, and no number of items can block a worker. How calls can be nested: see `session`. The results come in the
worker's answer, or one by one, see `worker`.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch.distributed import rpc
from torch.futures import Future

from distributed.calls import autograd_contexts, worker
from distributed.calls.message import Packed, send
from distributed.calls.orders import (
    Answer,
    Failure,
    Head,
    Item,
    Order,
    Outcome,
    message_anchors,
    pack_item,
    pack_order,
    raise_failure,
    read_answer,
)
from distributed.calls.session import MAX_DEPTH, current
from distributed.calls.shutdown import cancel
from distributed.calls.worker import ItemQueue, ItemResult
from distributed.errors import worker_error
from distributed.functions import is_async
from distributed.info import check_timeout
from distributed.partition import Whole
from distributed.traffic import note_received, note_sent

_numbers = itertools.count()


class Dealt(NamedTuple):
    """A call split up: each worker's items, by rank; the items for free workers; and the values that these share."""

    items: dict[int, list[Item]]
    free: list[Item]
    shared: list[Whole]


@dataclass(eq=False)
class _Message:
    """An order on its way to the worker of this rank."""

    rank: int
    future: Future[Answer]


class Call:
    """A remote call, sent when it is made. Then either `results` waits for all results, or `arrivals` gives each one as
    it comes.

    Args:
        func: what the workers compute.
        dealt: the call's items.
        timeout: seconds; None: the session's limit.
        compute_own_part: whether `results` computes the caller's own items; else, and if `func` returns futures, they
            are sent as to any other worker.
        streams: whether the results come one by one, for `arrivals`.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        dealt: Dealt,
        timeout: float | None,
        *,
        compute_own_part: bool = False,
        streams: bool = False,
    ) -> None:
        self._session = session = current()
        self._names = session.workers
        self.timeout = session.timeout if timeout is None else timeout
        check_timeout(self.timeout)
        self._depth = worker.depth() + 1
        if self._depth > MAX_DEPTH:
            raise RecursionError(f"this remote call would be nested {self._depth} deep; at most {MAX_DEPTH} are served")
        self._ctx = autograd_contexts.current_context()
        self._calls = None if self._ctx is None else autograd_contexts.calls_of(self._ctx)
        self._me = session.rank
        self._number = next(_numbers)
        self._func = func
        self._streams, self._opens = streams, is_async(func)
        items, self._free, shared = dealt
        self._expected = len(self._free) + sum(map(len, items.values()))
        # The takers of the queue's items: the caller, then the others, at most as many as there are items.
        others = (rank for rank in range(len(self._names)) if rank != self._me)
        takers = list(itertools.islice((self._me, *others), len(self._free)))
        orders = {rank: Order(func, own_items, []) for rank, own_items in items.items()}
        orders |= {rank: Order(func, items.get(rank, []), shared) for rank in takers}
        # All are packed before the first is sent: an error then leaves no worker at work.
        packed = {rank: self._pack(order, rank) for rank, order in orders.items()}
        if self._ctx is None:  # which it also is in a thread that a function under a context has started
            tensors = (tensor for order in packed.values() for tensor in order.tensors())
            self._calls = autograd_contexts.of_a_function(tensors)
            if self._calls is not None:
                self._ctx = self._calls.ctx
                packed = {rank: self._pack(order, rank) for rank, order in orders.items()}
        queued = [pack_item(item, shared, graphs=self._ctx is not None) for item in self._free]
        self._queue = ItemQueue(queued) if queued else None
        own_order = packed.pop(self._me, None) if compute_own_part and not self._opens else None
        self._own = None if own_order is None else (own_order, self._head(takes=self._me in takers))
        self._under_way: list[_Message] = []
        self._arrived: SimpleQueue[_Message | ItemResult] = SimpleQueue()
        self._has_failed = False
        if streams:
            worker.receivers[self._number] = self._arrived.put
        try:
            for rank, order in packed.items():
                self._send(rank, order, takes=rank in takers)
        except BaseException:
            self._abandon()
            raise

    def note_unread(self, value: Future[Any]) -> None:
        """Until `note_read`, a backward pass must wait for this value."""
        if self._calls is not None:
            self._calls.unread.add(value)

    def note_read(self, value: Future[Any]) -> None:
        if self._calls is not None:
            self._calls.unread.discard(value)

    def _pack(self, order: Order, rank: int) -> Packed:
        return pack_order(order, self._names[rank], graphs=self._ctx is not None)

    def _head(self, *, takes: bool) -> Head:
        queue = self._queue.number if takes and self._queue is not None else None
        return Head(
            self._depth, self._session.name, self._number, queue, self._ctx, self.timeout, self._streams, self._opens
        )

    def _send(self, rank: int, order: Packed, *, takes: bool) -> None:
        slot, head = self._session.slots[rank, self._depth], self._head(takes=takes)
        # The call's time limit begins when it is sent. To wait here for other calls does not use it up.
        if not slot.acquire(self.timeout):
            raise TimeoutError(
                f"{self._names[rank]} is busy: none of the {slot.size} calls under way to it has ended for "
                f"{self.timeout:g} s, so this one was not sent"
            )
        serve = worker.serve_open if head.opens else worker.serve
        try:
            with autograd_contexts.entered(self._ctx):
                to = self._session.infos[rank]
                future = send(to, serve, (tuple(head),), order, self.timeout, opens=head.opens)
        except BaseException as error:
            slot.release()
            if isinstance(error, RuntimeError):
                raise worker_error(self._names[rank], error, self.timeout) from error
            raise
        message = _Message(rank, future)
        self._under_way.append(message)
        note_sent(order.size())

        def note_answer(answered: Future[Answer]) -> None:
            """Runs when the worker has answered, or is lost. After a failure the other workers get no more items."""
            slot.release()
            if _state(answered) in (_State.FAILED, _State.LOST):
                self._has_failed = True
                self._close_queue()
            self._arrived.put(message)

        future.add_done_callback(note_answer)

    def when_ended(self, action: Callable[[], None]) -> None:
        """Calls `action` once, as soon as `results` need not wait, or a worker is lost."""
        futures = [message.future for message in self._under_way]
        # Several threads of torch's may find at the same time that the call has ended; the first one acts.
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
                # Under a context every answer must come, or the backward pass would wait for it without end.
                if failures and self._arrived.empty() and self._ctx is None:
                    break
        finally:
            self._abandon()
        if failures:
            raise_failure(min(failures, key=lambda failure: -1 if failure.number is None else failure.number))
        assert len(ordered) == self._expected
        return [ordered[number] for number in sorted(ordered)]

    def arrivals(self) -> Iterator[tuple[int, Any]]:
        """The items' numbers and results as they come. Raises the first failure at once."""
        received = 0
        try:
            for outcome in self._outcomes():
                if isinstance(outcome, Failure):
                    raise_failure(outcome)
                else:
                    received += len(outcome)
                    yield from outcome.items()
        finally:
            self._abandon()
        assert received == self._expected

    def _outcomes(self) -> Iterator[Outcome]:
        """The outcomes of the workers in the order in which they come; the caller's own is the first."""
        if self._own is not None:
            answer = worker.compute_here(*self._own, stop=lambda: self._has_failed)
            yield self._read(answer, self._me)
        while self._under_way:
            arrived = self._arrived.get()
            if isinstance(arrived, ItemResult):
                note_received(arrived.packed.size(), self._names.index(arrived.sender))
                if self._calls is not None:
                    self._calls.anchors += message_anchors(arrived.packed.tensors())
                yield read_answer(((arrived.number,), *arrived.packed, None), arrived.sender)
            else:
                self._under_way.remove(arrived)
                yield self._outcome(arrived)

    def _abandon(self) -> None:
        """Ends what is under way: closes the queue and the stream, and cancels the messages."""
        self._close_queue()
        worker.receivers.pop(self._number, None)
        if self._ctx is not None and self._under_way:
            names = " and ".join(self._names[message.rank] for message in self._under_way)
            autograd_contexts.spoil(self._ctx, f"a call to {names} was given up before its answer came")
        for message in self._under_way:
            if not message.future.done():
                with contextlib.suppress(RuntimeError):  # the worker is lost, or leaves
                    to, call = self._names[message.rank], (self._session.name, self._number)
                    rpc.rpc_async(to, cancel, call, timeout=self.timeout)

    def _close_queue(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def _outcome(self, message: _Message) -> Outcome:
        try:
            answer = message.future.wait()
        except Exception as error:  # of the worker's `serve`, torch raises whatever it was
            cause = worker_error(self._names[message.rank], error, self.timeout)
            if self._ctx is not None:
                autograd_contexts.spoil(self._ctx, str(cause))
            raise cause from error
        note_received(Packed(answer[1], answer[2]).size(), message.rank)
        return self._read(answer, message.rank)

    def _read(self, answer: Answer, rank: int) -> Outcome:
        (numbers, _, _, anchor) = answer
        if numbers is None:
            self._close_queue()
        if self._calls is not None and anchor is not None:
            self._calls.anchors.append(anchor)
        return read_answer(answer, self._names[rank])


class _State(Enum):
    """The state of a message: not answered, answered with results, answered with a failure, lost with its worker."""

    OPEN, DONE, FAILED, LOST = range(4)


def _state(future: Future[Answer]) -> _State:
    if not future.done():
        return _State.OPEN
    try:
        (numbers, *_) = future.value()
    except Exception:  # of the worker's `serve`, torch raises whatever it was
        return _State.LOST
    return _State.FAILED if numbers is None else _State.DONE
