"""A handler for log messages on the terminal."""

import logging
import sys
from typing import TextIO

log = logging.getLogger("metalearn")


def log_to_stderr() -> None:
    """Sends the log messages of a command that trains nothing to stderr, from warnings on."""
    if not any(isinstance(handler, ToStderr) for handler in log.handlers):
        log.addHandler(ToStderr())
    log.propagate = False


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: a notebook, or a redirection, may have replaced it since an earlier call."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
