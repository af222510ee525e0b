"""Requests to stop: SIGTERM and SIGINT; and SIGUSR1 and SIGUSR2, which Slurm sends when the time is nearly over."""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import NamedTuple

INTERRUPTED, TERMINATED = 130, 143
STOPPED = (INTERRUPTED, TERMINATED)
"""Exit codes of a run that has saved and stopped: for SIGINT, and for SIGTERM or a preemption."""

SAME_REQUEST_SECONDS = 2.0
"""Signals within this time are one request: a terminal signals the whole process group, and a launcher passes it on."""

PREEMPTIONS = (signal.SIGUSR1, signal.SIGUSR2)  # signals that announce the end of the job. They count as SIGTERM.


def end_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when its parent dies, for any reason. If that has died before, the
    process has another parent now."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_EXIT_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED} | dict.fromkeys(PREEMPTIONS, TERMINATED)

log = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """The work was cut short by a request to stop. It is a KeyboardInterrupt, since a remote call lets that of its
    caller through."""


class Stops(NamedTuple):
    """Requests to stop a run. The loop asks `requested` after every step. Code inside `interruptible()` changes no
    state, and may raise Interrupted at any moment."""

    requested: Callable[[], bool]
    interruptible: Callable[[], AbstractContextManager[None]]


NEVER = Stops(lambda: False, nullcontext)  # the stops of a rank that rank zero stops


class StopSignal:
    """Notes the first request, so that the run can save before it stops; a second one ends the process.

    If the first one announces the job's end, a handler that was there before gets it when the run has saved.
    """

    def __init__(self) -> None:
        self.requested = False
        self.exit_code = 0
        self._first: signal.Signals | None = None
        self._may_raise = False
        # A launcher that deals with preemptions itself has its ranks ignore them.
        ignored = [number for number in PREEMPTIONS if signal.getsignal(number) == signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in _EXIT_CODES if number not in ignored}
        # Python runs a handler in the main thread alone, which may wait inside torch. It writes to this socket at once.
        received, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._waker_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_leave_at_the_second, args=(received,), daemon=True).start()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside this, the first request raises Interrupted; if there was one before, it is raised at once."""
        self._may_raise = True
        try:
            # The request came between two steps. A validation of many tasks would keep it waiting for minutes.
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
        # submitit's handler queues the job again.
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


def _leave_at_the_second(received: socket.socket) -> None:
    """Runs in a thread: ends the process at the second request."""
    with received:
        since = code = None
        while number := received.recv(1):
            if since is None or code is None:
                since, code = time.monotonic(), _EXIT_CODES.get(signal.Signals(number[0]))
            elif time.monotonic() - since > SAME_REQUEST_SECONDS:
                os._exit(code)
