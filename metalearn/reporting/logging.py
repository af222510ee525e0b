"""The log of a run: progress on the terminal, train.log, metrics.jsonl, and the loggers that the config chooses.

Progress is bars on a terminal, one output in a notebook that is drawn again, and else lines with the time left.
"""

import importlib
import importlib.util
import io
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from metalearn.config.values import Config
from metalearn.errors import Invalid, PrintableFormatter, ToStderr, one_of, switches, whole_number
from metalearn.reporting.loggers import MODES, Lines, Logger, OpenLogger, Sums, Values, Window, openers_of
from metalearn.reporting.page import Picture
from metalearn.runs.metrics import METRIC_NAMES, describe
from metalearn.storage.files import unwritten, writing

CONSOLE = Console(stderr=True)
LINE_SECONDS = 30.0  # seconds between the lines of a validation or test, where no bars are drawn
_NOTEBOOK_SECONDS = 0.25  # the least time between two drawings in a notebook, which go over its network
_NOTEBOOK_WIDTH = 110  # characters

log = logging.getLogger("metalearn")
_PACKAGES = ("metalearn", "distributed")  # whose messages a run shows and writes

Done = Callable[[int], None]  # gets the number of tasks whenever some of a validation or test are done


def unnoticed(tasks: int) -> None:
    """Ignores progress."""


class RunLog(Logger):
    """The log of a run: it gets every step. This one is silent: it is for ranks that take the same steps while rank
    zero logs."""

    plots, report = False, False  # whether the completed run gets these

    def step(self, step: int, values: Values) -> None:
        """Logs the values of a meta-step."""

    def evaluating(self, split: str, tasks: int) -> Done:
        """A validation or test of `tasks` begins."""
        return unnoticed

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        """Logs the figures of a validation or test."""

    def saved(self) -> dict[str, Any]:
        """What a run that goes on begins with: the `pending` sums over the steps since the last line, and the `digest`
        of metrics.jsonl."""
        return {"pending": {}, "digest": ""}


SILENT = RunLog()


class RunProgress(RunLog):
    """Shows how far a run is, on a terminal or in a notebook, and a line for each evaluation, in a notebook the
    last one. Elsewhere a long validation or test logs lines."""

    def __init__(self, window: Window) -> None:
        columns = TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}")
        interactive = sys.modules.get("IPython")
        shell = interactive.get_ipython() if interactive is not None else None
        self.bars: Progress | None = None  # what draws it
        if on_terminal():
            self.bars = Progress(*columns, console=CONSOLE)
        elif getattr(shell, "kernel", None) is not None:  # only the shell of a kernel has one
            self.bars = _InNotebook(*columns)
        if self.bars is not None:
            self.bars.start()
        self._window, self._done = window, window.done
        self._smooth: Values = {}
        self._task_seconds: float | None = None
        self._ids: dict[str, TaskID] = {}

    def step(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._smooth[name] = 0.9 * self._smooth.get(name, value) + 0.1 * value
        self._done = step
        if self.bars is not None:
            parts = [f"{name} {self._smooth[name]:.3f}" for name in ("loss", "accuracy") if name in self._smooth]
            speed = f"{self._window.meta_batch_size / self._smooth['step_seconds']:.1f} {self._window.unit}/s"
            self._show(self.bars, "step", step, self._window.steps, "  ".join([*parts, speed, self.time_left()]))

    def evaluating(self, split: str, tasks: int) -> Done:
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
        validations = math.ceil(window.steps / window.val_every) - max(step - 1, 0) // window.val_every
        tasks = window.test_tasks - done + (0 if split == "test" else validations * window.val_tasks)
        if not seconds if step < window.steps else self._task_seconds is None:
            return ""
        # A task of a validation may take a tenth of the time of one of a step, or more than it. Until one is measured,
        # no time is given for them.
        remaining = max((window.steps - step) * seconds + tasks * (self._task_seconds or 0.0), 0.0)
        days = remaining / 86400
        text = f"{days:.1f} days" if days >= 1 else time.strftime("%H:%M:%S", time.gmtime(remaining))
        return f"{text} left{' for steps' * (self._task_seconds is None and tasks > 0)}"

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        if self.bars is not None:
            text = f"step {step}/{self._window.steps}  {split}: {describe(figures)}"
            self.bars.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()


def on_terminal() -> bool:
    """Whether stderr is a terminal that draws lines again. FORCE_COLOR makes no terminal of a file; and the commands of
    a notebook's cells (`!metalearn …`) are on a terminal whose control characters all stay in the notebook."""
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # it is None, closed, or an object that only writes
        return False
    return is_terminal and CONSOLE.is_terminal and not CONSOLE.is_dumb_terminal and "JPY_PARENT_PID" not in os.environ


class _InNotebook(Progress):
    """One output, of which a saved notebook keeps the last state, with the last line printed. Rich's own way into
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


OpenLog = Callable[[Path, Window], RunLog]


def run_log(
    *, every: int, plots: bool, report: bool = False, tensorboard: bool = False, wandb: bool = False,
    mlflow: bool = False, project: str = "metalearn", wandb_mode: str | None = None, mlflow_uri: str | None = None,
    others: Sequence[OpenLogger] = (),
) -> OpenLog:  # fmt: skip
    """Returns a function from the run folder and the window of steps to a `RunLog`. conf/config.yaml explains the
    arguments; `others` are loggers of plugins. Raises ValueError if an argument is out of range, or the package of a
    logger is not installed."""
    whole_number("every", every, at_least=1)
    asked = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    switches(**asked, plots=plots, report=report)
    if wandb_mode is not None:
        one_of("wandb_mode", wandb_mode, MODES)
    for name in ("wandb", "mlflow"):
        if asked[name] and importlib.util.find_spec(name) is None:
            raise Invalid(
                name, "true", f"the package {name} is not installed", f"type pip install {name}", quoted=False
            )
    openers = openers_of(project, wandb_mode, mlflow_uri)

    def open_log(folder: Path, window: Window) -> RunLog:
        with ExitStack() as opened:  # closes what is open already, if another cannot be opened
            lines = Lines(folder, window)
            opened.callback(lines.close)
            loggers = []
            for open_logger in (*(openers[name] for name in asked if asked[name]), *others):
                loggers.append(open_logger(folder, window))
                opened.callback(loggers[-1].close)
            opened.pop_all()
        outputs = _WrittenLog(window, every, lines, loggers)
        outputs.plots, outputs.report = plots, report
        return outputs

    return open_log


def bar_log(window: Window) -> RunLog:
    """A log that is only seen, on a terminal or in a notebook; silent elsewhere."""
    progress = RunProgress(window)
    return SILENT if progress.bars is None else progress


class _WrittenLog(RunProgress):
    """All outputs of a run's log: the terminal, metrics.jsonl, and the loggers."""

    def __init__(self, window: Window, every: int, lines: Lines, loggers: Sequence[Logger]) -> None:
        super().__init__(window)
        self._every, self._lines, self._loggers = every, lines, [lines, *loggers]
        self._sums: Sums = dict(window.pending)

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        for logger in self._loggers:
            logger.start(config, pictures)

    def step(self, step: int, values: Values) -> None:
        _check_log_files()
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1
        super().step(step, values)
        if step % self._every and step != self._window.steps:
            return
        unit = self._window.unit
        means = {name: self._sums[name][0] / self._sums[name][1] for name in values}
        means[f"{unit}_per_second"] = self._window.meta_batch_size / means["step_seconds"]
        self._sums.clear()
        self.scalars(step, "train", means)
        parts = [f"{name} {means[name]:.4f}" for name in ("loss", *METRIC_NAMES) if name in means]
        text = "  ".join([*parts, f"{means[f'{unit}_per_second']:.1f} {unit}/s", self.time_left()])
        level = logging.DEBUG if self.bars is not None else logging.INFO  # the bars say it already
        log.log(level, "step %d/%d  %s", step, self._window.steps, text)

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self.scalars(step, split, numbers)
        log.info("step %d/%d  %s: %s", step, self._window.steps, split, describe(figures))

    def scalars(self, step: int, split: str, values: Values) -> None:
        for logger in self._loggers:
            logger.scalars(step, split, values)

    def result(self, config: Config, figures: Values) -> None:
        _check_log_files()
        for logger in self._loggers:
            logger.result(config, figures)

    def saved(self) -> dict[str, Any]:
        return {"pending": dict(self._sums), "digest": self._lines.digest()}

    def close(self) -> None:
        super().close()
        for logger in self._loggers:
            logger.close()


class _ToTerminal(RichHandler):
    """The handler of `log_to_terminal` on a terminal; another program may have a RichHandler of its own."""


def log_to_terminal(level: int = logging.INFO) -> None:
    """Sends log messages to stderr: plain lines, or rich ones on a terminal. Further calls change the level only."""
    handler = next((handler for handler in log.handlers if isinstance(handler, ToStderr | _ToTerminal)), None)
    if handler is None:
        if on_terminal():
            handler = _ToTerminal(console=CONSOLE, show_path=False, show_level=False, log_time_format="[%X]")
            handler.setFormatter(PrintableFormatter())
        else:
            handler = ToStderr()
        _attach(handler)
    handler.setLevel(level)


class _LogFile(logging.FileHandler):
    """Keeps the fault of a disk that takes no more, which ends the run at its next step, where `logging` prints a
    traceback for each message. What could not be written is tried again with the next message."""

    fault: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        if isinstance(error := sys.exception(), OSError):
            self.fault = error
        else:
            super().handleError(record)


def _check_log_files() -> None:
    """Raises RunError if a message could not be written, since the disk has failed."""
    for handler in log.handlers:
        if isinstance(handler, _LogFile) and handler.fault is not None:
            raise unwritten(Path(handler.baseFilename), handler.fault) from handler.fault


def log_to_file(path: Path) -> logging.Handler:
    """Sends log messages to `path` as well, with the time. Raises RunError if it cannot be opened."""
    with writing(path):
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(PrintableFormatter("%(asctime)s  %(levelname)-7s  %(message)s"))
    _attach(handler)
    return handler


def detach(handler: logging.Handler) -> None:
    """Undoes `log_to_file`."""
    for package in _PACKAGES:
        logging.getLogger(package).removeHandler(handler)
    with suppress(OSError):  # what could not be written is tried again
        handler.close()


def _attach(handler: logging.Handler) -> None:
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(handler)
