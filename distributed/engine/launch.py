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

from distributed.engine.store import INTERFACE_VARIABLES, STORE_FD, loopback_interface

GRACE_SECONDS = 10.0
"""How long the first rank may take to say what has failed, and all may take to end when they are stopped."""

END_SECONDS = 1.0
"""How long the others may take to end after the first has."""

_PARENT = "DISTRIBUTED_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1


class CannotListenError(OSError):
    """The address that the ranks are to meet at cannot be had."""


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


def use_interface(name: str) -> None:
    """What torch opens in this process from here on, it opens on this network interface."""
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, name))


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

    SIGTERM and SIGINT are passed on to the world's first rank, which ends the others; on other hosts they
    end this host's ranks. When a rank fails, the others are ended, and all are started again up to
    `max_restarts` times.

    Returns:
        0 if all ranks ended well; the first rank's exit code where that is 2 (bad config), 130 or 143
        (stopped); else 1.

    Raises:
        CannotListenError: `master_addr` and `master_port` cannot be listened on.
    """
    stopping: list[int] = []
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        stopping.append(number)
        for process in ranks[:1] if place.node_rank == 0 else ranks:
            process.send_signal(number if place.node_rank == 0 else signal.SIGKILL)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for restart in range(max_restarts + 1):
            if restart:
                say(f"restart {restart} of {max_restarts}")
            code = _run_once(command, place, ranks, stopping, say)
            if code != 1 or stopping:
                break
        return code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_once(
    command: Sequence[str],
    place: Place,
    ranks: list[subprocess.Popen[bytes]],
    stopping: list[int],
    say: Callable[[str], None],
) -> int:
    """One start of all ranks, which are put into `ranks` for the signal handler to see."""
    ranks.clear()
    listener = _listen(place) if place.node_rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else place.master_port
    try:
        for local_rank in range(place.workers):
            if stopping:  # a signal came before there was anyone to pass it on to
                return 128 + stopping[0]
            fds = (listener.fileno(),) if listener is not None and local_rank == 0 else ()
            environment = _environment(place, local_rank, port, fds)
            ranks.append(subprocess.Popen(command, env=environment, pass_fds=fds))
        if listener is not None:
            listener.close()  # it is the first rank's now
        if stopping:  # or while the last was being started
            return 128 + stopping[0]
        return _wait(ranks, place, stopping, say)
    finally:
        if listener is not None:
            listener.close()
        _end(ranks)


def _listen(place: Place) -> socket.socket:
    try:
        return socket.create_server((place.master_addr, place.master_port))
    except OSError as error:
        raise CannotListenError(f"{place.master_addr}:{place.master_port}: cannot listen there ({error})") from error


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
            _PARENT: str(os.getpid()),
        }
        | dict.fromkeys(INTERFACE_VARIABLES, interface)
        | ({STORE_FD: str(fds[0])} if fds else {})
    )


def _wait(ranks: list[subprocess.Popen[bytes]], place: Place, stopping: list[int], say: Callable[[str], None]) -> int:
    """Until all have ended, or one has failed."""
    while True:
        codes = [process.poll() for process in ranks]
        if all(code == 0 for code in codes):
            return 0
        failed = {i: code for i, code in enumerate(codes) if code}
        if failed:
            # The first rank sees its calls fail and says so itself; give it time.
            _wait_until(lambda: ranks[0].poll() is not None, GRACE_SECONDS)
            for i, code in failed.items():
                name = f"worker{place.node_rank * place.workers + i}"
                if code < 0 and not stopping:
                    say(f"{name} was killed by {signal.Signals(-code).name}")
                elif code > 0 and codes[0] is None:
                    say(f"{name} ended with exit code {code}")
            first = ranks[0].poll()
            if first in (2, 130, 143):
                return first
            return 128 + stopping[0] if stopping and (first is None or first <= 0) else 1
        time.sleep(0.05)


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Whoever still runs is asked to stop, then made to; soon where the first rank, which they serve, has ended."""
    patience = GRACE_SECONDS if ranks and ranks[0].poll() is None else END_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)
        if _wait_until(lambda: all(process.poll() is not None for process in ranks), patience):
            return
