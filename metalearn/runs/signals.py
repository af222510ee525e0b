"""Requests to stop: SIGTERM and SIGINT; and SIGUSR1 and SIGUSR2, by which Slurm says that the time is nearly over."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import NamedTuple

INTERRUPTED, TERMINATED = 130, 143
STOPPED = (INTERRUPTED, TERMINATED)
"""Exit codes of a run that was stopped by SIGINT, or by SIGTERM or what counts as SIGTERM, after saving."""

SAME_REQUEST_SECONDS = 2.0
"""A terminal signals the whole process group, and a launcher passes signals on: within this time it is one request."""

PREEMPTIONS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that announce that the job will be ended. They count as SIGTERM."""

_EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED} | dict.fromkeys(PREEMPTIONS, TERMINATED)

log = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """The work was cut short by a request to stop. A remote call lets a KeyboardInterrupt of its caller through."""


class Stops(NamedTuple):
    """How a run is stopped. `requested` is asked after every step. What is computed inside `interruptible()` changes no
    state, and may raise Interrupted at any moment."""

    requested: Callable[[], bool]
    interruptible: Callable[[], AbstractContextManager[None]]


NEVER = Stops(lambda: False, nullcontext)
"""For ranks that rank zero stops."""


class StopSignal:
    """Notes the first request, so that the run can save before it stops; a second one ends the process.

    If the first one announces the job's end, a handler that was there before gets it when the run has saved: submitit's
    queues the job again.
    """

    def __init__(self) -> None:
        self.requested = False
        self.exit_code = 0
        self._first: signal.Signals | None = None
        self._may_raise = False
        self._before = {number: signal.signal(number, self._note) for number in _EXIT_CODES if not _is_ignored(number)}
        received, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._waker_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_leave_at_the_second, args=(received,), daemon=True).start()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside this, the first request raises Interrupted; if there was one before, it is raised at once."""
        self._may_raise = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._may_raise = False

    def restore(self) -> None:
        """Puts back the handlers that were there before, and passes on what announces the job's end."""
        signal.set_wakeup_fd(self._waker_before)
        self._waker.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._first in PREEMPTIONS and callable(earlier := self._before[self._first]):
            earlier(self._first, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = True
        self._first = signal.Signals(number)
        self.exit_code = _EXIT_CODES[self._first]
        log.info("%s: saving, then stopping; a second signal stops at once", self._first.name)
        if self._may_raise:
            raise Interrupted


def _is_ignored(number: signal.Signals) -> bool:
    """Whether the launcher of this rank deals with a signal."""
    return number in PREEMPTIONS and signal.getsignal(number) == signal.SIG_IGN


def _leave_at_the_second(received: socket.socket) -> None:
    """Ends the process at the second request. A thread, since the main thread may wait outside of Python."""
    with received:
        since = code = None
        while number := received.recv(1):
            if since is None or code is None:
                since, code = time.monotonic(), _EXIT_CODES.get(signal.Signals(number[0]))
            elif time.monotonic() - since > SAME_REQUEST_SECONDS:
                os._exit(code)
