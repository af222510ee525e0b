"""How far a run is: bars on a terminal, one output in a notebook that is drawn again, and the time that is left."""

import importlib
import io
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from metalearn.reporting.loggers import Values, Window

CONSOLE = Console(stderr=True)

LINE_SECONDS = 30.0  # seconds between the lines of a validation or test, where no bars are drawn
_NOTEBOOK_SECONDS = 0.25  # the least time between two drawings in a notebook, which go over its network
_NOTEBOOK_WIDTH = 110  # characters

log = logging.getLogger("metalearn")

Done = Callable[[int], None]  # gets the number of tasks whenever some of a validation or test are done


def unnoticed(tasks: int) -> None:
    """Ignores progress."""


class RunProgress:
    """Shows how far a run is, on a terminal or in a notebook. Elsewhere a long validation or test logs lines."""

    def __init__(self, window: Window) -> None:
        self.bars = _bars()  # what draws it, or None
        self._window, self._done = window, window.done
        self._smooth: Values = {}
        self._task_seconds: float | None = None
        self._ids: dict[str, TaskID] = {}

    def step(self, step: int, values: Values) -> None:
        """A step is done, with these figures."""
        for name, value in values.items():
            self._smooth[name] = 0.9 * self._smooth.get(name, value) + 0.1 * value
        self._done = step
        if self.bars is not None:
            parts = [f"{name} {self._smooth[name]:.3f}" for name in ("loss", "accuracy") if name in self._smooth]
            speed = f"{self._window.meta_batch_size / self._smooth['step_seconds']:.1f} {self._window.unit}/s"
            self._show(self.bars, "step", step, self._window.steps, "  ".join([*parts, speed, self.time_left()]))

    def evaluating(self, split: str, tasks: int) -> Done:
        """A validation or test of `tasks` begins."""
        began = logged = time.perf_counter()
        done = 0

        def add(more: int) -> None:
            nonlocal done, logged
            done, now = done + more, time.perf_counter()
            if done:
                self._task_seconds = (now - began) / done
            left = self.time_left(split, done)
            if self.bars is not None:
                self._show(self.bars, split, done, tasks, left)
                if done >= tasks:
                    self.bars.remove_task(self._ids.pop(split))
            elif done < tasks and now - logged >= LINE_SECONDS:
                logged = now
                log.info("%s: %d of %d tasks  %s", split, done, tasks, left)

        add(0)
        return add

    def _show(self, bars: Progress, what: str, done: int, total: int, text: str) -> None:
        if what not in self._ids:
            self._ids[what] = bars.add_task(what, text=text)
        bars.update(self._ids[what], completed=done, total=total, text=text)

    def time_left(self, split: str = "", done: int = 0) -> str:
        """For all steps, validations and the test that are to come, the tasks `done` of a `split` left out; empty if
        nothing is measured yet."""
        window, step, seconds = self._window, self._done, self._smooth.get("step_seconds", 0.0)
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
        """Shows a line where the bars are shown."""
        if self.bars is not None:
            self.bars.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def on_terminal() -> bool:
    """Whether stderr is a terminal that draws lines again.

    FORCE_COLOR makes no terminal of a file. The commands of a notebook's cells (`!metalearn …`) are on a terminal whose
    control characters all stay in the notebook.
    """
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # it is None, or closed
        return False
    return is_terminal and CONSOLE.is_terminal and not CONSOLE.is_dumb_terminal and "JPY_PARENT_PID" not in os.environ


def _bars() -> Progress | None:
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}")
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    if on_terminal():
        bars = Progress(*columns, console=CONSOLE)
    elif getattr(shell, "kernel", None) is not None:  # only the shell of a kernel has one
        bars = _InNotebook(*columns)
    else:
        return None
    bars.start()
    return bars


class _InNotebook(Progress):
    """One output, of which a saved notebook keeps the last state, with the last line noted. Rich's own way into
    notebooks, as that of tqdm, needs ipywidgets, and a saved notebook shows none of them."""

    def __init__(self, *columns: Any) -> None:
        self._drawn = -math.inf
        super().__init__(*columns, console=Console(file=io.StringIO(), force_jupyter=False, width=1000))

    def start(self) -> None:
        display: Any = importlib.import_module("IPython.display").display
        self._output = display({"text/plain": ""}, raw=True, display_id=True)

    def update(self, *arguments: Any, **fields: Any) -> None:
        super().update(*arguments, **fields)
        self.refresh()

    def refresh(self) -> None:
        if time.monotonic() - self._drawn >= _NOTEBOOK_SECONDS:
            self._draw()

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        notes = self.console.file.getvalue().splitlines()[-1:]  # type: ignore[attr-defined]
        page = Console(file=io.StringIO(), force_jupyter=False, record=True, width=_NOTEBOOK_WIDTH)
        page.print(*notes, self.get_renderable(), sep="\n", highlight=False, markup=False)
        code = '<pre style="line-height: 1.2">{code}</pre>'
        html = page.export_html(inline_styles=True, clear=False, code_format=code)
        self._output.update({"text/plain": page.export_text().rstrip(), "text/html": html}, raw=True)
