"""The caller's side of a remote call: sends each worker its order, and collects their answers.

One message goes to each worker, and the worker runs its items one after the other. So a call takes one thread of each
worker, and no number of items can block a worker. How calls can be nested: see `session`.
"""

import threading
from collections.abc import Callable, Iterator
from enum import Enum
from queue import SimpleQueue
from typing import Any

from torch.futures import Future

from distributed.calls import autograd_contexts, worker
from distributed.calls.message import Packed, send
from distributed.calls.orders import Answer, Failure, Head, Item, Outcome, pack_order, raise_failure, read_answer
from distributed.calls.session import MAX_DEPTH, MAX_WINDOW, current
from distributed.errors import worker_error
from distributed.info import check_timeout
from distributed.traffic import note_received, note_sent


class Call:
    """A remote call, sent when it is made; `results` waits for its results.

    Args:
        func: what the workers compute.
        items: the call's items, by the rank of their worker.
        timeout: seconds; None: the session's limit.
        compute_own_part: whether `results` computes the caller's own items; else they are sent as to any other worker.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        items: dict[int, list[Item]],
        timeout: float | None,
        *,
        compute_own_part: bool = False,
    ) -> None:
        self._session = session = current()
        self._names, self._me = session.workers, session.rank
        self.timeout = session.timeout if timeout is None else timeout
        check_timeout(self.timeout)
        self._depth = worker.depth() + 1
        if self._depth > MAX_DEPTH:
            raise RecursionError(f"this remote call would be nested {self._depth} deep; at most {MAX_DEPTH} are served")
        self._ctx = autograd_contexts.current_context()
        self._calls = None if self._ctx is None else autograd_contexts.calls_of(self._ctx)
        self._head = Head(self._depth, session.name, self._ctx, self.timeout)
        self._expected = sum(map(len, items.values()))
        # All are packed before the first is sent: an error then leaves no worker at work.
        packed = {
            rank: pack_order(func, own_items, self._names[rank], graphs=self._ctx is not None)
            for rank, own_items in items.items()
        }
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

    def note_unread(self, value: Future[Any]) -> None:
        """Until `note_read`, a backward pass must wait for this value."""
        if self._calls is not None:
            self._calls.unread.add(value)

    def note_read(self, value: Future[Any]) -> None:
        if self._calls is not None:
            self._calls.unread.discard(value)

    def _send(self, rank: int, order: Packed) -> None:
        slots = self._session.slots[rank, self._depth]
        # The call's time limit begins when it is sent. To wait here for other calls does not use it up.
        if not slots.acquire(timeout=self.timeout):
            raise TimeoutError(
                f"{self._names[rank]} is busy: none of the calls under way to it, at most {MAX_WINDOW}, has ended for "
                f"{self.timeout:g} s, so this one was not sent"
            )
        try:
            future = send(self._session.infos[rank], worker.serve, (tuple(self._head),), order, self.timeout)
        except BaseException as error:
            slots.release()
            if isinstance(error, RuntimeError):
                raise worker_error(self._names[rank], error, self.timeout) from error
            raise
        self._under_way[rank] = future
        note_sent(order.size())

        def note_answer(answered: Future[Answer]) -> None:
            """Runs when the worker has answered, or is lost."""
            slots.release()
            self._has_failed = self._has_failed or _state(answered) in (_State.FAILED, _State.LOST)
            self._arrived.put(rank)

        future.add_done_callback(note_answer)

    def when_ended(self, action: Callable[[], None]) -> None:
        """Calls `action` once, as soon as `results` need not wait, or a worker is lost."""
        futures = list(self._under_way.values())
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

    def _outcomes(self) -> Iterator[Outcome]:
        """The outcomes of the workers in the order in which they come; the caller's own is the first."""
        if self._own is not None:
            yield self._read(worker.compute_here(self._own, self._head, stop=lambda: self._has_failed), self._me)
        while self._under_way:
            rank = self._arrived.get()
            future = self._under_way.pop(rank)
            try:
                answer = future.wait()
            except Exception as error:  # of the worker's `serve`, torch raises whatever it was
                cause = worker_error(self._names[rank], error, self.timeout)
                if self._ctx is not None:
                    autograd_contexts.spoil(self._ctx, str(cause))
                raise cause from error
            note_received(Packed(answer[1], answer[2]).size(), rank)
            yield self._read(answer, rank)

    def _abandon(self) -> None:
        """Notes that answers which are under way will not be read."""
        if self._ctx is not None and self._under_way:
            names = " and ".join(self._names[rank] for rank in self._under_way)
            autograd_contexts.spoil(self._ctx, f"a call to {names} was given up before its answer came")

    def _read(self, answer: Answer, rank: int) -> Outcome:
        anchor = answer[3]
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
