"""TensorBoard's events of a run: curves, hyperparameters with the final figures, the config, a few episodes."""

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metalearn.config.saved import typed_keys
from metalearn.config.values import Config
from metalearn.reporting.loggers.protocol import Logger, Picture, Values, Window, as_yaml, flat
from metalearn.storage.files import writing

# TensorBoard sorts groups by name and opens the first two: those shall be the curves, not single points.
_GROUPS = {"test": "z_test"}


def tensorboard_logger(folder: Path, window: Window) -> Logger:
    """Events in the run folder. If the run goes on, events after the steps done are purged.

    Raises:
        RunError: they cannot be written.
    """
    board = _Board(folder, window)
    return Logger(board.start, board.scalars, board.result, board.close)


class _Board:
    def __init__(self, folder: Path, window: Window) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self._folder, self._window = folder, window
        self._excepthook = threading.excepthook
        threading.excepthook = self._ended
        with writing(folder):
            self._writer: Any = SummaryWriter(str(folder), purge_step=window.done + 1 if window.done else 0)

    def start(self, config: Config, pictures: Mapping[str, Picture]) -> None:
        if self._window.done:
            return  # an earlier session has written them, at step 0
        text = "".join(f"    {line}\n" for line in as_yaml(config).splitlines())  # code in Markdown
        with writing(self._folder):
            self._writer.add_text("config", text, 0)
            for name, picture in pictures.items():
                self._writer.add_image(f"episodes/{name}", picture, 0, dataformats="HWC")

    def scalars(self, step: int, split: str, values: Values) -> None:
        with writing(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(f"{_GROUPS.get(split, split)}/{name}", value, step)

    def result(self, config: Config, figures: Values) -> None:
        values, typed = flat(config), dict[str, str]()
        with contextlib.suppress(OSError, ValueError):  # damaged: the run does not end for it
            typed = typed_keys(self._folder)
        changed = {key: value for key, value in values.items() if any(f"{key}.".startswith(f"{t}.") for t in typed)}
        named = {f"{_GROUPS['test']}/{name.rpartition('/test_')[2]}": value for name, value in figures.items()}
        with writing(self._folder):
            self._writer.add_hparams(changed | values, named, run_name=".", global_step=self._window.steps)

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()
        threading.excepthook = self._excepthook

    def _ended(self, args: threading.ExceptHookArgs) -> None:
        """Prints the traceback of a thread, but for the writer's: the next call here raises its error."""
        if type(args.thread).__name__ != "_AsyncWriterThread":
            self._excepthook(args)
