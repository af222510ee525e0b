"""The processes of ranks: programs or forks, which end with their launcher; and their limits of files and memory."""

import atexit
import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

PREEMPTIONS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that announce the end of a job. Slurm and others send them to every process of it."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(launcher: int) -> None:
    """Called in a new rank: asks the kernel (Linux) to kill it when its launcher dies, for any reason."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)


def ignore_preemptions() -> None:
    """Called in a new rank, whose launcher handles these signals."""
    # By default they would end the rank, also while it starts.
    for number in PREEMPTIONS:
        signal.signal(number, signal.SIG_IGN)


class Process(Protocol):
    """A rank's process, as the launcher sees it."""

    def poll(self) -> int | None:
        """The exit code, below 0 for a signal; None while it runs."""
        ...

    def send_signal(self, sig: int) -> None:
        """Does nothing if the process has ended."""
        ...


class Fork:
    """A fork of this process that runs a function, then what that has registered by `atexit`, and ends with its exit
    code.

    This process must not have threads that hold locks, nor have used a GPU.
    """

    def __init__(self, run: Callable[[], int], environment: dict[str, str]) -> None:
        self._code: int | None = None
        # The fork would write buffered output a second time.
        sys.stdout.flush()
        sys.stderr.flush()
        signals = {signal.SIGTERM, signal.SIGINT, *PREEMPTIONS}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the launcher's handlers are not the rank's
        self.pid = os.fork()
        if self.pid == 0:
            self._become_rank(run, environment, signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _become_rank(
        self, run: Callable[[], int], environment: dict[str, str], signals: set[signal.Signals]
    ) -> NoReturn:
        code = 1
        atexit._clear()  # what this process has registered is not the fork's
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            ignore_preemptions()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            os.environ.clear()
            os.environ.update(environment)
            code = run()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            try:  # where output goes may be gone
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        # `poll` may be where a signal has come in between: it has the code of the process, and not noted it yet.
        with contextlib.suppress(ChildProcessError):
            if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                os.kill(self.pid, sig)


# Files and sockets


_SOCKETS_A_WORKER = 7
_OTHERS = 256
"""Files that have nothing to do with the number of workers: libraries, data, logs."""

log = logging.getLogger(__name__)


def allow_sockets(workers: int) -> None:
    """Raises the soft limit of open files as far as this many workers need it, and the hard limit allows it."""
    needed = _SOCKETS_A_WORKER * workers + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning("%d workers need about %d open files, and the limit is %d; see `ulimit -Hn`", workers, needed, hard)


# Memory


_M_ARENA_MAX = -8


def share_arena() -> None:
    """Makes all threads take memory from one arena of glibc, except threads that run already.

    If MALLOC_ARENA_MAX is set, that stays in force. Nothing happens with other C libraries.
    """
    # An arena keeps the most memory that it ever held, and any of about a hundred RPC threads computes a message. The
    # peaks of all would add up: with 32 tasks, two processes grew beyond 11 GB.
    if not sys.platform.startswith("linux") or "MALLOC_ARENA_MAX" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
