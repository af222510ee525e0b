"""The futures that remote calls give, and how a worker answers with futures of its own."""

import contextvars
import copy
import operator
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.futures import Future

from distributed.calls.message import without_graphs
from distributed.calls.orders import Answer, Head, Outcome, carries, failure, pack_outcome
from distributed.calls.shutdown import CallEnded
from distributed.errors import as_exception

T = TypeVar("T")
S = TypeVar("S")

_POLL_SECONDS = 0.1

_AnyFuture = torch._C.Future
"""The class of all futures. A future from torch's own `then` is no `torch.futures.Future`."""


class ResultFuture(Future[T]):
    """A future whose `then` keeps an exception of the callback as it is; torch's makes a RuntimeError of it.

    Remote calls that the callback makes count as nested in the call whose function has attached it.
    """

    def set_exception(self, result: T) -> None:
        """As torch's, but each reader gets a copy of the exception."""
        # The kept one must not collect the readers' frames. They hold the future, and Python cannot see that the future
        # holds the exception, so none of them would ever be freed.
        assert isinstance(result, Exception)
        kept = result.with_traceback(None)

        def raise_copy(_: Any) -> None:
            raise _copy(kept)

        self._set_unwrap_func(raise_copy)
        self.set_result(kept)

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        chained: ResultFuture[S] = ResultFuture()
        context = contextvars.copy_context()

        def run(_: Future[T]) -> None:
            try:
                chained.set_result(context.run(callback, self))
            except BaseException as error:  # an exit must not leave who waits waiting
                chained.set_exception(as_exception(error))  # type: ignore[arg-type]  # the hint is torch's

        self.add_done_callback(run)
        return chained


def _copy(error: Exception) -> Exception:
    """A copy with attributes, notes and cause; the exception itself if its class makes something else of it."""
    try:
        copied = copy.copy(error)
    except Exception:  # a class may raise anything
        return error
    if len(copied.args) != len(error.args) or not all(map(operator.is_, copied.args, error.args)):
        return error
    copied.__cause__, copied.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copied


def settled(result: Any, stop: Callable[[], bool]) -> Any:
    """Waits for a future in this thread, until `stop` returns true; gives its value, and any other result as it is.

    Raises:
        CallEnded: `stop` has returned true.
        Exception: that of the future.
    """
    if not isinstance(result, _AnyFuture):
        return result
    done = threading.Event()  # torch's own wait has no time limit, and the call may be cancelled
    result.add_done_callback(lambda _: done.set())
    while not done.wait(_POLL_SECONDS):
        if stop():
            raise CallEnded
    return result.value()


class OpenOrder:
    """An order whose items' futures are open. The answer comes when all are done, or the first has failed.

    Args:
        head: of the message.
        me: this worker's name.
        deliver: with streams: sends an item's result to the caller.

    Attributes:
        answer: the future of the message's answer.
        items: how many the order has; set before the first is added.
    """

    def __init__(self, head: Head, me: str, deliver: Callable[[int, Any, Head, str], Future[bool]]) -> None:
        self.answer: Future[Answer] = Future()
        self.items = 0
        self._head = head
        self._me = me
        self._deliver = deliver
        self._results: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._is_answered = False

    def add(self, number: int, result: Any) -> None:
        """Notes what the function has returned for an item: a future, or the value itself."""
        if isinstance(result, _AnyFuture):
            result.add_done_callback(partial(self._note, number))
        else:
            self._keep(number, result)

    def _note(self, number: int, done: Future[Any]) -> None:
        try:
            self._keep(number, done.value())
        except BaseException as error:  # torch passes over what a callback raises
            self.fail(error, number)

    def _keep(self, number: int, result: Any) -> None:
        if not self._head.streams:
            self._count(number, without_graphs(result))
            return
        delivered = self._deliver(number, result, self._head, self._me)
        delivered.add_done_callback(lambda _: self._count(number, None))

    def _count(self, number: int, result: Any) -> None:
        with self._lock:
            self._results[number] = result
            is_complete = len(self._results) == self.items
        if is_complete:
            self._end({} if self._head.streams else dict(sorted(self._results.items())))

    def fail(self, error: BaseException, number: int | None) -> None:
        self._end(failure(error, self._me, number))

    def _end(self, outcome: Outcome) -> None:
        """Answers, unless that is done."""
        with self._lock:
            if self._is_answered:
                return
            self._is_answered = True
        sendable = partial(carries, self._head.caller, any_device=True)
        numbers, packed = pack_outcome(outcome, self._me, None, sendable)
        self.answer.set_result((numbers, packed.payload, packed.carried, None))
