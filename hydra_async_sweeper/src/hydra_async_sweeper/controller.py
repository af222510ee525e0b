"""The controller of a sweep: keeps every slot busy, gives the study each result, and never waits for a batch; the watch
that prunes trials by the metrics that they write; and what a person sees while they run."""

import contextlib
import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import optuna

from hydra_async_sweeper.settings import SweeperSettings
from hydra_async_sweeper.slots import TrialExit, TrialSlots
from hydra_async_sweeper.study import Search, Study
from hydra_async_sweeper.trials import (
    DISK,
    FAILED,
    RETRY,
    STOPPED,
    FinishedTrial,
    FinishedTrials,
    PausedError,
    StartedTrial,
    TrialResult,
    result_of,
)

STOP_FILE = "stop"
"""A run that finds this file in its folder saves, and stops as pruned. Remove it, and the same command resumes."""
LOOK_SECONDS = 0.25  # how long the controller waits for a trial to end before it looks at the others' metrics

log = logging.getLogger("hydra_async_sweeper")


class PruningWatch:
    """Looks at the trials under way: the study gets the values that they report, a `metric` of the validation lines in
    metrics.jsonl, and the pruner decides which of them to stop."""

    def __init__(
        self, study: Study, pruner: optuna.pruners.BasePruner, folder_of: Callable[[int], Path], metric: str
    ) -> None:
        self._study, self._pruner, self._folder_of, self._metric = study, pruner, folder_of, metric
        self._read: dict[int, tuple[int, int]] = {}  # a trial's file, by its inode, and how far it was read

    def start(self, number: int) -> None:
        """A trial is about to start: it must not find the request to stop of an earlier controller."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a file may stand in the folder's place
            (self._folder_of(number) / STOP_FILE).unlink()
        self._read[number] = (0, 0)

    def look(self, running: Collection[int]) -> None:
        """Gives the study what is new, and stops the trials that the pruner would stop."""
        for number in running:
            folder = self._folder_of(number)
            for step, value in self._new_values(number, folder):
                if self._study.prunes(number, step, value, self._pruner):
                    (folder / STOP_FILE).touch()

    def _new_values(self, number: int, folder: Path) -> list[tuple[int, float]]:
        """The validations that have been written whole since the last look; all, where a resumed trial has put another
        file in its place."""
        inode, at = self._read[number]
        try:
            with (folder / "metrics.jsonl").open("rb") as file:
                status = os.fstat(file.fileno())
                at = at if status.st_ino == inode and status.st_size >= at else 0
                file.seek(at)
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read[number] = (status.st_ino, at + len(whole))
        values = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # another line, which may be of another program
                row: dict[str, Any] = json.loads(line)
                if row["split"] == "val":
                    values.append((int(row["step"]), float(row[self._metric])))
        return values


class SweepController:
    """Runs the trials of a study in slots, with the parameters that `search` chooses and the overrides that
    `overrides_of` makes of them. `watch` prunes them by their metrics, `record` writes tables after each, and `again`
    is what to type to resume the sweep."""

    def __init__(
        self, study: Study, slots: TrialSlots, settings: SweeperSettings, *,
        overrides_of: Callable[[StartedTrial], list[str]], search: Search, watch: PruningWatch | None,
        record: Callable[[], None], again: str = "the same command",
    ) -> None:  # fmt: skip
        self._study, self._slots, self._settings, self._search = study, slots, settings, search
        self._overrides_of, self._watch, self._record = overrides_of, watch, record
        self._view = SweepView(study.count(), settings.n_jobs, study.ended(settings))
        self._free, self._again = deque(range(settings.n_jobs)), again
        self._running: dict[int, tuple[StartedTrial, int]] = {}
        self._ready: deque[StartedTrial] = deque()
        self._twins: list[StartedTrial] = []
        self._stop = 0
        self.returned: dict[int, Any] = {}

    def run(self) -> int:
        """Runs all trials that have not ended; returns the number of the signal that stopped the sweep, or 0."""
        with self._signals():
            try:
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
            except (OSError, PausedError):
                # The journal may end in half a line now, so nothing more is told: the trials under way save, and go on
                # with the next controller.
                self._stop = self._stop or signal.SIGTERM
                self._slots.signal(signal.SIGTERM)
                while self._slots.running:
                    self._slots.wait(LOOK_SECONDS)
                raise
        return self._stop

    def _fill(self) -> None:
        """Starts trials while a slot is free. Values of equal parameters are copied, and not computed again, but for a
        population, whose trials start from checkpoints."""
        repeats = self._settings.population is not None
        while self._free and not self._stop:
            trial = self._next()
            if trial is None or self._stop:  # the signal may come while parameters are drawn
                return
            same = [t for t in self._study.finished() if t.params == trial.params and t.outcome != FAILED]
            if same and not repeats:
                self._study.tell(trial.number, TrialResult(same[0].outcome, same[0].values), same_as=same[0].number)
                self._told(trial.number)
            elif self._is_running(trial) and not repeats:
                self._twins.append(trial)
            else:
                self._start(trial)

    def _next(self) -> StartedTrial | None:
        twin = next((trial for trial in self._twins if not self._is_running(trial)), None)
        if twin is not None:
            self._twins.remove(twin)
            return twin
        if self._ready:
            return self._ready.popleft()
        return next(filter(None, map(self._begin, self._study.waiting())), None)

    def _begin(self, number: int) -> StartedTrial | None:
        """Gives a trial its parameters; None if they are not known yet."""
        choice = self._search(number)
        return None if choice is None else self._study.begin(number, *choice)

    def _is_running(self, trial: StartedTrial) -> bool:
        return any(other.params == trial.params for other, _ in self._running.values())

    def _start(self, trial: StartedTrial) -> None:
        overrides, slot = self._overrides_of(trial), self._free[0]
        self._slots.start(trial.number, overrides, slot)
        self._running[trial.number] = trial, self._free.popleft()
        if self._stop:  # the signal's handler may have missed this trial
            self._slots.signal(signal.SIGTERM, [trial.number])
        if self._watch is not None:
            self._watch.start(trial.number)
        self._view.start(trial)

    def _end(self, ended: TrialExit) -> None:
        trial, slot = self._running.pop(ended.number)
        self._free.appendleft(slot)
        result = result_of(
            ended, self._settings.objective, len(self._study.directions), searching=self._settings.sampler != "grid",
            stopping=bool(self._stop),
        )  # fmt: skip
        if result.outcome == STOPPED:
            return  # it stays under way in the journal, and the next controller resumes it
        if result.outcome == DISK:  # so does this one
            advice = "make room or bring it back, and the same command goes on"
            failure = result.failure or f"{self._slots.log_of(trial.number).parent}: cannot be written"
            raise PausedError(f"trial {trial.number}: {failure}; {advice}")
        if result.outcome == RETRY:
            count = self._study.retry(trial.number)
            if count <= self._settings.max_retries:
                log.warning("trial %d: %s; run %d again", trial.number, result.failure, count)
                self._ready.append(trial)  # before new trials: the study has its parameters already
                return
            result = TrialResult(FAILED, failure=f"{result.failure}, {count} times")
        else:
            self.returned[trial.number] = ended.outcome
        self._study.tell(trial.number, result)
        if result.outcome == FAILED:
            log.warning("trial %d: %s; its output: %s", trial.number, result.failure, self._slots.log_of(trial.number))
        self._told(trial.number)

    def _told(self, number: int) -> None:
        self._view.end(next(trial for trial in self._study.finished() if trial.number == number))
        self._record()

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
                log.warning("stopping: the trials under way save; %s resumes the sweep", self._again)
                self._slots.signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class SweepView:
    """Logs the start and the end of each of `total` trials, with the best value and the estimated time left. `slots` of
    them run at a time; those that are `done` ended in earlier sessions."""

    def __init__(self, total: int, slots: int, done: FinishedTrials) -> None:
        self._total, self._slots, self._done = total, slots, done
        self._elapsed = [trial.seconds for trial in done.trials if trial.seconds is not None]
        self._started: dict[int, float] = {}

    def start(self, trial: StartedTrial) -> None:
        """A trial starts."""
        self._started[trial.number] = time.monotonic()
        settings = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.params.items())
        origin = "" if trial.parent is None else f" from trial {trial.parent}"
        log.info("trial %d: starts%s with %s", trial.number, origin, settings or "the defaults")

    def end(self, trial: FinishedTrial) -> None:
        """A trial has ended, perhaps without a start: its values may be those of another trial."""
        started = self._started.pop(trial.number, None)
        # A trial that resumed may have waited for days between its two runs.
        elapsed = trial.seconds if started is None else time.monotonic() - started
        if elapsed is not None:
            self._elapsed.append(elapsed)
        seconds = elapsed if trial.seconds is None else trial.seconds
        self._done = self._done._replace(trials=[*self._done.trials, trial])
        took = [] if seconds is None else [_time(seconds)]
        notes = [f"same as trial {trial.same_as}"] if trial.same_as is not None else []
        notes += [" ".join(trial.failure.split())] if trial.failure else []
        state = f"{trial.outcome} ({'; '.join(notes)})" if notes else trial.outcome
        values = zip(self._done.objectives, trial.values or (), strict=False)
        parts = [state, *(f"{name} {value:.4g}" for name, value in values), *took]
        log.info("trial %d: %s; %s", trial.number, ", ".join(parts), "; ".join(self._summary()))

    def _summary(self) -> list[str]:
        """The best value, how many trials have ended, and the estimated time left, where there are any."""
        first, best, ended = [], self._done.best(), len(self._done.trials)
        if len(self._done.objectives) > 1:
            first = [f"Pareto front of {len(best)} trial{'s' * (len(best) > 1)}"] if best else []
        elif best and best[0].values:
            first = [f"best {best[0].values[0]:.4g} (trial {best[0].number})"]
        now, left = time.monotonic(), ""
        waiting = self._total - ended - len(self._started)
        if self._elapsed and (self._started or waiting > 0):
            mean = sum(self._elapsed) / len(self._elapsed)
            rests = [max(0.0, mean - now + started) for started in self._started.values()]
            work = [*rests, *[mean] * waiting]  # shared by the slots; the longest piece by none
            left = f", about {_time(max(sum(work) / self._slots, *work))} left"
        return [*first, f"{ended} of {self._total} done{left}"]


def _time(seconds: float) -> str:
    """Exact enough to compare trials."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
