"""Requests to stop: SIGTERM and SIGINT."""

import logging
import signal
import time
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
STOPPED = (INTERRUPTED, TERMINATED)
"""Exit codes of a run that was stopped by SIGINT or SIGTERM, after saving."""

SAME_REQUEST_SECONDS = 2.0
"""A terminal signals the whole process group, and a launcher passes signals on: within this time it is one request."""

log = logging.getLogger(__name__)


class StopSignal:
    """Notes SIGTERM and SIGINT, so that the loop can save before it stops; a second request ends the process."""

    def __init__(self) -> None:
        self.requested = False
        self.exit_code = 0
        self._since = 0.0
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore(self) -> None:
        """Puts back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._since < SAME_REQUEST_SECONDS:
                return
            raise SystemExit(self.exit_code)
        self.requested = True
        self._since = time.monotonic()
        self.exit_code = TERMINATED if number == signal.SIGTERM else INTERRUPTED
        log.info("%s: saving, then stopping", signal.Signals(number).name)
