"""A handler and a formatter for log messages on the terminal."""

import logging
import sys
from typing import TextIO

from metalearn.errors import printable

log = logging.getLogger("metalearn")


def log_to_stderr() -> None:
    """Sends the log messages of a command that trains nothing to stderr, from warnings on."""
    if not any(isinstance(handler, ToStderr) for handler in log.handlers):
        handler = ToStderr()
        handler.setLevel(logging.WARNING)  # a run in the same process sets that of the logger to DEBUG
        log.addHandler(handler)
    log.propagate = False


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
        """Ignores a terminal, pipe or file that takes no more: a report of that could not be read there either."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
