"""The controller of a sweep: keeps every slot busy, gives the study each result, and never waits for a batch."""

import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

from hydra_async_sweeper.disk import PausedError, fault_at, line_of, room_at
from hydra_async_sweeper.outcome import DISK, RETRY, STOPPED, TrialResult, result_of
from hydra_async_sweeper.pruning import PruningWatch
from hydra_async_sweeper.report import SweepView
from hydra_async_sweeper.samplers import SearchMethod
from hydra_async_sweeper.slots import TrialExit, TrialSlots
from hydra_async_sweeper.study import Study
from hydra_async_sweeper.terms import FAILED, FinishedTrial, StartedTrial, StudyError

LOOK_SECONDS = 0.25
"""How long the controller waits for a trial to end before it looks at the others' metrics."""

_HALTING = (OSError, PausedError, StudyError)
"""Errors at which no trial can be told or started any more, but each can save."""

log = logging.getLogger("hydra_async_sweeper")


class TrialLimits(NamedTuple):
    """How many trials run at once; how often a trial that was killed or crashed is run again; and whether the search
    needs values."""

    n_jobs: int
    max_retries: int
    searching: bool


class SweepController:
    """Runs the trials of a study.

    Args:
        study: which trials there are.
        slots: where they run.
        overrides_of: from a trial to its overrides.
        search: chooses the parameters.
        objective: the fields that are searched for; None: the value that the task returns, or its validation metric.
        limits: see `TrialLimits`.
        watch: prunes trials by their metrics; None: no pruning.
        view: what a person sees.
        record: writes tables; called after every trial.
    """

    def __init__(
        self,
        study: Study,
        slots: TrialSlots,
        *,
        overrides_of: Callable[[StartedTrial], list[str]],
        search: SearchMethod,
        objective: Sequence[str] | None,
        limits: TrialLimits,
        watch: PruningWatch | None,
        view: SweepView,
        record: Callable[[], None],
    ) -> None:
        self._study, self._slots, self._overrides_of, self._search = study, slots, overrides_of, search
        self._objective, self._limits, self._watch, self._view, self._record = objective, limits, watch, view, record
        self._free = deque(range(limits.n_jobs))
        self._running: dict[int, tuple[StartedTrial, int]] = {}
        self._ready: deque[StartedTrial] = deque()
        self._twins: list[StartedTrial] = []
        self._stop = 0
        self.returned: dict[int, Any] = {}

    def run(self) -> int:
        """Runs all trials that have not ended; returns the number of the signal that stopped the sweep, or 0."""
        with self._signals():
            try:
                self._run()
            except _HALTING:
                self._give_up()
                raise
        return self._stop

    def _run(self) -> None:
        self._ready.extend(filter(None, map(self._begin, self._study.interrupted())))
        self._fill()
        while self._running:
            ends = self._slots.wait(LOOK_SECONDS)
            for ended in ends:
                self._end(ended)
            if ends:  # what can start changes with a result only
                self._fill()
            if self._watch is not None:
                self._watch.look(self._running)
            self._view.refresh()

    def _give_up(self) -> None:
        """Stops the trials under way, which save as far as they can; those that have ended are told, likewise."""
        self._stop = self._stop or signal.SIGTERM
        self._slots.signal(signal.SIGTERM)
        while self._slots.running:
            for ended in self._slots.wait(LOOK_SECONDS):
                with contextlib.suppress(*_HALTING):
                    self._end(ended)

    # Starting

    def _fill(self) -> None:
        while self._free and not self._stop:
            trial = self._next()
            if trial is None or self._stop:  # the signal may come while parameters are drawn
                return
            twin = self._twin(trial)
            if twin is not None:
                self._copy(trial, twin)
            elif self._is_running(trial):
                self._twins.append(trial)
            else:
                self._start(trial)

    def _next(self) -> StartedTrial | None:
        for trial in self._twins:
            if not self._is_running(trial):
                self._twins.remove(trial)
                return trial
        if self._ready:
            return self._ready.popleft()
        return next(filter(None, map(self._begin, self._study.waiting())), None)

    def _begin(self, number: int) -> StartedTrial | None:
        """Gives a trial its parameters; None if they are not known yet."""
        choice = self._search.choose(number)
        return None if choice is None else self._study.begin(number, *choice)

    def _twin(self, trial: StartedTrial) -> FinishedTrial | None:
        """A trial that has ended with the same parameters; its values need not be computed again."""
        if self._search.repeats:
            return None
        same = (t for t in self._study.finished() if t.params == trial.params and t.outcome != FAILED)
        return next(same, None)

    def _is_running(self, trial: StartedTrial) -> bool:
        """Whether a trial with the same values is under way."""
        same = any(other.params == trial.params for other, _ in self._running.values())
        return same and not self._search.repeats

    def _copy(self, trial: StartedTrial, twin: FinishedTrial) -> None:
        self._study.tell(trial.number, twin.outcome, twin.values, same_as=twin.number)
        self._told(trial.number)

    def _start(self, trial: StartedTrial) -> None:
        overrides, slot = self._overrides_of(trial), self._free[0]
        self._slots.start(trial.number, overrides, slot)
        self._running[trial.number] = trial, self._free.popleft()
        if self._stop:  # the signal's handler may have missed this trial
            self._slots.signal(signal.SIGTERM, [trial.number])
        if self._watch is not None:
            self._watch.start(trial.number)
        self._view.start(trial)

    # Ending

    def _end(self, ended: TrialExit) -> None:
        trial, slot = self._running.pop(ended.number)
        self._free.appendleft(slot)
        result = result_of(
            ended, self._objective, len(self._study.directions), searching=self._limits.searching,
            stopping=bool(self._stop),
        )  # fmt: skip
        if result.outcome == STOPPED:
            return  # it stays under way in the journal, and the next controller resumes it
        if result.outcome in (DISK, RETRY, FAILED):
            self._blame_disk(trial.number, result)
        if result.outcome == RETRY:
            self._again(trial, result)
            return
        self.returned[trial.number] = ended.outcome
        self._study.tell(trial.number, result.outcome, result.values, failure=result.failure, seconds=result.seconds)
        if result.outcome == FAILED:
            log.warning("trial %d: %s; its output: %s", trial.number, result.failure, self._slots.log_of(trial.number))
        self._told(trial.number)

    def _blame_disk(self, number: int, result: TrialResult) -> None:
        """Raises PausedError if a disk has ended a trial. Like one that was stopped, it stays under way."""
        folders = [self._slots.folder, self._study.path.parent]
        fault = None if result.outcome == DISK and result.failure else fault_at(folders)
        if fault is not None:
            raise PausedError(line_of(fault, folders[0]))
        if result.outcome == DISK:
            reason = result.failure or f"its disk failed, and is writable again ({room_at(folders[0])})"
            raise PausedError(f"trial {number}: {reason}")

    def _again(self, trial: StartedTrial, result: TrialResult) -> None:
        count = self._study.retry(trial.number)
        if count <= self._limits.max_retries:
            log.warning("trial %d: %s; run %d again", trial.number, result.failure, count)
            self._ready.append(trial)
            return
        self._study.tell(trial.number, FAILED, None, failure=f"{result.failure}, {count} times")
        log.warning("trial %d: %s; its output: %s", trial.number, result.failure, self._slots.log_of(trial.number))
        self._told(trial.number)

    def _told(self, number: int) -> None:
        self._view.end(next(trial for trial in self._study.finished() if trial.number == number))
        self._record()

    # Signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM stop the trials, which save; a second one, later, ends them at once."""
        since = 0.0

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal since
            if self._stop and time.monotonic() - since > 2.0:
                os._exit(128 + number)  # the nursery and the trials die with this process
            if not self._stop:
                self._stop, since = number, time.monotonic()
                log.warning("stopping: the trials under way save; the same command resumes the sweep")
                self._slots.signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
