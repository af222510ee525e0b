"""The log of a run: progress on the terminal, train.log, metrics.jsonl, and the loggers that the config chooses."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from rich.logging import RichHandler

from metalearn.checks import Invalid, one_of, true_or_false, whole_number
from metalearn.config.values import Config
from metalearn.errors import PrintableFormatter, ToStderr
from metalearn.reporting.loggers import (
    MODES,
    Lines,
    Logger,
    OpenLogger,
    Sums,
    TensorboardLogger,
    Values,
    Window,
    mlflow_logger,
    wandb_logger,
)
from metalearn.reporting.page import Picture
from metalearn.reporting.progress import CONSOLE, Done, RunProgress, on_terminal, unnoticed
from metalearn.runs.metrics import METRIC_NAMES, describe
from metalearn.storage.files import unwritten, writing

_PACKAGES = ("metalearn", "distributed")


class RunLog:
    """The log of a run. This one is silent: it is for ranks that take the same steps while rank zero logs."""

    plots, report = False, False  # whether the completed run gets these

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        """Gets the config, and a few episodes as pictures."""

    def step(self, step: int, values: Values) -> None:
        """Logs the values of a meta-step."""

    def evaluating(self, split: str, tasks: int) -> Done:
        """A validation or test of `tasks` begins."""
        return unnoticed

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        """Logs the figures of a validation or test."""

    def result(self, config: Config, figures: Values) -> None:
        """Logs the final figures, with the config."""

    def close(self) -> None:
        """Writes everything to disk."""

    def pending(self) -> Sums:
        """The sums over the steps since the last line. A run that goes on begins with them."""
        return {}

    def digest(self) -> str:
        """The SHA-256 of metrics.jsonl."""
        return ""


SILENT = RunLog()

OpenLog = Callable[[Path, Window], RunLog]

log = logging.getLogger("metalearn")


def run_log(
    *, every: int, plots: bool, report: bool = False, tensorboard: bool = False, wandb: bool = False,
    mlflow: bool = False, project: str = "metalearn", wandb_mode: str | None = None, mlflow_uri: str | None = None,
    others: Sequence[OpenLogger] = (),
) -> OpenLog:  # fmt: skip
    """Returns a function from the run folder and the window of steps to a `RunLog`. Raises ValueError if an argument is
    out of range, or the package of a logger is not installed.

    Args:
        every: steps between logged lines; a line is the mean over the steps since the last one.
        plots, report: whether the completed run gets its plots, and report.html.
        tensorboard, wandb, mlflow: which loggers get every line besides the terminal and metrics.jsonl.
        project: the project of Weights & Biases, or the experiment of MLflow.
        wandb_mode, mlflow_uri: as `wandb_logger` and `mlflow_logger` have them.
        others: loggers of plugins.
    """
    whole_number("every", every, at_least=1)
    switches = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
    for name, value in (switches | {"plots": plots, "report": report}).items():
        true_or_false(name, value)
    if wandb_mode is not None:
        one_of("wandb_mode", wandb_mode, MODES)
    for name in ("wandb", "mlflow"):
        if switches[name] and importlib.util.find_spec(name) is None:
            raise Invalid(
                name, "true", f"the package {name} is not installed", f"type pip install {name}", quoted=False
            )
    openers: dict[str, OpenLogger] = {
        "tensorboard": TensorboardLogger,
        "wandb": wandb_logger(project, wandb_mode),
        "mlflow": mlflow_logger(project, mlflow_uri),
    }

    def open_log(folder: Path, window: Window) -> RunLog:
        with ExitStack() as opened:  # closes what is open already, if another cannot be opened
            lines = Lines(folder, window)
            opened.callback(lines.close)
            loggers = []
            for open_logger in (*(openers[name] for name in switches if switches[name]), *others):
                loggers.append(open_logger(folder, window))
                opened.callback(loggers[-1].close)
            opened.pop_all()
        outputs = _WrittenLog(window, every, lines, loggers)
        outputs.plots, outputs.report = plots, report
        return outputs

    return open_log


class _SeenLog(RunLog):
    """Shows how far the run is, and a line for each evaluation; a notebook keeps the last one."""

    def __init__(self, window: Window, progress: RunProgress) -> None:
        self._window, self._progress = window, progress

    def step(self, step: int, values: Values) -> None:
        self._progress.step(step, values)

    def evaluating(self, split: str, tasks: int) -> Done:
        return self._progress.evaluating(split, tasks)

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        self._progress.note(f"step {step}/{self._window.steps}  {split}: {describe(figures)}")

    def close(self) -> None:
        self._progress.close()


def bar_log(window: Window) -> RunLog:
    """A log that is only seen, on a terminal or in a notebook; silent elsewhere."""
    progress = RunProgress(window)
    return SILENT if progress.bars is None else _SeenLog(window, progress)


class _WrittenLog(_SeenLog):
    """All outputs of a run's log: the terminal, metrics.jsonl, and the loggers."""

    def __init__(self, window: Window, every: int, lines: Lines, loggers: Sequence[Logger]) -> None:
        super().__init__(window, RunProgress(window))
        self._every, self._lines, self._loggers = every, lines, loggers
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
        self._record(step, "train", means)
        parts = [f"{name} {means[name]:.4f}" for name in ("loss", *METRIC_NAMES) if name in means]
        text = "  ".join([*parts, f"{means[f'{unit}_per_second']:.1f} {unit}/s", self._progress.time_left()])
        level = logging.DEBUG if self._progress.bars is not None else logging.INFO  # the bars say it already
        log.log(level, "step %d/%d  %s", step, self._window.steps, text)

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._record(step, split, numbers)
        log.info("step %d/%d  %s: %s", step, self._window.steps, split, describe(figures))

    def _record(self, step: int, split: str, values: Values) -> None:
        self._lines.write(step, split, values)
        for logger in self._loggers:
            logger.scalars(step, split, values)

    def result(self, config: Config, figures: Values) -> None:
        _check_log_files()
        for logger in self._loggers:
            logger.result(config, figures)

    def pending(self) -> Sums:
        return dict(self._sums)

    def digest(self) -> str:
        return self._lines.digest()

    def close(self) -> None:
        super().close()
        self._lines.close()
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
