"""The addresses on which each process listens, as the kernel reports them."""

import os
import socket
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from distributed.info import default_worker_name, get_world_size, is_loopback
from distributed.launch.isolation import why_not_isolated
from distributed.launch.processes import LAUNCHER

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


def own_listeners() -> list[Listener]:
    """Those of this process; empty where the kernel does not tell, as where /proc is not mounted."""
    try:
        return listeners(os.getpid())
    except OSError:
        return []


def _summary(listeners: Sequence[Listener]) -> str:
    """Each address once, with its port, or with the number of its ports if there are several."""
    by_address = {address: list(group) for address, group in groupby(listeners, key=lambda listener: listener.address)}
    return ", ".join(
        str(group[0]) if len(group) == 1 else f"{address} ({len(group)} ports)" for address, group in by_address.items()
    )


def group_listeners() -> dict[str, list[Listener]]:
    """The addresses on which each rank of a process group listens, by worker name. All ranks must call it."""
    size = dist.get_world_size()
    local_listeners: list[Listener] = own_listeners()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, local_listeners)
    by_name = {default_worker_name(rank, size): gathered[rank] for rank in range(size)}
    return by_name | torchrun_listeners()


def torchrun_listeners() -> dict[str, list[Listener]]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    try:
        return {"launcher" if LAUNCHER in os.environ else "torchrun": listeners(os.getppid())}
    except OSError:  # another user's process
        return {}


def listening_line(by_worker: dict[str, list[Listener]]) -> str:
    """A line for the log: the addresses of each worker, whether others can connect, and how to prevent that."""
    if not any(by_worker.values()):
        return "listening: not known, since this system does not tell: others may be able to connect and run code here"
    line = "; ".join(f"{name} on {_summary(addresses)}" for name, addresses in by_worker.items() if addresses)
    open_to_others = [name for name, addresses in by_worker.items() if not all(address.closed for address in addresses)]
    obstacle = why_not_isolated()
    if not open_to_others and obstacle is None:
        return f"listening: {line} (all loopback, in a network of this run's own: no other user can connect)"
    if not open_to_others:
        return (
            f"listening: {line} (all loopback). Every user of this host can connect there and run code here, since "
            f"this run has no network of its own ({obstacle})"
        )
    advice = f"; workers={get_world_size()} without torchrun keeps a run on one host closed"
    by_torchrun = advice if open_to_others == ["torchrun"] else ""
    return (
        f"listening: {line}. Open to other hosts: {', '.join(open_to_others)}: anyone who connects there, and every "
        f"user of this host, can run code here{by_torchrun}"
    )
