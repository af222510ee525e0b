"""What a person sees of a sweep while it runs."""

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TextIO

from hydra_async_sweeper.trials import COMPLETED, PRUNED, FinishedTrial, FinishedTrials, StartedTrial, best_trials

log = logging.getLogger("hydra_async_sweeper")


class _Running(NamedTuple):
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
        self._running: dict[int, _Running] = {}
        stream = sys.stderr if stream is None else stream
        self._stream = stream if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") else None
        self._live: Any = None
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

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
