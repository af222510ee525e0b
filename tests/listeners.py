"""The addresses on which a process listens, as the kernel reports them."""

import socket
import sys
from pathlib import Path
from typing import NamedTuple

from distributed.info import is_loopback

_LISTENING = "0A"


class Listener(NamedTuple):
    """An address on which a process accepts connections."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def closed(self) -> bool:
        """Whether only this host can reach it."""
        return is_loopback(self.address)


def listeners(pid: int) -> list[Listener]:
    """The addresses on which a process of this host listens. Linux only; on other systems the list is empty.

    Raises:
        FileNotFoundError: there is no such process.
        PermissionError: it belongs to another user.
    """
    if not sys.platform.startswith("linux"):
        return []
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # it was closed in the meantime
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                listening.add(_listener(family, *fields[1].split(":")))
    return sorted(listening)


def _listener(family: int, address: str, port: str) -> Listener:
    """Parses the kernel's notation: hexadecimal, in words of four bytes, each word in the host's byte order."""
    words = bytes.fromhex(address)
    raw = b"".join(words[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(words), 4))
    return Listener(socket.inet_ntop(family, raw), int(port, 16))
