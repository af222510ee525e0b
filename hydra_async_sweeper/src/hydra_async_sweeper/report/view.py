"""What a person sees of a sweep while it runs."""

import heapq
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TextIO

from hydra_async_sweeper.ranking import best_trials
from hydra_async_sweeper.terms import COMPLETED, ONE_LANE, PRUNED, FinishedTrial, Lanes, StartedTrial, printable

log = logging.getLogger("hydra_async_sweeper")


class _Running(NamedTuple):
    started: float
    step: int | None = None
    value: float | None = None


_LATEST = 6
"""So many ended trials stay in the table."""


class SweepView:
    """Shows a running sweep: a live table on a terminal, log lines elsewhere. Call `refresh` about twice a second.

    Args:
        total: how many trials the sweep is to have.
        objectives: their names.
        directions: `minimize` or `maximize` for each objective.
        slots: how many trials run at a time.
        done: trials that ended in earlier sessions.
        lanes: the islands, or the members of a population.
        stream: where the table goes; stderr by default.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        total: int,
        objectives: Sequence[str],
        directions: Sequence[str],
        slots: int,
        done: Sequence[FinishedTrial] = (),
        *,
        lanes: Lanes = ONE_LANE,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._slots, self._lanes, self._clock = total, slots, lanes, clock
        self._objectives, self._directions = tuple(objectives), tuple(directions)
        self._ended = list(done)
        self._best = best_trials(self._ended, self._directions, lanes)
        self._elapsed = [trial.seconds for trial in done if trial.seconds is not None]
        self._running: dict[int, _Running] = {}
        stream = sys.stderr if stream is None else stream
        self._stream = stream if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") else None
        self._live: Any = None
        self._undo: Callable[[], None] = lambda: None

    def start(self, trial: StartedTrial) -> None:
        """A trial starts."""
        self._running[trial.number] = _Running(self._clock())
        if self._stream is None:
            settings = " ".join(f"{k}={number_text(v) if isinstance(v, float) else v}" for k, v in trial.params.items())
            origin = "" if trial.parent is None else f" from trial {trial.parent}"
            log.info("trial %d: starts%s with %s", trial.number, origin, settings or "the defaults")

    def progress(self, number: int, step: int, value: float) -> None:
        """A running trial has an intermediate value."""
        if number in self._running:
            self._running[number] = self._running[number]._replace(step=step, value=value)

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
            parts = [f"{_count_done(len(self._ended), self._total)}", *self._left()]
            best = [_best_text(self._best, self._objectives, name=False)] if self._best else []
            log.info("%s; %s", _ended_text(shown, self._objectives), "; ".join([*best, ", ".join(parts)]))

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
            self._undo = _send_logs_to(sys.stderr)
        self._live.update(self._table(self._live.console.size.height), refresh=True)

    def close(self) -> None:
        """Leaves the last table on the terminal."""
        if self._live is not None:
            self.refresh()
            self._undo()
            self._live.stop()
            self._live = None
            self._stream = None

    def _left(self) -> list[str]:
        """The estimated time left, if there is an estimate."""
        now = self._clock()
        running = [now - trial.started for trial in self._running.values()]
        waiting = self._total - len(self._ended) - len(running)
        seconds = seconds_left(self._elapsed, running, waiting, self._slots)
        return [f"about {_rounded(seconds)} left"] if seconds is not None and (running or waiting > 0) else []

    def _table(self, height: int) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header = [
            _count_done(len(self._ended), self._total),
            *([_best_text(self._best, self._objectives, name=True)] if self._best else []),
            f"{len(self._running)} of {count_text(self._slots, 'slot')} busy",
            *self._left(),
        ]
        table = Table(header_style="bold")
        table.add_column("trial", justify="right")
        table.add_column("state", max_width=40, overflow="ellipsis", no_wrap=True)
        table.add_column("step", justify="right")
        table.add_column(Text(" / ".join(self._objectives)), justify="right", max_width=30)
        table.add_column("")
        if self._lanes.by_round:
            table.add_column("round", justify="right")
        if self._lanes.size > 1:
            table.add_column(self._lanes.name, justify="right")
        table.add_column("elapsed", justify="right")

        def add(number: int, state: str, style: str, step: str, value: str, mark: str, elapsed: float | None) -> None:
            lane = list(map(str, self._lanes.place_of(number).values()))
            took = "" if elapsed is None else _took(elapsed)
            table.add_row(str(number), Text(state, style), step, value, Text(mark, "bold green"), *lane, took)

        latest = self._ended[-_LATEST:]
        room = max(1, height - 7 - len(latest))  # header, head of the table, borders, and the line for those left out
        running = sorted(self._running.items())
        now = self._clock()
        for number, trial in running[:room]:
            step = "" if trial.step is None else str(trial.step)
            value = "" if trial.value is None else number_text(trial.value)
            add(number, "running", "cyan", step, value, "", now - trial.started)
        if running:
            table.add_section()
        best = {trial.number for trial in self._best}
        for ended in reversed(latest):
            colour = {COMPLETED: "green", PRUNED: "yellow"}.get(ended.outcome, "red")
            values = " / ".join(map(number_text, ended.values or ()))
            mark = "best" if ended.number in best else ""
            add(ended.number, _state(ended), colour, "", values, mark, ended.seconds)
        hidden = [Text(f"and {len(running) - room} more that run", "dim")] if len(running) > room else []
        return Group(Text(" · ".join(header), "bold"), table, *hidden)


def _send_logs_to(stream: TextIO) -> Callable[[], None]:
    """Sends log lines for the terminal to `stream`, which writes them above a live table; returns what undoes this."""
    handlers = [
        handler
        for handler in (*logging.getLogger().handlers, *log.handlers)
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stdout__, sys.__stderr__)
    ]
    before = [(handler, handler.setStream(stream)) for handler in handlers if handler.stream.isatty()]

    def undo() -> None:
        for handler, own in before:
            if own is not None:
                handler.setStream(own)

    return undo


def seconds_left(elapsed: Sequence[float], running: Sequence[float], waiting: int, slots: int) -> float | None:
    """The estimated time until all trials have ended, if each takes the mean time. None before one has ended.

    Args:
        elapsed: seconds of the trials that have ended.
        running: seconds since each running trial started.
        waiting: how many trials have not started.
        slots: how many run at a time.
    """
    if not elapsed:
        return None
    mean = sum(elapsed) / len(elapsed)
    free = [max(0.0, mean - seconds) for seconds in running]
    free += [0.0] * (slots - len(free))
    heapq.heapify(free)
    for _ in range(waiting):
        heapq.heapreplace(free, free[0] + mean)
    return max(free)


def number_text(value: float) -> str:
    return f"{value:.4g}"


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _count_done(done: int, total: int) -> str:
    return f"{done} of {total} done"


def _best_text(best: Sequence[FinishedTrial], objectives: Sequence[str], *, name: bool) -> str:
    if len(objectives) > 1:
        return f"Pareto front of {count_text(len(best), 'trial')}"
    assert best[0].values is not None
    return f"best{' ' + objectives[0] if name else ''} {number_text(best[0].values[0])} (trial {best[0].number})"


def _ended_text(trial: FinishedTrial, objectives: Sequence[str]) -> str:
    values = [f"{name} {number_text(value)}" for name, value in zip(objectives, trial.values or (), strict=False)]
    took = [] if trial.seconds is None else [_took(trial.seconds)]
    return f"trial {trial.number}: " + ", ".join([_state(trial), *values, *took])


def _state(trial: FinishedTrial) -> str:
    notes = [f"same as trial {trial.same_as}"] if trial.same_as is not None else []
    notes += [" ".join(trial.failure.split())] if trial.failure else []
    return printable(f"{trial.outcome} ({'; '.join(notes)})" if notes else trial.outcome)


def _took(seconds: float) -> str:
    """An elapsed time, exact enough to compare trials."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _rounded(seconds: float) -> str:
    """An estimated time in the largest unit that fits."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
