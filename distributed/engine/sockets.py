"""Bytes that this process has sent over TCP, as the kernel counts them (Linux)."""

import os
import socket
import struct
import sys
from pathlib import Path

_BYTES_ACKED = 120
"""Where `tcpi_bytes_acked` lies in the kernel's `struct tcp_info` (linux/tcp.h)."""


def tcp_bytes_sent() -> int | None:
    """Over all open connections: bytes that have been sent, and acknowledged; None where that is not known."""
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) < _BYTES_ACKED + 8:
                        return None
                    total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        except OSError:  # closed meanwhile
            continue
    return total
