"""How a process from outside reaches a world under way: to join it, or to ask that a worker leaves it.

Rank zero publishes its world's address (`own_place`). The commands join and leave read it and open a `WorldConnection`.
It starts new processes (`start`), which then meet the world as any other, see `meeting`; or it lets a worker go
(`let_go`).
"""

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from distributed.cluster.info import get_world_info
from distributed.cluster.isolation import NetworkNamespace, network_of
from distributed.cluster.meeting import JOINS, TOKEN, ask_to_let_go
from distributed.cluster.processes import Fork, die_with
from distributed.cluster.store import INTERFACE_VARIABLES, within

REACH_SECONDS = 5.0
"""Time limit for the world's store to answer."""

LEAVE_SECONDS = 60.0
"""Time limit for rank zero to answer. It does so between two steps."""


class UnreachableError(ConnectionError):
    """A world that has ended, or that this process cannot reach; the message says which."""


class WorldAddress(NamedTuple):
    """The address of a world: its store, and the process of rank zero.

    Attributes:
        address, port: of its store.
        interface: the network interface of its traffic.
        token: its secret, may be empty.
        workers: their number when it was started.
        host, pid, born: of rank zero; `born` in clock ticks since the host was started.
    """

    address: str
    port: int
    interface: str
    token: str
    workers: int
    host: str
    pid: int
    born: int

    @property
    def is_here(self) -> bool:
        """Whether rank zero is on this host."""
        return self.host == socket.gethostname()


def own_place() -> WorldAddress:
    """The address of this world, on its rank zero. The world must have several processes."""
    return WorldAddress(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ.get(INTERFACE_VARIABLES[0], ""),
        os.environ.get(TOKEN, ""), get_world_info().world_size, socket.gethostname(), os.getpid(), _born(os.getpid()),
    )  # fmt: skip


def _born(pid: int) -> int:
    """When a process was started; 0 if there is none, or the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[19])
    except (OSError, IndexError):
        return 0


class WorldConnection:
    """A connection to a world under way. Close it at the end.

    Raises:
        UnreachableError: rank zero has ended, or this process may not enter its network.
    """

    def __init__(self, place: WorldAddress) -> None:
        self._place = place
        self._network: NetworkNamespace | None = None
        if not place.is_here:
            self._check_interfaces()
            return
        if _born(place.pid) != place.born:  # the number may be another process's by now
            raise UnreachableError(f"its rank zero, process {place.pid}, has ended")
        try:
            self._network = network_of(place.pid)
        except OSError as error:
            raise UnreachableError(f"the network of its rank zero, process {place.pid}: {error.strerror}") from error

    def close(self) -> None:
        if self._network is not None:
            self._network.close()

    def _enter(self) -> None:
        if self._network is not None:
            self._network.enter()

    def start(self, command: Sequence[str], number: int, workers: int, folder: Path) -> "subprocess.Popen[bytes]":
        """Starts a program that joins the world, as process `number` of the `workers` that join from here. It ends
        with this process. `folder`: where it runs, if rank zero is on this host; else here.

        Raises:
            OSError: it cannot be started there.
        """
        starter = os.getpid()

        def enter() -> None:
            self._enter()
            die_with(starter)  # after the line above: the kernel forgets this where a process changes its rights

        return subprocess.Popen(
            command, env=os.environ | self._environment(number, workers), preexec_fn=enter,
            cwd=folder if self._place.is_here else None,
        )  # fmt: skip

    def _environment(self, number: int, workers: int) -> Mapping[str, str]:
        place = self._place
        return {
            "RANK": "1",  # until it has a seat
            "WORLD_SIZE": str(place.workers),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(workers),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
            TOKEN: place.token,
            JOINS: "1",
        } | self._interfaces()

    def _interfaces(self) -> dict[str, str]:
        """The network interface that each of torch's layers is to use, by the environment variable that names it. On
        another host it may have another name, which the user says by these variables."""
        chosen = {} if self._place.is_here else os.environ
        return {name: chosen.get(name, self._place.interface) for name in INTERFACE_VARIABLES}

    def _check_interfaces(self) -> None:
        present = [name for _, name in socket.if_nameindex()]
        for variable, interfaces in self._interfaces().items():
            absent = [name for name in interfaces.split(",") if name and name not in present]
            if absent:
                raise UnreachableError(
                    f"its workers use the network interface {absent[0]}, which this host does not have; set {variable} "
                    f"to the one by which it reaches them, one of {', '.join(present)}"
                )

    def let_go(self, name: str, say: Callable[[str], None], refuse: Callable[[str], None]) -> int:
        """Asks rank zero to let a worker go; returns an exit code: 0 it goes, 1 rank zero does not answer, 2 it cannot.
        `say` gets the message of exit code 0, `refuse` the reason of another one."""
        # In a fork: only a process with one thread can enter another network.
        leaving = Fork(lambda: self._ask(name, say, refuse), dict(os.environ | self._environment(0, 1)))
        _, status = os.waitpid(leaving.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _ask(self, name: str, say: Callable[[str], None], refuse: Callable[[str], None]) -> int:
        self._enter()
        place = self._place
        try:
            patience = timedelta(seconds=REACH_SECONDS)
            store = dist.TCPStore(place.address, place.port, is_master=False, timeout=patience, wait_for_workers=False)
            # torch waits without limit for a rank zero that has stopped.
            refusal = within(LEAVE_SECONDS + REACH_SECONDS, partial(ask_to_let_go, store, name, LEAVE_SECONDS))
        except (dist.DistError, TimeoutError) as error:
            refuse(f"rank zero at {place.address}:{place.port} does not answer: {error}")
            return 1
        if refusal:
            refuse(f"{name}: {refusal}")
            return 2
        say(f"{name} leaves; the others compute its chunks from now on")
        return 0
