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
_sent = 0
_received = 0


def traffic() -> Traffic:
    """What has been sent and received since the process began."""
    with _lock:
        return Traffic(_sent, _received)


def note_sent(size: int) -> None:
    global _sent
    with _lock:
        _sent += size


def note_received(size: int) -> None:
    global _received
    with _lock:
        _received += size
