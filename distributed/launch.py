"""Starts the ranks of a program on this host, as torchrun does, but on loopback; leaves no orphan."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

from distributed.world import STORE_FD, loopback_interface

GRACE_SECONDS = 10.0
"""How long the other ranks may take to end after one has failed."""

_PARENT = "DISTRIBUTED_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """Which part of the whole job this launcher starts.

    `workers` ranks on this host, which is number `node_rank` of `nnodes`. With several nodes the
    store is at `master_addr`:`master_port` and all traffic goes over `interface`.
    """

    workers: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    interface: str | None = None


def launched() -> bool:
    """Whether this process is a rank of a world, started by us, torchrun or by hand."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this rank when its launcher dies, however that happens."""
    if not sys.platform.startswith("linux") or not (_PARENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = os.environ.get(_PARENT)
    if launcher is not None and os.getppid() != int(launcher):  # it died before the line above
        os._exit(1)


def launch(command: Sequence[str], place: Place, *, max_restarts: int = 0, say: Callable[[str], None] = print) -> int:
    """Runs `command` once a rank and waits.

    SIGTERM and SIGINT are passed on to the first rank, which ends the others. When a rank fails, the
    others are ended, and all are started again up to `max_restarts` times.

    Returns:
        0 if all ranks ended well; else 130 or 143 after SIGINT or SIGTERM; 2 if the first rank found the
        config bad; else 1.
    """
    restarts = 0
    while True:
        code = _run_once(command, place, say)
        if code != 1 or restarts >= max_restarts:
            return code
        restarts += 1
        say(f"restart {restarts} of {max_restarts}")


def _run_once(command: Sequence[str], place: Place, say: Callable[[str], None]) -> int:
    listener = socket.create_server((place.master_addr, place.master_port)) if place.node_rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else place.master_port
    ranks: list[subprocess.Popen[bytes]] = []
    stopping: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stopping.append(number)
        for process in ranks[:1]:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for local_rank in range(place.workers):
            fds = (listener.fileno(),) if listener is not None and local_rank == 0 else ()
            environment = _environment(place, local_rank, port, fds)
            ranks.append(subprocess.Popen(command, env=environment, pass_fds=fds))
        if listener is not None:
            listener.close()
        return _wait(ranks, place, stopping, say)
    finally:
        _end(ranks)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _environment(place: Place, local_rank: int, port: int, fds: Sequence[int]) -> dict[str, str]:
    interface = place.interface or loopback_interface()
    return (
        os.environ
        | {
            "RANK": str(place.node_rank * place.workers + local_rank),
            "WORLD_SIZE": str(place.nnodes * place.workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(place.workers),
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            _PARENT: str(os.getpid()),
        }
        | ({STORE_FD: str(fds[0])} if fds else {})
    )


def _wait(ranks: list[subprocess.Popen[bytes]], place: Place, stopping: list[int], say: Callable[[str], None]) -> int:
    """Until all have ended, or one has failed."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [i for i, code in enumerate(codes) if code not in (None, 0)]
        if failed and ranks[0].poll() is None:
            # A rank has ended early. The first one sees its calls fail and says so itself; give it time.
            _wait_until(lambda: ranks[0].poll() is not None, GRACE_SECONDS)
        if failed:
            for i in failed:
                code = codes[i]
                if code is not None and code < 0:
                    say(f"worker{place.node_rank * place.workers + i} was killed by {signal.Signals(-code).name}")
            if stopping:
                return 128 + stopping[0]
            return 2 if ranks[0].poll() == 2 else 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Whoever still runs is asked to stop, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)
        if _wait_until(lambda: all(process.poll() is not None for process in ranks), GRACE_SECONDS):
            return
