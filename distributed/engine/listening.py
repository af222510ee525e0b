"""Who listens where: read from the kernel, so that what is told is what is."""

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from distributed.engine.info import default_worker_name, get_world_info, get_world_size
from distributed.engine.session import current
from distributed.remote import remote_sync_call

_LISTENING = "0A"


class Listener(NamedTuple):
    """An address that a process takes connections at."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def closed(self) -> bool:
        """Whether it can be reached from this host only."""
        return ipaddress.ip_address(self.address).is_loopback


def listeners(pid: int) -> list[Listener]:
    """What a process of this host listens on (Linux; elsewhere nothing is known, and the list is empty).

    Raises:
        FileNotFoundError: there is no such process.
        PermissionError: it belongs to someone else.
    """
    if not sys.platform.startswith("linux"):
        return []
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                found.add(_listener(family, *fields[1].split(":")))
    return sorted(found)


def _listener(family: int, address: str, port: str) -> Listener:
    """From the kernel's notation: hexadecimal, in words of four bytes, each in the host's order."""
    words = bytes.fromhex(address)
    raw = b"".join(words[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(words), 4))
    return Listener(socket.inet_ntop(family, raw), int(port, 16))


def own_listeners() -> list[Listener]:
    return listeners(os.getpid())


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def everyone() -> dict[str, list[Listener]]:
    """What each worker of the session listens on, by name, and torchrun on this host."""
    names = current().workers
    found = remote_sync_call(own_listeners, partitioner=lambda: [(rank, None, None) for rank in range(len(names))])
    return dict(zip(names, found, strict=True)) | _torchruns_own()


def _summary(where: Sequence[Listener]) -> str:
    """Each address once; a single port beside it, or how many there are."""
    by_address = {address: list(group) for address, group in groupby(where, key=lambda listener: listener.address)}
    return ", ".join(
        str(group[0]) if len(group) == 1 else f"{address} ({len(group)} ports)" for address, group in by_address.items()
    )


def everyone_in_group() -> dict[str, list[Listener]]:
    """As `everyone`, for the ranks of a process group, all of which must call it."""
    size = dist.get_world_size()
    own: list[Listener] = own_listeners()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    info = get_world_info()._asdict()
    by_name = {default_worker_name(**info | {"world_rank": rank}): gathered[rank] for rank in range(size)}
    return by_name | _torchruns_own()


def _torchruns_own() -> dict[str, list[Listener]]:
    if not started_by_torchrun():
        return {}
    try:
        return {"torchrun": listeners(os.getppid())}
    except OSError:  # another user's
        return {}


def announcement(found: dict[str, list[Listener]]) -> str:
    """One line: who listens where, and how to close what is open to other hosts."""
    line = "; ".join(f"{name} on {_summary(where)}" for name, where in found.items() if where)
    open_to_others = [name for name, where in found.items() if not all(listener.closed for listener in where)]
    if not open_to_others:
        return f"listening: {line} (all loopback)"
    closed_way = f"; `python train.py workers={get_world_size()} …` keeps a run on one host closed"
    by_torchrun = closed_way if open_to_others == ["torchrun"] else ""
    return (
        f"listening: {line}. Open to other hosts: {', '.join(open_to_others)}: whoever reaches that can run code "
        f"here{by_torchrun}"
    )
