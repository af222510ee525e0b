"""Starts the ranks of a program on this host, as torchrun does, but on loopback. No rank outlives the launcher."""

import ctypes
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Literal, NamedTuple, NoReturn, Protocol

from distributed.engine.isolation import NOT_ISOLATED, CannotIsolateError, Network, new_network
from distributed.engine.store import INTERFACE_VARIABLES, MET_FD, STORE_FD, loopback_interface

REPORT_SECONDS = 6.0
"""How long the first rank may take to report that another one has failed."""

SAVE_SECONDS = 30.0
"""How long the first rank may take to save when it is stopped, and another one has ended with an error."""

LEAVE_SECONDS = 10.0
"""How long the other ranks may take to end by themselves after the first one has succeeded."""

END_SECONDS = 1.0
"""How long ranks may take to end at SIGTERM."""

FINAL = (2, 3, 130, 143)
"""Exit codes of a first rank that is not started again: bad config, numbers that are not finite, stopped."""

SAME_REQUEST_SECONDS = 2.0
"""A terminal, or a supervisor, may signal more than once: within this time it is one request."""

_POLL_SECONDS = 0.05
_LAUNCHER = "DISTRIBUTED_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class CannotListenError(OSError):
    """The launcher cannot listen on the address where the ranks shall meet."""


class LaunchConfig(NamedTuple):
    """The part of a job that this launcher starts: `workers` ranks on host number `node_rank` of `nnodes`.

    With several hosts the store is at `master_addr`:`master_port`, and all traffic uses the network interface
    `interface`. `isolate` gives the ranks of a world on one host a network of their own: always, never, or where
    the kernel allows it and neither an interface nor an address of the host is asked for. With `goes_on`, the first
    rank can do without the others once all have met, so the end of another one does not end the job.
    """

    workers: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    interface: str | None = None
    isolate: bool | Literal["auto"] = "auto"
    goes_on: bool = False


def use_interface(name: str) -> None:
    """From now on torch opens the connections of this process on this network interface."""
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, name))


def _die_with(launcher: int) -> None:
    """In a new rank: asks the kernel (Linux) to kill it when its launcher dies, for any reason."""
    if sys.platform.startswith("linux"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)


class Process(Protocol):
    """What the launcher needs of a rank's process."""

    def poll(self) -> int | None:
        """The exit code, below 0 for a signal; None while it runs."""
        ...

    def send_signal(self, sig: int) -> None:
        """Does nothing if the process has ended."""
        ...


class _Fork:
    """A fork of this process that runs a function and ends with its exit code.

    This process must not have threads that hold locks, nor have used a GPU.
    """

    def __init__(self, run: Callable[[], int], environment: dict[str, str]) -> None:
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        signals = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # the launcher's handlers are not the rank's
        self.pid = os.fork()
        if self.pid == 0:
            self._become_rank(run, environment, signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _become_rank(
        self, run: Callable[[], int], environment: dict[str, str], signals: set[signal.Signals]
    ) -> NoReturn:
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            os.environ.clear()
            os.environ.update(environment)
            code = run()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def check_isolation(config: LaunchConfig) -> None:
    """Starts nothing.

    Raises:
        CannotIsolateError: `launch` would raise it.
    """
    if config.isolate is True:
        _open_meeting(config).close()


def launch(
    command: Sequence[str] | Callable[[], int],
    config: LaunchConfig,
    *,
    max_restarts: int = 0,
    say: Callable[[str], None] = print,
) -> int:
    """Runs `command` once for each rank and waits. A function runs in forks of this process, see `_Fork`.

    SIGTERM and SIGINT are passed on to the world's first rank, and the first rank ends the others. A second signal
    kills all ranks. On other hosts the first one does. If a rank fails, the launcher ends the other ranks and starts
    all of them again, up to `max_restarts` times. If the first rank has succeeded, the others must end soon too.

    Returns:
        0 if all ranks succeeded, or the first one did and the others did not end; the first rank's exit code if it is
        one of `FINAL`; else 1.

    Raises:
        CannotListenError: the launcher cannot listen on `master_addr`:`master_port`.
        CannotIsolateError: `isolate` is true, and the ranks cannot have a network of their own.
    """
    stopping: list[int] = []
    ranks: list[Process] = []
    since = 0.0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if not stopping:
            since = time.monotonic()
        stopping.append(number)
        asks = config.node_rank == 0 and time.monotonic() - since < SAME_REQUEST_SECONDS
        for process in ranks[:1] if asks else ranks:
            process.send_signal(number if asks else signal.SIGKILL)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for restart in range(max_restarts + 1):
            if restart:
                say(f"restart {restart} of {max_restarts}")
            code = _run_once(command, config, ranks, stopping, say)
            if code != 1 or stopping:
                break
        return code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_once(
    command: Sequence[str] | Callable[[], int],
    config: LaunchConfig,
    ranks: list[Process],
    stopping: list[int],
    say: Callable[[str], None],
) -> int:
    """Starts all ranks once and waits. It fills `ranks`, which the signal handler reads."""
    ranks.clear()
    meeting = _open_meeting(config)
    try:
        for local_rank in range(config.workers):
            if stopping:  # a signal came before this rank was started
                return 128 + stopping[0]
            ranks.append(_start(command, config, local_rank, meeting))
        meeting.close()  # the first rank has its own copy of the listener
        if stopping:  # a signal came while the last rank was being started
            return 128 + stopping[0]
        return _wait_for_ranks(ranks, config, meeting, stopping, say)
    finally:
        meeting.close()
        os.close(meeting.met)
        os.close(meeting.note)
        _stop_ranks(ranks, asks=bool(stopping))


class _Meeting:
    """Where the ranks meet.

    Attributes:
        listener: the store's listening socket, on the first host.
        network: the network that the ranks enter, if they have one of their own.
        not_isolated: why they have none.
        met, note: the ends of a pipe, into which the first rank writes when all have met.
    """

    def __init__(self, listener: socket.socket | None, network: Network | None, not_isolated: str) -> None:
        self.listener, self.network, self.not_isolated = listener, network, not_isolated
        self.met, self.note = os.pipe()

    def is_over(self) -> bool:
        """Whether all ranks have met."""
        return bool(select.select([self.met], [], [], 0)[0])

    def close(self) -> None:
        """Closes what only the ranks need."""
        if self.listener is not None:
            self.listener.close()
        if self.network is not None:
            self.network.close()


def _open_meeting(config: LaunchConfig) -> _Meeting:
    obstacle = _obstacle(config)
    if not obstacle:
        try:
            network, listener = new_network(config.master_addr, config.master_port)
            return _Meeting(listener, network, "")
        except CannotIsolateError as error:
            obstacle = str(error)
    if config.isolate is True:
        raise CannotIsolateError(obstacle)
    return _Meeting(_listen(config) if config.node_rank == 0 else None, None, obstacle)


def _obstacle(config: LaunchConfig) -> str:
    """What in `config` is against a network of the ranks' own; empty if nothing is."""
    if config.isolate is False:
        return "isolate=false"
    if config.nnodes > 1:
        return f"nnodes={config.nnodes}"
    if config.interface not in (None, loopback_interface()):
        return f"interface={config.interface}"
    return "" if _is_loopback(config.master_addr) else f"master_addr={config.master_addr}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _start(
    command: Sequence[str] | Callable[[], int], config: LaunchConfig, local_rank: int, meeting: _Meeting
) -> Process:
    listener, network = meeting.listener, meeting.network
    fds = (listener.fileno(), meeting.note) if listener is not None and local_rank == 0 else ()
    environment = _environment(config, local_rank, meeting, fds)
    launcher = os.getpid()

    def enter() -> None:
        if network is not None:
            network.enter()
        _die_with(launcher)  # after the line above: the kernel forgets this where a process changes its rights

    if not callable(command):
        return subprocess.Popen(command, env=environment, pass_fds=fds, preexec_fn=enter)

    def run() -> int:
        enter()
        if network is not None:
            network.close()
        if listener is not None and not fds:
            listener.close()  # it is the first rank's
        return command()

    return _Fork(run, environment)


def _listen(config: LaunchConfig) -> socket.socket:
    try:
        return socket.create_server((config.master_addr, config.master_port))
    except OSError as error:
        raise CannotListenError(f"{config.master_addr}:{config.master_port}: cannot listen there ({error})") from error


def _environment(config: LaunchConfig, local_rank: int, meeting: _Meeting, fds: Sequence[int]) -> dict[str, str]:
    interface = config.interface or loopback_interface()
    port = meeting.listener.getsockname()[1] if meeting.listener is not None else config.master_port
    return (
        os.environ
        | {
            "RANK": str(config.node_rank * config.workers + local_rank),
            "WORLD_SIZE": str(config.nnodes * config.workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(config.workers),
            "MASTER_ADDR": config.master_addr,
            "MASTER_PORT": str(port),
            _LAUNCHER: str(os.getpid()),
            NOT_ISOLATED: meeting.not_isolated,
        }
        | dict.fromkeys(INTERFACE_VARIABLES, interface)
        | (dict(zip((STORE_FD, MET_FD), map(str, fds), strict=True)) if fds else {})
    )


def _wait_for_ranks(
    ranks: list[Process], config: LaunchConfig, meeting: _Meeting, stopping: list[int], say: Callable[[str], None]
) -> int:
    """Waits until all ranks have ended, or one has failed without which the others cannot go on; returns the exit code
    of the job."""
    names = [f"worker{config.node_rank * config.workers + i}" for i in range(len(ranks))]
    told: set[str] = set()

    def goes_on() -> bool:
        return config.goes_on and meeting.is_over()

    def running() -> list[str]:
        return [name for name, process in zip(names, ranks, strict=True) if process.poll() is None]

    def one_has_failed() -> bool:
        return any(process.poll() for process in (ranks[:1] if goes_on() else ranks))

    while ranks[0].poll() is None and not one_has_failed():
        if goes_on() and not stopping:
            _tell_ends(ranks[1:], names[1:], told, say)
        time.sleep(_POLL_SECONDS)
    _wait_until(lambda: not running() or one_has_failed(), LEAVE_SECONDS)
    if one_has_failed():
        return _code_of_failure(ranks, names, stopping, say)
    if running():
        say(f"{' and '.join(running())} did not end within {LEAVE_SECONDS:g} s after {names[0]}, and is killed")
    return 0


def _tell_ends(ranks: Sequence[Process], names: Sequence[str], told: set[str], say: Callable[[str], None]) -> None:
    """Says once of each rank that it has failed. The others go on."""
    for name, process in zip(names, ranks, strict=True):
        code = process.poll()
        if code and name not in told:
            told.add(name)
            say(f"{name} {_end_of(code)}; the others go on")


def _end_of(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _code_of_failure(
    ranks: list[Process], names: Sequence[str], stopping: list[int], say: Callable[[str], None]
) -> int:
    """After a rank has failed: gives the first one the time to report that, says what it cannot report, and returns the
    exit code of the job."""
    codes = [process.poll() for process in ranks]
    patience = SAVE_SECONDS if stopping else REPORT_SECONDS
    has_ended = _wait_until(lambda: ranks[0].poll() is not None, patience)
    for name, code in zip(names, codes, strict=True):
        if code and (not stopping if code < 0 else codes[0] is None):
            say(f"{name} {_end_of(code)}")
    if not has_ended:
        say(f"{names[0]} did not end within {patience:g} s after that, and is killed")
    first = ranks[0].poll()
    if first in FINAL:
        return first
    return 128 + stopping[0] if stopping and (first is None or first <= 0) else 1


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return condition()


def _stop_ranks(ranks: list[Process], *, asks: bool) -> None:
    """Stops the ranks that still run: SIGTERM first, SIGKILL after a second. The world's first rank takes SIGTERM for
    a request to save and stop; if nobody `asks` for that, and it still runs, all ranks are killed at once."""
    by_force = bool(ranks) and ranks[0].poll() is None and not asks
    for number in (signal.SIGKILL,) if by_force else (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            process.send_signal(number)
        if _wait_until(lambda: all(process.poll() is not None for process in ranks), END_SECONDS):
            return
