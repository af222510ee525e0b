"""Ends torch's RPC in this process, even if a call that it serves never returns.

While a session runs, `worker` notes each call that it computes (`served`), or that waits for futures (`keep_open`), and
callers `cancel` calls. At the end `session.leave` calls `shut_down`, which does this in order:

1. It starts torch's own shutdown in a thread.
2. It raises `CallEnded` in each call that is beyond its caller's time limit, or cancelled.
3. It leaves a call behind that survives this, such as `time.sleep(1e9)`. The process then ends when the program ends.
"""

import contextlib
import ctypes
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from distributed.info import GOODBYE_SECONDS

log = logging.getLogger(__name__)

_MANY_HELD = 8
"""A worker warns at this number of threads held by abandoned calls, and at each doubling."""

_POLL_SECONDS = 0.1


class CallEnded(BaseException):  # no Exception, which the function may catch
    """Raised in a call that runs beyond its time limit while its worker leaves."""


@dataclass
class Served:
    """A remote call that this process serves, by the caller's number for it.

    The deadline is in seconds of `time.monotonic`. A cancelled call is beyond it, and stops after its present item.
    """

    caller: str
    number: int
    deadline: float

    def is_over(self) -> bool:
        """Whether its caller no longer waits."""
        return time.monotonic() >= self.deadline


_served: dict[int, Served] = {}
"""The calls that are computed now, by thread."""

_open: dict[int, tuple[Served, Callable[[], None]]] = {}
"""The calls that wait for futures without a thread, each with a function that ends it."""

_lock = threading.Lock()
_stuck = False
_warns_at = _MANY_HELD


@contextlib.contextmanager
def served(caller: str, number: int, timeout: float) -> Iterator[Served]:
    """Notes that this thread computes a call of `caller`, which waits `timeout` seconds for it."""
    global _warns_at
    held = [thread for thread, call in list(_served.items()) if call.is_over()]
    if len(held) >= _warns_at:
        _warns_at = 2 * len(held)
        log.warning(
            "%d calls run on after their time limits; each holds a thread of this worker until it returns, and when "
            "none is left, no call is answered; the first is at\n%s", len(held), _place(held[0]),
        )  # fmt: skip
    thread = threading.get_ident()
    call = _served[thread] = Served(caller, number, time.monotonic() + timeout)
    try:
        yield call
    finally:
        with _lock:
            _served.pop(thread, None)


def keep_open(call: Served, answer: Future[Any], end: Callable[[], None]) -> None:
    """Notes a call that waits for futures without a thread. `end` is called when its caller no longer waits."""

    def forget(_: Future[Any]) -> None:
        _open.pop(id(call), None)

    _open[id(call)] = call, end
    answer.add_done_callback(forget)
    end_open_calls()  # its caller may have cancelled it while its items were started


def end_open_calls() -> None:
    """Ends the open calls whose callers no longer wait."""
    for call, end in list(_open.values()):
        if call.is_over():
            end()


def cancel(caller: str, number: int) -> None:
    """Runs on a worker: the caller no longer waits for this call."""
    for call in [*list(_served.values()), *(call for call, _ in list(_open.values()))]:
        if (call.caller, call.number) == (caller, number):
            call.deadline = time.monotonic()
    end_open_calls()


def is_stuck() -> bool:
    """Whether a call of an earlier session has never returned, so that torch's RPC has not ended."""
    return _stuck


def shut_down(*, graceful: bool, timeout: float) -> None:
    """Shuts torch's RPC down.

    Args:
        graceful: whether all workers leave together. If not, calls that are being served are ended at once.
        timeout: seconds to wait for calls that torch serves by itself, whose time limits are not known.
    """
    global _stuck
    _open.clear()  # torch does not wait for their futures

    def shut_torch_down() -> None:
        try:
            rpc.shutdown(graceful=graceful, timeout=GOODBYE_SECONDS)
        except RuntimeError as error:  # a worker died at the very end; torch has dropped the agent nevertheless
            log.debug("shutdown: %s", error)

    # A thread, since torch waits without a limit for every call that is served; a thread can be left behind.
    ending = threading.Thread(target=shut_torch_down, daemon=True)
    ending.start()
    give_up = time.monotonic() + timeout
    interrupted: set[int] = set()
    while True:
        ending.join(_POLL_SECONDS)
        if not ending.is_alive():
            return
        now = time.monotonic()
        calls = dict(_served)
        overdue = {thread for thread, call in calls.items() if call.is_over() or not graceful}
        for thread in overdue - interrupted:
            give_up = now + GOODBYE_SECONDS
            with _lock:  # else the call could end here, and the exception hit the thread's next one
                if thread in _served:  # `CallEnded` is raised as soon as the thread runs Python code
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(CallEnded))
        interrupted |= overdue
        # torch wakes one of its own threads without its lock, so the thread may miss it and never end. This process has
        # left together with the others, and waits for torch alone, if the thread is in that function of torch's.
        last = sys._current_frames().get(ending.ident or 0)
        frames = traceback.walk_stack(last) if graceful and not calls and last is not None else ()
        if any(frame.f_code.co_name == "_finalize_shutdown" for frame, _ in frames):
            give_up = min(give_up, now + GOODBYE_SECONDS)
        if now > give_up and len(overdue) == len(calls):
            break
    _stuck = True
    running = Counter((call.caller, _place(thread)) for thread, call in calls.items())
    for (caller, place), count in running.items():
        calls_are = "a call of %s is" if count == 1 else f"{count} calls of %s are"
        log.warning(f"{calls_are} still running and cannot be ended:\n%s", caller, place)
    # When the program ends, the process ends with its exit code, before torch waits for its threads again.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # of glibc; it passes the exit code on, which atexit does not know
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _place(thread: int) -> str:
    """The line of code at which a thread is."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else traceback.format_stack(frame)[-1].rstrip()
