"""The controller of a sweep: keeps every slot busy, gives the study each result, and never waits for a batch; the watch
that prunes trials by the metrics that they write; and what a person sees while they run."""

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TextIO

import optuna

from hydra_async_sweeper.settings import SweeperSettings
from hydra_async_sweeper.slots import PausedError, TrialExit, TrialSlots, fault_at, line_of
from hydra_async_sweeper.study import Search, Study
from hydra_async_sweeper.trials import (
    COMPLETED,
    DISK,
    FAILED,
    PRUNED,
    RETRY,
    STOPPED,
    FinishedTrial,
    FinishedTrials,
    StartedTrial,
    TrialResult,
    best_trials,
    result_of,
)

STOP_FILE = "stop"
"""A run that finds this file in its folder saves, and stops as pruned. Remove it, and the same command resumes."""

LOOK_SECONDS = 0.25
"""How long the controller waits for a trial to end before it looks at the others' metrics."""

log = logging.getLogger("hydra_async_sweeper")


class PruningWatch:
    """Looks at the trials under way.

    Args:
        study: gets the values that the trials report.
        pruner: decides.
        folder_of: from a trial's number to its folder.
        metric: a field of the validation lines in metrics.jsonl, such as `accuracy`.
        progress: is told each new value: number, step, value.
    """

    def __init__(
        self,
        study: Study,
        pruner: optuna.pruners.BasePruner | None,
        folder_of: Callable[[int], Path],
        metric: str,
        progress: Callable[[int, int, float], None],
    ) -> None:
        self._study, self._pruner, self._folder_of = study, pruner, folder_of
        self._metric, self._progress = metric, progress
        self._read: dict[int, tuple[int, int]] = {}  # a trial's file, by its inode, and how far it was read

    def start(self, number: int) -> None:
        """A trial is about to start: it must not find the request to stop of an earlier controller."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._folder_of(number) / STOP_FILE).unlink()
        self._read[number] = (0, 0)

    def look(self, running: Collection[int]) -> None:
        """Gives the study what is new, and stops the trials that the pruner would stop."""
        for number in running:
            folder = self._folder_of(number)
            for step, value in self._new_values(number, folder):
                self._progress(number, step, value)
                if self._pruner is not None and self._study.prunes(number, step, value, self._pruner):
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
    """Runs the trials of a study.

    Args:
        study: which trials there are.
        slots: where they run.
        settings: of the sweep.
        overrides_of: from a trial to its overrides.
        search: chooses the parameters.
        watch: prunes trials by their metrics; None: no pruning.
        view: what a person sees.
        record: writes tables; called after every trial.
        again: what to type to resume the sweep.
    """

    def __init__(
        self,
        study: Study,
        slots: TrialSlots,
        settings: SweeperSettings,
        *,
        overrides_of: Callable[[StartedTrial], list[str]],
        search: Search,
        watch: PruningWatch | None,
        view: "SweepView",
        record: Callable[[], None],
        again: str = "the same command",
    ) -> None:
        self._study, self._slots, self._settings, self._search = study, slots, settings, search
        self._overrides_of, self._watch, self._view, self._record = overrides_of, watch, view, record
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
                self._run()
            except (OSError, PausedError):
                # The journal may end in half a line now, so nothing more is told: the trials under way save, and go on
                # with the next controller.
                self._stop = self._stop or signal.SIGTERM
                self._slots.signal(signal.SIGTERM)
                while self._slots.running:
                    self._slots.wait(LOOK_SECONDS)
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

    # Starting

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
        """Whether a trial with the same values is under way."""
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

    # Ending

    def _end(self, ended: TrialExit) -> None:
        trial, slot = self._running.pop(ended.number)
        self._free.appendleft(slot)
        result = result_of(
            ended, self._settings.objective, len(self._study.directions), searching=self._settings.sampler != "grid",
            stopping=bool(self._stop),
        )  # fmt: skip
        if result.outcome == STOPPED:
            return  # it stays under way in the journal, and the next controller resumes it
        if result.outcome in (DISK, RETRY, FAILED):
            self._blame_disk(trial.number, result)
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

    def _blame_disk(self, number: int, result: TrialResult) -> None:
        """Raises PausedError if a disk has ended a trial. Like one that was stopped, it stays under way."""
        if result.outcome == DISK and result.failure:
            raise PausedError(f"trial {number}: {result.failure}")
        for folder in (self._slots.folder, self._study.path.parent):
            fault = fault_at(folder)
            if fault is not None:
                raise PausedError(line_of(fault, folder))
        if result.outcome == DISK:
            raise PausedError(f"trial {number}: its disk failed, and is writable again; the same command goes on")

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
                log.warning("stopping: the trials under way save; %s resumes the sweep", self._again)
                self._slots.signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# What a person sees


class _ShownTrial(NamedTuple):
    started: float
    step: str = ""
    value: str = ""


_LATEST = 6
"""Ended trials that stay in the table."""


class SweepView:
    """Shows a running sweep: a live table on a terminal, log lines elsewhere. Call `refresh` about twice a second.

    Args:
        total: how many trials the sweep is to have.
        slots: how many run at a time.
        done: the trials that ended in earlier sessions.
        stream: where the table goes; stderr by default.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        total: int,
        slots: int,
        done: FinishedTrials,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._slots, self._clock = total, slots, clock
        self._objectives, self._directions, self._lanes = done.objectives, done.directions, done.lanes
        self._ended, self._best = list(done.trials), done.best()
        self._elapsed = [trial.seconds for trial in done.trials if trial.seconds is not None]
        self._running: dict[int, _ShownTrial] = {}
        stream = sys.stderr if stream is None else stream
        self._stream = stream if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") else None
        self._live: Any = None
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def start(self, trial: StartedTrial) -> None:
        """A trial starts."""
        self._running[trial.number] = _ShownTrial(self._clock())
        if self._stream is None:
            settings = " ".join(f"{k}={number_text(v) if isinstance(v, float) else v}" for k, v in trial.params.items())
            origin = "" if trial.parent is None else f" from trial {trial.parent}"
            log.info("trial %d: starts%s with %s", trial.number, origin, settings or "the defaults")

    def progress(self, number: int, step: int, value: float) -> None:
        """A running trial has an intermediate value."""
        if number in self._running:
            self._running[number] = self._running[number]._replace(step=str(step), value=number_text(value))

    def end(self, trial: FinishedTrial) -> None:
        """A trial has ended, perhaps without a start: its values may be those of another trial."""
        running = self._running.pop(trial.number, None)
        # A trial that resumed may have waited for days between its two runs.
        elapsed = self._clock() - running.started if running else trial.seconds
        if elapsed is not None:
            self._elapsed.append(elapsed)
        shown = trial if trial.seconds is not None else trial._replace(seconds=elapsed)
        self._ended.append(shown)
        self._best = best_trials([*self._best, shown], self._directions, self._lanes)
        if self._stream is None:
            values = zip(self._objectives, shown.values or (), strict=False)
            seconds = [] if shown.seconds is None else [_time(shown.seconds)]
            parts = [_state(shown), *(f"{name} {number_text(value)}" for name, value in values), *seconds]
            log.info("trial %d: %s; %s", trial.number, ", ".join(parts), "; ".join(self._summary()))

    def refresh(self) -> None:
        """Draws the table again."""
        if self._stream is None:
            return
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
            self._live.console.show_cursor(True)  # a killed sweep must not leave a terminal without one
            # rich writes above the table what goes to sys.stderr, but handlers hold the stream that was there before
            handlers = [*logging.getLogger().handlers, *log.handlers]
            streaming = [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
            shown = [h for h in streaming if h.stream in (sys.__stdout__, sys.__stderr__) and h.stream.isatty()]
            self._moved = [(handler, handler.setStream(sys.stderr)) for handler in shown]
        self._live.update(self._table(self._live.console.size.height), refresh=True)

    def close(self) -> None:
        """Leaves the last table on the terminal."""
        if self._live is not None:
            self.refresh()
            for handler, stream in self._moved:
                if stream is not None:  # None: it was this one already
                    handler.setStream(stream)
            self._live.stop()
            self._live = self._stream = None

    def _summary(self) -> list[str]:
        """The best value, how many trials have ended, and the estimated time left, where there are any."""
        best = []
        if len(self._objectives) > 1:
            best = [f"Pareto front of {count_text(len(self._best), 'trial')}"] if self._best else []
        elif self._best and self._best[0].values:
            best = [f"best {number_text(self._best[0].values[0])} (trial {self._best[0].number})"]
        now, left = self._clock(), ""
        waiting = self._total - len(self._ended) - len(self._running)
        if self._elapsed and (self._running or waiting > 0):
            mean = sum(self._elapsed) / len(self._elapsed)
            rests = [max(0.0, mean - now + trial.started) for trial in self._running.values()]
            work = [*rests, *[mean] * waiting]  # shared by the slots; the longest piece by none
            left = f", about {_time(max(sum(work) / self._slots, *work))} left"
        return [*best, f"{len(self._ended)} of {self._total} done{left}"]

    def _table(self, height: int) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        busy = f"{len(self._running)} of {count_text(self._slots, 'slot')} busy"
        table = Table(header_style="bold")
        table.add_column("trial", justify="right")
        table.add_column("state", max_width=40, overflow="ellipsis", no_wrap=True)
        table.add_column("step", justify="right")
        table.add_column(Text(" / ".join(self._objectives)), justify="right", max_width=30)
        table.add_column("")
        for name in (*self._lanes.place_of(0), "elapsed"):
            table.add_column(name, justify="right")

        def add(number: int, state: Text, step: str, value: str, mark: str, elapsed: float | None) -> None:
            lane = map(str, self._lanes.place_of(number).values())
            took = "" if elapsed is None else _time(elapsed)
            table.add_row(str(number), state, step, value, Text(mark, "bold green"), *lane, took)

        latest = self._ended[-_LATEST:]
        room = max(1, height - 7 - len(latest))  # header, head of the table, borders, and the line for those left out
        running = sorted(self._running.items())
        now = self._clock()
        for number, trial in running[:room]:
            add(number, Text("running", "cyan"), trial.step, trial.value, "", now - trial.started)
        if running:
            table.add_section()
        best = {trial.number for trial in self._best}
        for ended in reversed(latest):
            colour = {COMPLETED: "green", PRUNED: "yellow"}.get(ended.outcome, "red")
            values = " / ".join(map(number_text, ended.values or ()))
            mark = "best" if ended.number in best else ""
            add(ended.number, Text(_state(ended), colour), "", values, mark, ended.seconds)
        hidden = [Text(f"and {len(running) - room} more that run", "dim")] if len(running) > room else []
        return Group(Text(" · ".join([*self._summary(), busy]), "bold"), table, *hidden)


def number_text(value: float) -> str:
    return f"{value:.4g}"


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _state(trial: FinishedTrial) -> str:
    notes = [f"same as trial {trial.same_as}"] if trial.same_as is not None else []
    notes += [" ".join(trial.failure.split())] if trial.failure else []
    return f"{trial.outcome} ({'; '.join(notes)})" if notes else trial.outcome


def _time(seconds: float) -> str:
    """Exact enough to compare trials."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
