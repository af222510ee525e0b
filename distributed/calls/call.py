"""The caller's side of a remote call: sends each worker its order, and collects their answers.

One message goes to each worker, and the worker runs its items one after the other. So a call takes one thread of each
worker, and no number of items can block a worker. How calls can be nested: see `session`.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from torch.futures import Future

from distributed.calls import autograd_contexts, worker
from distributed.calls.message import Packed, note_received, note_sent, pack, send, unpack
from distributed.calls.session import MAX_DEPTH, MAX_WINDOW, current
from distributed.calls.worker import Answer, Failure, Head, Item, Outcome, Plain, carries, failure
from distributed.errors import describe, message_of, worker_error
from distributed.info import check_timeout

_FIRST = 2**62  # a number above those that torch gives to nodes, and below those of its accumulators


class Call:
    """A remote call, sent when it is made; `results` waits for its results.

    Args:
        func: what the workers compute.
        items: the call's items, by the rank of their worker.
        timeout: seconds; None: the session's limit.
        compute_own_part: whether `results` computes the caller's own items; else they are sent as to any other worker.
    """

    def __init__(
        self, func: Callable[..., Any], items: dict[int, list[Item]], timeout: float | None, *,
        compute_own_part: bool = False,
    ) -> None:  # fmt: skip
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
        numbers, payload, carried, anchor = answer
        if self._calls is not None and anchor is not None:
            self._calls.anchors.append(anchor)
        if rank != self._me:
            # The backward pass begins with the tensors that came in one message. torch takes the node with the highest
            # number first, and gives received tensors low ones. This worker would compute its own part before it sends
            # others their gradients; now both sides compute at the same time.
            tensors = (value for value in [*carried, anchor] if isinstance(value, Tensor))
            node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
            if node is not None:
                node._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
        try:
            values = unpack(Packed(payload, carried))
        except Exception as error:  # a class does not exist here, or may raise anything
            refused = TypeError(f"a result from {self._names[rank]} cannot be rebuilt: {describe(error)}")
            refused.__cause__ = error
            return failure(refused, self._session.name, None)
        if numbers is None:
            assert isinstance(values, Failure)
            return values
        return {numbers[0]: values} if len(numbers) == 1 else dict(zip(numbers, values, strict=True))


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


def pack_order(func: Callable[..., Any], items: Sequence[Item], to: str, *, graphs: bool) -> Packed:
    """A function and one worker's items as a message to worker `to`. `graphs`: see `pack`. Raises TypeError, ValueError
    if a value cannot be sent; the message names it."""
    packed = functools.partial(pack, graphs=graphs, carries=functools.partial(carries, to))
    try:
        return packed((func, [tuple(item) for item in items]))
    except (TypeError, ValueError):  # only now is each value packed alone, to name the one that fails
        hint = "workers find a function by its module and name, so define it with def at the top of a module"
        labelled = [(f"func={func!r}; {hint}", func)]
        for item in items:
            for argument, value in [*enumerate(item.args), *item.kwargs.items()]:
                labelled.append((f"argument {argument!r} of item {item.number}", value))
        for what, value in labelled:
            try:
                packed(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{what}: cannot be sent to {to}: {error}") from error
        raise


def raise_failure(failed: Failure) -> None:
    """Raises the worker's exception, of the same type if that can be rebuilt, with a note on its origin."""
    error: Any = None
    if failed.error is not None:
        try:
            error = unpack(failed.error)
            if isinstance(error, Plain):
                error = error.kind(*error.args)
            if isinstance(error, Exception) and message_of(error) != failed.message:  # its class made a text of a text
                error.args = (failed.message,)
        except Exception:  # its class may not exist here, take other arguments than it keeps, or raise anything
            error = None
    if not isinstance(error, Exception) or isinstance(error, StopIteration):  # which would only end the caller's loop
        error = RuntimeError(f"{failed.type_name}: {failed.message}")
    item = "the call" if failed.number is None else f"item {failed.number}"
    error.add_note(f"raised on {failed.worker} by {item} of the call:\n{failed.traceback}")
    raise error
