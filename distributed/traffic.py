"""Counts the bytes of remote calls."""

import threading
from collections import Counter
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes since the process started, counted by the caller; `received` is by the sender's rank."""

    sent: int
    received: Counter[int]

    def since(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


_lock = threading.Lock()
_sent = 0
_received: Counter[int] = Counter()


def traffic() -> Traffic:
    """The bytes sent and received since the process started."""
    with _lock:
        return Traffic(_sent, _received.copy())


def note_sent(size: int) -> None:
    global _sent
    with _lock:
        _sent += size


def note_received(size: int, rank: int) -> None:
    with _lock:
        _received[rank] += size
