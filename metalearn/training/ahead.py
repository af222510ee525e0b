"""Tasks of the next steps, drawn while the device computes: by a thread, or by processes."""

import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from metalearn.runs.signals import PREEMPTIONS, end_with_parent

AHEAD = 16
"""Steps whose tasks a thread draws ahead."""

MOST_PROCESSES = 16
"""Processes that draw with `trainer.draw_ahead=auto`."""

SECONDS = 600.0
"""How long a process may take for the tasks of a step."""

Made = Callable[[int], list[Tensor]]
"""The tasks of a step by its number, in tensors on the host."""

log = logging.getLogger("metalearn")


class Drawing(Protocol):
    """Draws the tasks of steps that are taken in order. `of(step)` gives those of a step; after `stop` no others are
    drawn."""

    def of(self, step: int) -> list[Tensor]: ...

    def stop(self) -> None: ...


def processes_for(wanted: int | str, *, pure: bool) -> int:
    """How many processes draw: as many as are wanted; with `auto` one for each core beside that of the run if the tasks
    are `pure`, functions of their numbers alone, else none."""
    if isinstance(wanted, int):
        return wanted
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1) if pure else 0


class InTurn:
    """Tasks are drawn when they are asked for: a user's source may bear no thread."""

    def __init__(self, made: Made) -> None:
        self.of = made

    def stop(self) -> None:
        pass


class ByThread:
    """A thread draws the tasks of the steps from `first` to `last`."""

    def __init__(self, made: Made, first: int, last: int) -> None:
        self._ready: queue.Queue[tuple[int, list[Tensor] | Exception]] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        arguments = (made, range(first, last + 1), self._ready, self._stopped)
        threading.Thread(target=_draw, args=arguments, name="tasks ahead", daemon=True).start()

    def of(self, step: int) -> list[Tensor]:
        number, tasks = self._ready.get()
        if isinstance(tasks, Exception):
            raise tasks
        assert number == step, "steps are taken in order"
        return tasks

    def stop(self) -> None:
        self._stopped.set()


def _draw(
    made: Made, steps: range, ready: "queue.Queue[tuple[int, list[Tensor] | Exception]]", stopped: threading.Event
) -> None:
    def put(drawn: tuple[int, list[Tensor] | Exception]) -> None:
        waiting = True
        while waiting and not stopped.is_set():
            with suppress(queue.Full):
                ready.put(drawn, timeout=0.2)
                waiting = False

    step = steps.start
    try:
        for step in steps:
            if stopped.is_set():
                break
            put((step, made(step)))
        else:
            raise RuntimeError(f"there are no steps after {steps.stop - 1}")
    except Exception as error:
        put((step, error))


_made: Made | None = None
"""In a process that draws: how."""


class _NotDrawnError(Exception):
    """Why no process draws tasks."""


class ByProcesses:
    """Forks of this process draw the tasks of the steps from `first` to `last`.

    Where a fork fails in a task, this process draws it again, and so has the error. Without the forks, which may be
    killed, and where they draw something else, this process draws all, with a line in the log.
    """

    def __init__(self, made: Made, first: int, last: int, processes: int) -> None:
        self._here, self._last, self._next = made, last, first
        self._most, self._compared = 2 * processes, False
        self._waiting: deque[Future[Any]] = deque()
        # Forks, since a source of the user's own may not be of use elsewhere. They only draw.
        self._pool: ProcessPoolExecutor | None = ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), _begin, (made, os.getpid())
        )

    def of(self, step: int) -> list[Tensor]:
        if self._pool is None:
            return self._here(step)
        try:
            return self._from_a_fork(step)
        except (BrokenExecutor, TimeoutError, _NotDrawnError) as error:
            log.warning("no processes draw tasks ahead, so the run draws them: %s", str(error) or type(error).__name__)
            self.stop()
        except Exception as error:  # of the source: it is met again here
            log.debug("a process that draws ahead failed in step %d: %s", step, error)
        return self._here(step)

    def _from_a_fork(self, step: int) -> list[Tensor]:
        assert self._pool is not None
        while self._next <= self._last and len(self._waiting) < self._most:
            try:
                self._waiting.append(self._pool.submit(_drawn, self._next))
            except OSError as error:  # there may be no more processes
                raise _NotDrawnError(error) from error
            self._next += 1
        assert self._next - len(self._waiting) == step, "steps are taken in order"
        tasks = [torch.from_numpy(value) for value in self._waiting.popleft().result(SECONDS)]
        if not self._compared:
            if [value.numpy().tobytes() for value in tasks] != [value.numpy().tobytes() for value in self._here(step)]:
                raise _NotDrawnError(f"another process draws other tasks for step {step}")
            self._compared = True
        return tasks

    def stop(self) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()  # one that hangs would hold up the end of the run, which waits for its pools
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


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
