"""What a run tells: progress on the terminal, train.log, metrics.jsonl and TensorBoard."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from metalearn.checks import true_or_false, whole_number
from metalearn.files import put
from metalearn.runs.metrics import describe, jsonable

Values = dict[str, float]

_PACKAGES = ("metalearn", "distributed")


class RunLog(NamedTuple):
    """`step` takes the values of a meta-step, `evaluation` the figures of a validation or test; `result`
    the final figures beside the settings that gave them; `close` writes everything out."""

    step: Callable[[int, Values], None]
    evaluation: Callable[[int, str, dict[str, Any]], None]
    result: Callable[[dict[str, Any], Values], None]
    close: Callable[[], None]


SILENT = RunLog(lambda step, v: None, lambda step, split, f: None, lambda settings, f: None, lambda: None)
"""For ranks that step along while rank zero tells."""


class Span(NamedTuple):
    """The stretch of a run that is to be logged: done so far, the last step, tasks (or samples: `unit`) of a step."""

    done: int
    steps: int
    meta_batch_size: int
    unit: str = "tasks"


OpenLog = Callable[[Path, Span], RunLog]

log = logging.getLogger("metalearn")


def run_log(*, every: int, tensorboard: bool) -> OpenLog:
    """How to log: a function from the run folder and the stretch ahead to a `RunLog`.

    Args:
        every: steps between logged lines, each the mean over the steps since the last.
        tensorboard: whether to write TensorBoard events.

    Raises:
        ValueError: `every` below 1.
    """
    whole_number("every", every, at_least=1)
    true_or_false("tensorboard", tensorboard)

    def open_log(folder: Path, span: Span) -> RunLog:
        lines = _Lines(folder / "metrics.jsonl", span.done)
        board = _board(folder, span.done) if tensorboard else None
        bar = _bar(span)
        pending: list[Values] = []

        def record(step: int, split: str, values: Values) -> None:
            lines.write({"step": step, "split": split, **values})
            for name, value in values.items():
                if board is not None:
                    board.add_scalar(f"{split}/{name}", value, step)

        def on_step(step: int, values: Values) -> None:
            pending.append(values)
            if bar is not None:
                bar(step, values)
            if step % every and step != span.steps:
                return
            means = {name: sum(value[name] for value in pending) / len(pending) for name in values}
            means[f"{span.unit}_per_second"] = span.meta_batch_size / means["step_seconds"]
            pending.clear()
            record(step, "train", means)
            quiet = logging.DEBUG if bar is not None else logging.INFO
            log.log(
                quiet, "step %d/%d  %s", step, span.steps, _plain(means, span, _left(step, span, means["step_seconds"]))
            )

        def on_evaluation(step: int, split: str, figures: dict[str, Any]) -> None:
            numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
            record(step, split, numbers)
            log.info("step %d/%d  %s: %s", step, span.steps, split, describe(figures))

        def on_result(settings: dict[str, Any], figures: Values) -> None:
            if board is not None:
                flat = {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in settings.items()}
                board.add_hparams(flat, figures, run_name=".", global_step=span.steps)

        def close() -> None:
            lines.close()
            if board is not None:
                board.close()
            if bar is not None:
                bar(None, {})

        return RunLog(on_step, on_evaluation, on_result, close)

    return open_log


class _Lines:
    """metrics.jsonl, cut back to the step that a run goes on from; a test is run anew."""

    def __init__(self, path: Path, done: int) -> None:
        kept = []
        if path.exists():
            for line in path.read_text().splitlines(keepends=True):
                try:
                    row = json.loads(line)
                    if line.endswith("\n") and 0 < row["step"] <= done and row["split"] != "test":
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # a line torn by a kill
        put(path, "".join(kept))
        self._file = path.open("a")

    def write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(jsonable(values)) + "\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _board(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # takes a second to import

    # Events after the step that the run goes on from are purged.
    return SummaryWriter(str(folder), purge_step=done + 1)


def _plain(values: Values, span: Span, left: str) -> str:
    parts = [f"{name} {values[name]:.4f}" for name in ("loss", "accuracy", "mse") if name in values]
    return "  ".join([*parts, f"{span.meta_batch_size / values['step_seconds']:.1f} {span.unit}/s", f"{left} left"])


def _left(step: int, span: Span, seconds: float) -> str:
    remaining = int((span.steps - step) * seconds)
    return time.strftime("%H:%M:%S", time.gmtime(remaining)) if remaining < 86400 else f"{remaining / 86400:.1f} days"


_console = Console(stderr=True)


def _bar(span: Span) -> Callable[[int | None, Values], None] | None:
    """A progress bar where stderr is a terminal: called with each step, and with None at the end."""
    if not _console.is_terminal:
        return None
    progress = Progress(
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[values]}"),
        TimeRemainingColumn(), TextColumn("left"), console=_console,
    )  # fmt: skip
    task = progress.add_task("training", total=span.steps, completed=span.done, values="")
    progress.start()
    smooth: Values = {}

    def show(step: int | None, values: Values) -> None:
        if step is None:
            progress.stop()
            return
        for name, value in values.items():
            smooth[name] = 0.9 * smooth.get(name, value) + 0.1 * value
        parts = [f"{name} {smooth[name]:.3f}" for name in ("loss", "accuracy") if name in smooth]
        parts.append(f"{span.meta_batch_size / smooth['step_seconds']:.1f} {span.unit}/s")
        progress.update(task, completed=step, values="  ".join(parts))

    return show


def log_to_terminal() -> None:
    """Sends what the program tells to stderr: plain lines, or rich ones on a terminal. Once is enough."""
    if log.handlers:
        return
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if _console.is_terminal:
        handler = RichHandler(console=_console, show_path=False, show_level=False, log_time_format="[%X]")
    handler.setLevel(logging.INFO)
    _attach(handler)


def log_to_file(path: Path) -> logging.Handler:
    """Sends it to `path` as well, with the time."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(levelname)-7s  %(message)s"))
    _attach(handler)
    return handler


def detach(handler: logging.Handler) -> None:
    """Undoes `log_to_file`."""
    for package in _PACKAGES:
        logging.getLogger(package).removeHandler(handler)
    handler.close()


def _attach(handler: logging.Handler) -> None:
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(handler)
