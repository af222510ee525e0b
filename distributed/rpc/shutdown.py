"""Ends torch's RPC in this process, also when a call that it serves never returns.

torch waits for every call that is being served, without a limit. Here a call is waited for until its caller's time
limit, or until its caller has cancelled it. Then an exception is raised in it. If that does not end it either, as in
`time.sleep(1e9)`, the process goes on without waiting, and ends when the program ends. So it does where no call is
left, and torch's own threads do not end: torch wakes one of them without its lock, so that the thread may miss it.
"""

import contextlib
import ctypes
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 5.0
"""How long the workers may take to leave together, and an interrupted call to end."""

_POLL_SECONDS = 0.1


class CallEnded(BaseException):
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
        """Whether nobody waits for the call any more."""
        return time.monotonic() >= self.deadline


_served: dict[int, Served] = {}
"""By thread: the calls that are computed."""

_open: dict[int, tuple[Served, Callable[[], None]]] = {}
"""The calls that wait for futures without a thread, each with what ends it."""

_lock = threading.Lock()
_stuck = False


@contextlib.contextmanager
def served(caller: str, number: int, timeout: float) -> Iterator[Served]:
    """Notes that this thread computes a call of `caller`, which waits `timeout` seconds for it."""
    thread = threading.get_ident()
    call = _served[thread] = Served(caller, number, time.monotonic() + timeout)
    try:
        yield call
    finally:
        with _lock:
            _served.pop(thread, None)


def keep_open(call: Served, answer: Future[Any], end: Callable[[], None]) -> None:
    """Notes a call that waits for futures without a thread. `end` is called when nobody waits for its answer."""

    def forget(_: Future[Any]) -> None:
        _open.pop(id(call), None)

    _open[id(call)] = call, end
    answer.add_done_callback(forget)
    end_open_calls()


def end_open_calls() -> None:
    """Ends the open calls that nobody waits for."""
    for call, end in list(_open.values()):
        if call.is_over():
            end()


def cancel(caller: str, number: int) -> None:
    """Runs on a worker: nobody waits for this call any more."""
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
    ending = threading.Thread(target=_shut_torch_down, args=(graceful,), daemon=True)
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
        if overdue - interrupted:
            _interrupt(overdue - interrupted)
            interrupted |= overdue
            give_up = now + GOODBYE_SECONDS
        if graceful and not calls and _all_have_left(ending):
            give_up = min(give_up, now + GOODBYE_SECONDS)
        if now > give_up and len(overdue) == len(calls):
            break
    _stuck = True
    for thread, call in calls.items():
        log.warning("a call of %s is still running and cannot be ended:\n%s", call.caller, _place(thread))
    _end_without_waiting()


def _shut_torch_down(graceful: bool) -> None:
    try:
        rpc.shutdown(graceful=graceful, timeout=GOODBYE_SECONDS)
    except RuntimeError as error:  # a worker died at the very end; torch has dropped the agent nevertheless
        log.debug("shutdown: %s", error)


def _all_have_left(ending: threading.Thread) -> bool:
    """Whether the thread that ends torch's RPC has left together with the other workers, and waits for torch alone."""
    last = sys._current_frames().get(ending.ident or 0)
    frames = traceback.walk_stack(last) if last is not None else ()
    return any(frame.f_code.co_name == "_finalize_shutdown" for frame, _ in frames)


def _interrupt(threads: set[int]) -> None:
    """Raises `CallEnded` in these threads as soon as they run Python code."""
    for thread in threads:
        with _lock:
            if thread in _served:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(CallEnded))


def _place(thread: int) -> str:
    """The line of code at which a thread is."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else traceback.format_stack(frame)[-1].rstrip()


def _end_without_waiting() -> None:
    """When the program ends, the process ends with its exit code, before torch waits for its threads again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # Linux
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
