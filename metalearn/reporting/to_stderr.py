"""A handler for log messages on the terminal."""

import logging
import sys
from typing import TextIO


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is now: a notebook, or a redirection, may have replaced it since an earlier call."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
