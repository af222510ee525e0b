"""Counts the bytes of remote calls and of the whole process, and limits the messages under way."""

import os
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

# Bytes of remote calls


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


# Bytes of the whole process, by the kernel's counters


_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in the kernel's `struct tcp_info` (linux/tcp.h)."""


def tcp_bytes_sent() -> int | None:
    """Bytes sent and acknowledged over all open connections; None if the system does not count them."""
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:  # closes the duplicate only
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) < _BYTES_ACKED + 8:
                        return None
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        except OSError:  # it was closed in the meantime
            continue
    return total


# Messages under way


class MessageSlots:
    """`size` places for messages under way; first come, first served."""

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
                    if self._released != released:  # the line moves, so the worker is not stuck
                        released, deadline = self._released, time.monotonic() + patience
                self._free -= 1
                return True
            finally:
                self._waiting.remove(me)  # the next one in line may go now
                self._changed.notify_all()

    def release(self) -> None:
        """Gives a place back."""
        with self._changed:
            self._free += 1
            self._released += 1
            self._changed.notify_all()
