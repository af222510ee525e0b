"""Being asked to stop."""

import logging
import signal
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
STOPPED = (INTERRUPTED, TERMINATED)
"""Exit codes of a run that was stopped by SIGINT or SIGTERM, after saving."""

log = logging.getLogger(__name__)


class StopSignal:
    """Notes SIGTERM and SIGINT, so that the loop can save before it stops; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise SystemExit(self.exit_code)
        self.asked = True
        self.exit_code = TERMINATED if number == signal.SIGTERM else INTERRUPTED
        log.info("%s: saving, then stopping", signal.Signals(number).name)
