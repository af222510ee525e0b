"""Counts the bytes that this process has sent over TCP, by the kernel's counters (Linux)."""

import os
import socket
import struct
import sys
from pathlib import Path

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
            with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) < _BYTES_ACKED + 8:
                        return None
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        except OSError:  # it was closed in the meantime
            continue
    return total
