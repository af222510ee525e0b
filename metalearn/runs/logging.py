"""The log of a run: progress on the terminal, train.log, metrics.jsonl and TensorBoard."""

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metalearn.checks import true_or_false, whole_number
from metalearn.files import lines_of, write_atomically, writing
from metalearn.runs.metrics import describe, jsonable

Values = dict[str, float]

Sums = dict[str, tuple[float, int]]
"""For each figure its sum over some steps, and their number."""

_PACKAGES = ("metalearn", "distributed")


class RunLog(NamedTuple):
    """`step` logs the values of a meta-step, `evaluation` the figures of a validation or test, `result` the settings
    with the final figures; `close` writes everything to disk. `pending` returns the sums over the steps since the last
    line, which a run that goes on begins with. `plots` says whether the run's plots are wanted."""

    step: Callable[[int, Values], None]
    evaluation: Callable[[int, str, dict[str, Any]], None]
    result: Callable[[dict[str, Any], Values], None]
    close: Callable[[], None]
    pending: Callable[[], Sums]
    plots: bool = False


SILENT = RunLog(lambda step, v: None, lambda step, split, f: None, lambda settings, f: None, lambda: None, dict)
"""For ranks that take the same steps while rank zero logs."""


class Window(NamedTuple):
    """The steps to log: how many are `done` already, the last one that is `validated`, how many there are, and the
    tasks (or samples: `unit`) of each. `pending` has the sums over the steps that are done, but not in a line yet."""

    done: int
    validated: int
    steps: int
    meta_batch_size: int
    unit: str = "tasks"
    pending: Mapping[str, tuple[float, int]] = MappingProxyType({})


OpenLog = Callable[[Path, Window], RunLog]

log = logging.getLogger("metalearn")


def run_log(*, every: int, tensorboard: bool, plots: bool) -> OpenLog:
    """Returns a function from the run folder and the window of steps to a `RunLog`.

    Args:
        every: steps between logged lines; a line is the mean over the steps since the last one.
        tensorboard: whether to write TensorBoard events.
        plots: whether the completed run's plots are wanted.

    Raises:
        ValueError: `every` is below 1, or another argument is no bool.
    """
    whole_number("every", every, at_least=1)
    true_or_false("tensorboard", tensorboard)
    true_or_false("plots", plots)

    def open_log(folder: Path, window: Window) -> RunLog:
        board = _Board(folder, window.done) if tensorboard else None
        outputs = _Outputs(window, every, _Lines(folder / "metrics.jsonl", window), board)
        return RunLog(outputs.step, outputs.evaluation, outputs.result, outputs.close, outputs.pending, plots)

    return open_log


class _Outputs:
    """All outputs of a run's log: the terminal, metrics.jsonl, and TensorBoard if `board` is given."""

    def __init__(self, window: Window, every: int, lines: "_Lines", board: "_Board | None") -> None:
        self._window, self._every, self._lines, self._board = window, every, lines, board
        self._bar = _bar(window)
        self._sums: Sums = dict(window.pending)

    def step(self, step: int, values: Values) -> None:
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1
        if self._bar is not None:
            self._bar(step, values)
        if step % self._every and step != self._window.steps:
            return
        means = {name: self._sums[name][0] / self._sums[name][1] for name in values}
        means[f"{self._window.unit}_per_second"] = self._window.meta_batch_size / means["step_seconds"]
        self._sums.clear()
        self._record(step, "train", means)
        level = logging.DEBUG if self._bar is not None else logging.INFO
        log.log(level, "step %d/%d  %s", step, self._window.steps, _as_text(step, means, self._window))

    def pending(self) -> Sums:
        return dict(self._sums)

    def evaluation(self, step: int, split: str, figures: dict[str, Any]) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._record(step, split, numbers)
        log.info("step %d/%d  %s: %s", step, self._window.steps, split, describe(figures))

    def result(self, settings: dict[str, Any], figures: Values) -> None:
        if self._board is not None:
            flat = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in settings.items()}
            self._board.settings(flat, figures, self._window.steps)

    def close(self) -> None:
        if self._bar is not None:
            self._bar(None, {})
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def _record(self, step: int, split: str, values: Values) -> None:
        self._lines.write({"step": step, "split": split, **values})
        if self._board is not None:
            self._board.scalars({f"{split}/{name}": value for name, value in values.items()}, step)


class _Lines:
    """metrics.jsonl. If a run continues, the lines of what it will do again are removed."""

    def __init__(self, path: Path, window: Window) -> None:
        self._path = path
        kept_until = {"train": window.done, "val": window.validated, "test": 0}
        kept = []
        if path.exists():
            for line in lines_of(path):
                try:
                    row = json.loads(line)
                    if line.endswith(b"\n") and 0 < row["step"] <= kept_until[row["split"]]:
                        kept.append(line.decode())
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # a kill has cut this line
        write_atomically(path, "".join(kept))
        with writing(path):
            self._file = path.open("a")

    def write(self, values: dict[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(jsonable(values)) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path), self._file:
            os.fsync(self._file.fileno())


class _Board:
    """TensorBoard's events of a run. If it continues, events after the `done` steps are purged."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._folder = folder
        self._excepthook = threading.excepthook
        threading.excepthook = self._ended
        with writing(folder):
            _date_back(folder, time.time())
            self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1)

    def scalars(self, values: Values, step: int) -> None:
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def settings(self, values: dict[str, bool | int | float | str], figures: Values, step: int) -> None:
        with writing(self._folder):
            self._writer.add_hparams(values, figures, run_name=".", global_step=step)

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()
        threading.excepthook = self._excepthook

    def _ended(self, args: threading.ExceptHookArgs) -> None:
        """Prints the traceback of a thread, but for the writer's: the next call here raises its error."""
        if type(args.thread).__name__ != "_AsyncWriterThread":
            self._excepthook(args)


_EVENTS = re.compile(r"(events\.out\.tfevents\.)([0-9]+)(\..*)")


def _date_back(folder: Path, now: float) -> None:
    """Renames events files from the future: the clock has been set back. TensorBoard reads files in the order of the
    seconds in their names, and would read this run's later events, which purge what is done again, before those."""
    found = [match for path in folder.glob("events.out.tfevents.*") if (match := _EVENTS.fullmatch(path.name))]
    if all(int(match[2]) < int(now) for match in found):
        return
    latest = int(now)
    for match in sorted(found, key=lambda match: match[0], reverse=True):
        latest = min(int(match[2]), latest - 1)
        (folder / match[0]).rename(folder / f"{match[1]}{latest:010d}{match[3]}")


def _as_text(step: int, values: Values, window: Window) -> str:
    parts = [f"{name} {values[name]:.4f}" for name in ("loss", "accuracy", "mse") if name in values]
    speed = f"{window.meta_batch_size / values['step_seconds']:.1f} {window.unit}/s"
    return "  ".join([*parts, speed, f"{_time_left(step, window, values['step_seconds'])} left"])


def _time_left(step: int, window: Window, seconds: float) -> str:
    remaining = int((window.steps - step) * seconds)
    return time.strftime("%H:%M:%S", time.gmtime(remaining)) if remaining < 86400 else f"{remaining / 86400:.1f} days"


_console = Console(stderr=True)


def _bar(window: Window) -> Callable[[int | None, Values], None] | None:
    """A progress bar, or None if stderr is no terminal. Call it with each step, and with None at the end."""
    if not _console.is_terminal:
        return None
    progress = Progress(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[values]}"),
        TimeRemainingColumn(), TextColumn("left"), console=_console,
    )  # fmt: skip
    task = progress.add_task("training", total=window.steps, completed=window.done, values="")
    progress.start()
    smooth: Values = {}

    def show(step: int | None, values: Values) -> None:
        if step is None:
            progress.stop()
            return
        for name, value in values.items():
            smooth[name] = 0.9 * smooth.get(name, value) + 0.1 * value
        parts = [f"{name} {smooth[name]:.3f}" for name in ("loss", "accuracy") if name in smooth]
        parts.append(f"{window.meta_batch_size / smooth['step_seconds']:.1f} {window.unit}/s")
        progress.update(task, completed=step, values="  ".join(parts))

    return show


def log_to_terminal(level: int = logging.INFO) -> None:
    """Sends log messages to stderr: plain lines, or rich ones on a terminal. Further calls change the level only."""
    if not log.handlers:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if _console.is_terminal:
            handler = RichHandler(console=_console, show_path=False, show_level=False, log_time_format="[%X]")
        _attach(handler)
    log.handlers[0].setLevel(level)


class _LogFile(logging.FileHandler):
    """Reports once that the file cannot be written, where `logging` prints a traceback for each message."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        detach(self)
        log.warning("%s: cannot be written: %s; the next messages are not in it", self.baseFilename, error.strerror)


def log_to_file(path: Path) -> logging.Handler:
    """Sends log messages to `path` as well, with the time.

    Raises:
        RunError: it cannot be opened.
    """
    with writing(path):
        handler = _LogFile(path)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(levelname)-7s  %(message)s"))
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
