"""Limits how many messages are under way."""

import threading
import time
from collections import deque


class Slots:
    """`size` places. Who waits longest gets the next free place."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._released = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def acquire(self, patience: float) -> bool:
        """Takes a place, and waits for it if necessary.

        Returns:
            False if no place has become free for `patience` seconds, however long the line is. Then nothing is taken.
        """
        with self._changed:
            if self._free and not self._waiting:
                self._free -= 1
                return True
            me = object()
            self._waiting.append(me)
            released, deadline = self._released, time.monotonic() + patience
            try:
                while not (self._free and self._waiting[0] is me):
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        return False
                    if self._released != released:
                        released, deadline = self._released, time.monotonic() + patience
                self._free -= 1
                return True
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def release(self) -> None:
        """Gives a place back."""
        with self._changed:
            self._free += 1
            self._released += 1
            self._changed.notify_all()
