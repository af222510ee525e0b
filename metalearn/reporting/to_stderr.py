"""A handler and a formatter for log messages on the terminal."""

import logging
import sys
from typing import TextIO

from metalearn.errors import printable


class PrintableFormatter(logging.Formatter):
    """Messages may have names and texts from files, whose control characters could change the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: a notebook, or a redirection, may have replaced it since an earlier call."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(PrintableFormatter())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name is logging's)
        """A terminal, pipe or file that takes no more: nobody could read of it there."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
