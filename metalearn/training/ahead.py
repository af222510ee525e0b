"""Tasks of the next steps, drawn while the device computes: by a thread, or by processes."""

import logging
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from metalearn.runs.signals import PREEMPTIONS, end_with_parent

AHEAD = 16
"""Steps whose tasks a thread draws ahead; two for each process."""

MOST_PROCESSES = 16
"""Processes that draw with `trainer.draw_ahead=auto`."""

Made = Callable[[int], list[Tensor]]
"""The tasks of a step by its number, in tensors on the host."""

log = logging.getLogger("metalearn")


def processes_for(wanted: int | str, *, pure: bool) -> int:
    """How many processes draw: as many as are wanted; with `auto` one for each core beside that of the run if the tasks
    are `pure`, functions of their numbers alone, else none."""
    if isinstance(wanted, int):
        return wanted
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1) if pure else 0


class Ahead:
    """Draws the tasks of the steps from `first` to `last`, which are asked for in order.

    With `processes`, forks of this process draw; if they are killed, this process draws, with a line in the log. With a
    `thread`, one thread does. Else tasks are drawn when they are asked for: a user's source may bear no thread.
    """

    def __init__(self, made: Made, first: int, last: int, *, processes: int = 0, thread: bool = False) -> None:
        self._made, self._next, self._last = made, first, last
        self._waiting: deque[Future[Any]] = deque()
        self._pool: Executor | None = None
        if processes:
            # Forks, since a source of the user's own may not be of use elsewhere. They only draw.
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(processes, context, _begin, (made, os.getpid()))
        elif thread:
            self._pool = ThreadPoolExecutor(1, "tasks ahead")
        self._most = 2 * processes or AHEAD

    def of(self, step: int) -> list[Tensor]:
        """The tasks of a step."""
        forks = isinstance(self._pool, ProcessPoolExecutor)
        try:
            while self._pool and self._next <= self._last and len(self._waiting) < self._most:
                draw = _drawn if forks else self._made
                try:
                    self._waiting.append(self._pool.submit(draw, self._next))
                except OSError as error:  # there may be no more processes
                    raise BrokenExecutor(str(error)) from error
                self._next += 1
            if self._pool and self._waiting:
                assert self._next - len(self._waiting) == step, "steps are taken in order"
                tasks = self._waiting.popleft().result()
                return [torch.from_numpy(value) for value in tasks] if forks else tasks
        except BrokenExecutor as error:  # they were killed, or could not be started
            if not forks:
                raise
            log.warning("no processes draw tasks ahead, so the run draws them: %s", str(error) or type(error).__name__)
            self.stop()
        except Exception:
            if not forks:
                raise
            # Of the source: it is met again here. Not every error can be sent.
        return self._made(step)

    def stop(self) -> None:
        """No others are drawn."""
        pool, self._pool = self._pool, None
        if isinstance(pool, ProcessPoolExecutor):
            for process in list((pool._processes or {}).values()):
                process.kill()  # one that hangs would hold up the end of the run, which waits for its pools
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


_made: Made | None = None
"""In a process that draws: how."""


def _begin(made: Made, starter: int) -> None:
    """The first that a fork does. The run saves on these signals; a fork ends with the run."""
    global _made
    end_with_parent()
    if os.getppid() != starter:  # it died before the line above
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, *PREEMPTIONS):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    _made = made


def _drawn(step: int) -> list[Any]:
    assert _made is not None
    return [value.numpy() for value in _made(step)]
