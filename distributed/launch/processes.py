"""The processes of ranks: they end with their launcher; and their limits of files and memory."""

import ctypes
import logging
import multiprocessing
import os
import resource
import signal
import sys
from pathlib import Path

# Environment variable of a rank that `launch` has started: the number of the agent's process, with which it ends.
LAUNCHER = "DISTRIBUTED_LAUNCHER_PID"
# Signals that announce the end of a job. Slurm and others send them to every process of it.
PREEMPTIONS = (signal.SIGUSR1, signal.SIGUSR2)
# All that ask a run to end. They are blocked around a fork: Python ignores what a handler raises in its hooks there.
STOPS = (signal.SIGTERM, signal.SIGINT, *PREEMPTIONS)
FOLLOWS = os.EX_TEMPFAIL  # exit code of a rank that ends because rank zero does: that one reports the cause
STOPPED = (130, 143)  # exit codes of a rank zero that has saved and stopped, for SIGINT and for SIGTERM
# Exit codes after which nothing is started again: bad config, numbers that are not finite, a disk that has failed.
FINAL = (2, 3, os.EX_IOERR, *STOPPED)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_ARENA_MAX = -8  # malloc.h of glibc
_SOCKETS_A_WORKER = 7
_OTHERS = 256  # files that have nothing to do with the number of workers: libraries, data, logs

log = logging.getLogger(__name__)


def die_with(parent: int) -> None:
    """Called in a new process: asks the kernel (Linux) to kill it when its parent dies, for any reason."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def can_fork(workers: int) -> bool:
    """Whether this process may be forked into the ranks: it has one thread, as far as the kernel tells, since a fork
    has no copy of others and waits for ever for what they hold; and /dev/shm has room for the locks of the queues that
    torch's agent shares with its forks."""
    try:
        threads = len(list(Path("/proc/self/task").iterdir()))
        _ = [multiprocessing.get_context("fork").SimpleQueue() for _ in range(workers + 1)]
    except OSError:
        return False
    return threads == 1


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


def share_arena() -> None:
    """Makes all threads take memory from one arena of glibc, except threads that run already. If MALLOC_ARENA_MAX is
    set, that stays in force."""
    # An arena keeps the most memory that it ever held, and any of about a hundred RPC threads computes a message. The
    # peaks of all would add up: with 32 tasks, two processes grew beyond 11 GB.
    if sys.platform.startswith("linux") and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
