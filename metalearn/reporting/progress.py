"""How far a run is: bars on a terminal, one output in a notebook that is drawn again, and the time that is left."""

import html
import importlib
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

from metalearn.reporting.loggers.protocol import Values, Window

CONSOLE = Console(stderr=True)

LINE_SECONDS = 30.0
"""Where there are no bars, a validation or test logs a line so often."""

_NOTEBOOK_SECONDS = 0.25
"""The least time between two drawings in a notebook, which go over its network."""

log = logging.getLogger("metalearn")

Done = Callable[[int], None]
"""Gets the number of tasks whenever some of a validation or test are done."""


def unnoticed(tasks: int) -> None:
    """Nobody counts what is done."""


class Row(NamedTuple):
    """What is under way: `done` of a `total`, and what else there is to say of it."""

    what: str
    done: int
    total: int
    text: str


class View(Protocol):
    """Draws rows in place of those that it has drawn before."""

    def show(self, rows: Sequence[Row]) -> None: ...

    def note(self, text: str) -> None:
        """Writes a line above them."""

    def close(self) -> None: ...


class RunProgress:
    """Shows how far a run is, where somebody looks. Elsewhere a long validation or test logs lines.

    Attributes:
        view: what draws it, or None.
    """

    def __init__(self, window: Window) -> None:
        self.view = _view()
        self._window = window
        self._steps = Row("step", window.done, window.steps, "")
        self._smooth: Values = {}
        self._task_seconds: float | None = None

    def step(self, step: int, values: Values) -> None:
        """A step is done, with these figures."""
        for name, value in values.items():
            self._smooth[name] = 0.9 * self._smooth.get(name, value) + 0.1 * value
        self._steps = self._steps._replace(done=step)
        if self.view is not None:
            parts = [f"{name} {self._smooth[name]:.3f}" for name in ("loss", "accuracy") if name in self._smooth]
            speed = f"{self._window.meta_batch_size / self._smooth['step_seconds']:.1f} {self._window.unit}/s"
            self._steps = self._steps._replace(text="  ".join([*parts, speed]))
            self.view.show([self._steps._replace(text=f"{self._steps.text}  {self.time_left()}")])

    def evaluating(self, split: str, tasks: int) -> Done:
        """A validation or test of so many tasks begins."""
        began = logged = time.perf_counter()
        done = 0

        def add(more: int) -> None:
            nonlocal done, logged
            done, now = done + more, time.perf_counter()
            if done:
                self._task_seconds = (now - began) / done
            left = self.time_left(split, done)
            if self.view is not None:
                steps = [self._steps] if self._window.steps else []
                self.view.show([*steps, *([Row(split, done, tasks, left)] if done < tasks else [])])
            elif done < tasks and now - logged >= LINE_SECONDS:
                logged = now
                log.info("%s: %d of %d tasks  %s", split, done, tasks, left)

        add(0)
        return add

    def time_left(self, split: str = "", done: int = 0) -> str:
        """For all steps, validations and the test that are to come, the tasks `done` of a `split` left out; empty if
        nothing is measured yet."""
        window, step, seconds = self._window, self._steps.done, self._smooth.get("step_seconds", 0.0)
        # Until the first validation is measured, a task of it counts as one of a step.
        each = seconds / window.meta_batch_size if self._task_seconds is None else self._task_seconds
        validations = math.ceil(window.steps / window.val_every) - max(step - 1, 0) // window.val_every
        tasks = window.test_tasks - done + (0 if split == "test" else validations * window.val_tasks)
        if not each or (step < window.steps and not seconds):
            return ""
        remaining = max((window.steps - step) * seconds + tasks * each, 0.0)
        short = remaining < 24 * 3600
        return f"{time.strftime('%H:%M:%S', time.gmtime(remaining)) if short else f'{remaining / 86400:.1f} days'} left"

    def note(self, text: str) -> None:
        """Shows a line where the rows are shown."""
        if self.view is not None:
            self.view.note(text)

    def close(self) -> None:
        if self.view is not None:
            self.view.close()


def on_terminal() -> bool:
    """Whether stderr is a terminal that draws lines again.

    FORCE_COLOR makes no terminal of a file. The commands of a notebook's cells (`!metalearn …`) are on a terminal whose
    control characters all stay in the notebook.
    """
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
    return is_terminal and CONSOLE.is_terminal and not CONSOLE.is_dumb_terminal and "JPY_PARENT_PID" not in os.environ


def _view() -> View | None:
    if on_terminal():
        return _OnTerminal()
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    # Only the shell of a kernel has one.
    return None if getattr(shell, "kernel", None) is None else _InNotebook()


class _OnTerminal:
    """A bar for each row."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._bars = RichProgress(*columns, console=CONSOLE)
        self._ids: dict[str, TaskID] = {}
        self._bars.start()

    def show(self, rows: Sequence[Row]) -> None:
        for what, done, total, text in rows:
            if what not in self._ids:
                self._ids[what] = self._bars.add_task(what, text=text)
            self._bars.update(self._ids[what], completed=done, total=total, text=text)
        for what in self._ids.keys() - {row.what for row in rows}:
            self._bars.remove_task(self._ids.pop(what))

    def note(self, text: str) -> None:
        CONSOLE.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bars.stop()


class _InNotebook:
    """One output, which needs no widgets. A saved notebook keeps its last state, with the last line noted."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._output = display({"text/plain": ""}, raw=True, display_id=True)
        self._rows: Sequence[Row] = []
        self._drawn, self._note = -math.inf, ""

    def show(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        if time.monotonic() - self._drawn >= _NOTEBOOK_SECONDS:
            self._draw()

    def note(self, text: str) -> None:
        self._note = text

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        lines = [f"{what} {done}/{total}  {text}" for what, done, total, text in self._rows]
        bars = [f'<progress value="{row.done}" max="{row.total}"></progress>' for row in self._rows]
        drawn = [f"<div>{bar} {html.escape(line)}</div>" for bar, line in zip(bars, lines, strict=True)]
        note = [self._note] if self._note else []
        text, page = (
            "\n".join([*note, *lines]),
            "".join([*(f"<div>{html.escape(line)}</div>" for line in note), *drawn]),
        )
        self._output.update({"text/plain": text, "text/html": page}, raw=True)
