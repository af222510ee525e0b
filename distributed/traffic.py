"""Bytes that remote calls of this process have sent and received, tensors included."""

import threading
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes so far, as the caller of remote calls sees them."""

    sent: int
    received: int

    def since(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


_lock = threading.Lock()
_traffic = Traffic(0, 0)


def traffic() -> Traffic:
    """What has been sent and received since the process began."""
    return _traffic


def note_sent(size: int) -> None:
    global _traffic
    with _lock:
        _traffic = Traffic(_traffic.sent + size, _traffic.received)


def note_received(size: int) -> None:
    global _traffic
    with _lock:
        _traffic = Traffic(_traffic.sent, _traffic.received + size)
