"""Starts the ranks of a program on this host, as torchrun does, but on loopback. No rank outlives the launcher."""

import math
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Literal, NamedTuple, Protocol

from distributed.cluster.info import DEFAULT_TIMEOUT, default_worker_name, is_loopback, listening
from distributed.cluster.isolation import NOT_ISOLATED, CannotIsolateError, NetworkNamespace, new_network
from distributed.cluster.meeting import JOINS, TOKEN
from distributed.cluster.processes import PREEMPTIONS, Fork, Process, die_with, ignore_preemptions
from distributed.cluster.store import INTERFACE_VARIABLES, MET_FD, STORE_FD, loopback_interface

REPORT_SECONDS = 6.0
"""Time limit for the first rank to report that another one has failed."""

SAVE_SECONDS = 30.0
"""Time limit for the first rank to save, when it is stopped and another one has ended with an error."""

LEAVE_SECONDS = 10.0
"""Time limit for the other ranks to end by themselves after the first one has succeeded."""

END_SECONDS = 1.0
"""Time limit for ranks to end at SIGTERM."""

FINAL = (2, 3, os.EX_IOERR, 130, 143)
"""Exit codes of a first rank that is not started again: bad config, numbers that are not finite, a disk that has
failed, stopped."""

SAME_REQUEST_SECONDS = 2.0
"""Signals within this time are one request: a terminal, or a supervisor, may signal more than once."""

REPLACE_SECONDS = 2.0
"""On hosts other than the first: time between the end of a rank and the start of a new process in its place. If rank
zero has ended, the other ranks of the host end within this time, and no new process is wanted."""

SIGN_SECONDS = 2.0
"""Time in which a first rank that runs gives a sign of life, see `session`. Another rank's end may be due to it."""

_POLL_SECONDS = 0.05
LAUNCHER = "DISTRIBUTED_LAUNCHER_PID"
"""Environment variable of a rank: the number of the launcher's process. The rank ends with it."""


class CannotListenError(OSError):
    """The launcher cannot listen on the address where the ranks meet."""


class LaunchConfig(NamedTuple):
    """The part of a job that this launcher starts: `workers` ranks on host number `node_rank` of `nnodes`.

    With several hosts the store is at `master_addr`:`master_port`, and all traffic uses the network interface
    `interface`. `isolate` gives the ranks of a world on one host a network of their own: always, never, or where
    the kernel allows it and neither an interface nor an address of the host is asked for. With `goes_on`, the first
    rank can do without the others once all have met, so the end of another one does not end the job; but if the first
    rank has then given no sign of life for `timeout` seconds, it does.
    """

    workers: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    interface: str | None = None
    isolate: bool | Literal["auto"] = "auto"
    goes_on: bool = False
    timeout: float = DEFAULT_TIMEOUT


def use_interface(name: str) -> None:
    """From now on torch opens the connections of this process on this network interface."""
    os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, name))


def check_isolation(config: LaunchConfig) -> None:
    """Starts nothing.

    Raises:
        CannotIsolateError: `launch` would raise it.
    """
    if config.isolate is True:
        _Here((), config).close()


def launch(
    command: Sequence[str] | Callable[[], int],
    config: LaunchConfig,
    *,
    max_restarts: int = 0,
    say: Callable[[str], None] = print,
) -> int:
    """Runs `command` once for each rank and waits. A function runs in forks of this process, see `Fork`.

    SIGTERM and SIGINT are passed on to the world's first rank, and the first rank ends the others. On other hosts, if
    the config says `goes_on`, SIGTERM is passed on to all ranks, which leave the world. A second signal kills all
    ranks; on other hosts without `goes_on` the first one does. SIGUSR1 and SIGUSR2, which announce the end of the whole
    job on all hosts, count as SIGTERM on the first host, and are left to it on the others. When all ranks have ended, a
    handler that was there before gets them.

    If a rank fails, the launcher ends the other ranks and starts all of them again, up to `max_restarts` times. If the
    config says `goes_on`, a new process joins in place of a rank that has failed, also counted as a restart; if none is
    left, the others go on without. A first rank that does not answer has failed. If the first rank has succeeded, the
    others must end soon too.

    Returns:
        0 if all ranks succeeded, or the first one did and the others did not end, or, on another host of a world that
        goes on, one that was there at the end did; the first rank's exit code if it is one of `FINAL`; else 1.

    Raises:
        CannotListenError: the launcher cannot listen on `master_addr`:`master_port`.
        CannotIsolateError: `isolate` is true, and the ranks cannot have a network of their own.
    """
    return Launcher(lambda: _Here(command, config), config, max_restarts, say).run()


class Start(Protocol):
    """One start of all ranks, or of this host's ranks."""

    def rank(self, number: int, *, joins: bool = False) -> Process:
        """Starts a rank, by its number here; `joins`: in place of one that has failed, in a world under way."""
        ...

    def last_sign(self) -> float | None:
        """The time of the first rank's last sign of life, in seconds of `time.monotonic`; None before all have met."""
        ...

    def close(self) -> None:
        """Once the ranks have ended, or have to: gives back what the start has opened."""
        ...


class Launcher:
    """The ranks of one start after the other, as `launch` describes, and the signals that this process gets for them.
    `begin` makes a start, on this host or elsewhere."""

    def __init__(
        self, begin: Callable[[], Start], config: LaunchConfig, max_restarts: int, say: Callable[[str], None]
    ) -> None:
        self._begin, self._config, self._max_restarts, self._say = begin, config, max_restarts, say
        first, size = config.node_rank * config.workers, config.nnodes * config.workers
        self._names = [default_worker_name(rank, size) for rank in range(first, first + config.workers)]
        self._leads = config.node_rank == 0
        self._ranks: list[Process] = []
        self._restarts = 0
        self._stopping: list[int] = []
        self._stopping_since = 0.0
        self._preemption: signal.Signals | None = None

    def run(self) -> int:
        numbers = (signal.SIGTERM, signal.SIGINT, *PREEMPTIONS)
        previous = {number: signal.signal(number, self._pass_on) for number in numbers}
        try:
            while True:
                code = self._run_once()
                if code != 1 or self._stopping or self._preemption or self._restarts == self._max_restarts:
                    return code
                self._restarts += 1
                self._say(f"restart {self._restarts} of {self._max_restarts}")
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            # After the ranks have saved: submitit's handler queues the job again.
            if self._preemption is not None and callable(earlier := previous[self._preemption]):
                earlier(self._preemption, None)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in PREEMPTIONS:
            self._preemption = signal.Signals(number)
            if not self._leads:  # every host gets this signal, and the first one saves for all
                return
            number = signal.SIGTERM
        if not self._stopping:
            self._stopping_since = time.monotonic()
        self._stopping.append(number)
        asks = time.monotonic() - self._stopping_since < SAME_REQUEST_SECONDS
        if asks and self._leads:
            targets, sent = self._ranks[:1], number
        else:
            targets, sent = self._ranks, signal.SIGTERM if asks and self._config.goes_on else signal.SIGKILL
        for process in targets:
            process.send_signal(sent)

    def _run_once(self) -> int:
        """Starts all ranks once and waits."""
        self._ranks.clear()
        start = self._begin()
        try:
            for number in range(self._config.workers):
                if self._stopping:  # a signal came before this rank was started
                    return 128 + self._stopping[0]
                self._ranks.append(start.rank(number))
            if self._stopping:  # a signal came while the last rank was being started
                return 128 + self._stopping[0]
            return self._wait(start)
        finally:
            _stop_ranks(self._ranks, asks=bool(self._stopping))
            start.close()

    def _wait(self, start: Start) -> int:
        """Waits until all ranks have ended, or one has failed without which the others cannot go on; returns the exit
        code of the job."""
        ended: dict[Process, float] = {}
        while self._ranks[0].poll() is None if self._leads else self._running():
            if self._has_failed(start):
                return self._code_of_failure()
            if self._goes_on(start) and not self._stopping and not self._preemption:
                if self._leads and self._first_is_silent(start, ended):
                    self._say(f"{self._names[0]} did not answer within {self._config.timeout:g} s, and is killed")
                    return 1
                self._replace_lost(start, ended)
            time.sleep(_POLL_SECONDS)
        _wait_until(lambda: not self._running() or self._has_failed(start), LEAVE_SECONDS)
        if self._has_failed(start):
            return self._code_of_failure()
        if self._running():
            hanging = " and ".join(self._running())
            self._say(f"{hanging} did not end within {LEAVE_SECONDS:g} s after {self._names[0]}, and is killed")
        return 0 if self._leads or any(process.poll() == 0 for process in self._ranks) else 1

    def _running(self) -> list[str]:
        return [name for name, process in zip(self._names, self._ranks, strict=True) if process.poll() is None]

    def _goes_on(self, start: Start) -> bool:
        """Whether the world can do without any rank but the first."""
        return self._config.goes_on and start.last_sign() is not None

    def _has_failed(self, start: Start) -> bool:
        """Whether a rank has failed without which the others cannot go on."""
        needed = self._ranks[: int(self._leads)] if self._goes_on(start) else self._ranks
        return any(process.poll() for process in needed)

    def _first_is_silent(self, start: Start, ended: Mapping[Process, float]) -> bool:
        """Whether another rank has failed, and the first one has given no sign of life for the time limit."""
        sign, now = start.last_sign() or 0.0, time.monotonic()
        unanswered = (end for end in ended.values() if sign <= end < math.inf)
        return any(now > max(sign + self._config.timeout, end + SIGN_SECONDS) for end in unanswered)

    def _replace_lost(self, start: Start, ended: dict[Process, float]) -> None:
        """Starts a new process for each rank that has failed, as long as restarts are left. The others go on. `ended`
        has the time at which a rank's end was seen; infinite once it is dealt with."""
        now, sign = time.monotonic(), start.last_sign() or 0.0
        for number, process in enumerate(self._ranks):
            code = process.poll()
            if not code:
                continue
            end = ended.setdefault(process, now)
            # On this host: once the first rank has given a sign of life since, so the others do go on.
            if end == math.inf or (sign <= end if self._leads else now - end < REPLACE_SECONDS):
                continue
            ended[process] = math.inf
            line = f"{self._names[number]} {_end_of(code)}; the others go on"
            if self._restarts == self._max_restarts:
                self._say(line)
                continue
            self._restarts += 1
            self._say(
                f"{line}, and a new process joins in its place (restart {self._restarts} of {self._max_restarts})"
            )
            self._ranks[number] = start.rank(number, joins=True)

    def _code_of_failure(self) -> int:
        """After a rank has failed: gives the first one the time to report that, says what it cannot report, and returns
        the exit code of the job."""
        codes = [process.poll() for process in self._ranks]
        # The first rank knows the cause, or is saving. Killed at once it could name or save nothing.
        patience = SAVE_SECONDS if self._stopping else REPORT_SECONDS
        has_ended = _wait_until(lambda: self._ranks[0].poll() is not None, patience)
        for name, code in zip(self._names, codes, strict=True):
            if code and (not self._stopping if code < 0 else codes[0] is None):
                self._say(f"{name} {_end_of(code)}")
        if not has_ended:
            self._say(f"{self._names[0]} did not end within {patience:g} s after that, and is killed")
        first = self._ranks[0].poll()
        if first in FINAL:
            return first
        return 128 + self._stopping[0] if self._stopping and (first is None or first <= 0) else 1


class _Here:
    """A start of the ranks of this host: programs, or forks of this process. All ranks meet at a socket of the first
    host, and share a secret. Those of a world on one host are in a network of their own, if they can have one."""

    def __init__(self, command: Sequence[str] | Callable[[], int], config: LaunchConfig) -> None:
        self._command, self._config = command, config
        self._listener, self._network, self._not_isolated = _listen(config)
        self._port = config.master_port if self._listener is None else self._listener.getsockname()[1]
        # Launchers of other hosts would not know a token that is drawn here.
        self._token = os.environ.get(TOKEN) or (secrets.token_hex() if config.nnodes == 1 else "")
        # The host's first rank writes into this pipe when all have met, and rank zero from then on as a sign of life.
        self._met, self._note = os.pipe()
        self._sign: float | None = None

    def rank(self, number: int, *, joins: bool = False) -> Process:
        command, listener, network, launcher = self._command, self._listener, self._network, os.getpid()
        inherited = {} if number else {MET_FD: self._note}
        if listener is not None and number == 0:
            inherited[STORE_FD] = listener.fileno()
        environment = self._environment(number) | {name: str(fd) for name, fd in inherited.items()}
        environment |= {JOINS: "1"} if joins else {}

        def enter() -> None:
            if network is not None:
                network.enter()
            ignore_preemptions()
            die_with(launcher)  # after the line above: the kernel forgets this where a process changes its rights

        def run() -> int:
            assert callable(command)
            enter()
            if network is not None:
                network.close()
            if listener is not None and number:
                listener.close()  # it is the first rank's
            return command()

        if callable(command):
            process: Process = Fork(run, environment)
        else:
            fds = tuple(inherited.values())
            process = subprocess.Popen(command, env=environment, pass_fds=fds, preexec_fn=enter)
        if number == self._config.workers - 1:
            self._close_listener()  # the first rank has its own copy
        return process

    def _environment(self, local_rank: int) -> dict[str, str]:
        config = self._config
        variables = {
            "RANK": str(config.node_rank * config.workers + local_rank),
            "WORLD_SIZE": str(config.nnodes * config.workers),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(config.workers),
            "MASTER_ADDR": config.master_addr,
            "MASTER_PORT": str(self._port),
            LAUNCHER: str(os.getpid()),
            NOT_ISOLATED: self._not_isolated,
            TOKEN: self._token,
        }
        return os.environ | variables | dict.fromkeys(INTERFACE_VARIABLES, config.interface or loopback_interface())

    def last_sign(self) -> float | None:
        while select.select([self._met], [], [], 0)[0]:
            os.read(self._met, 4096)
            self._sign = time.monotonic()
        return self._sign

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def close(self) -> None:
        self._close_listener()
        if self._network is not None:
            self._network.close()
        os.close(self._met)
        os.close(self._note)


def _listen(config: LaunchConfig) -> tuple[socket.socket | None, NetworkNamespace | None, str]:
    """The store's listening socket, on the first host; the ranks' own network, if they have one; and why they have
    none."""
    obstacle = _obstacle(config)
    if not obstacle:
        try:
            network, inside = new_network(config.master_addr, config.master_port)
            return inside, network, ""
        except CannotIsolateError as error:
            obstacle = str(error)
    if config.isolate is True:
        raise CannotIsolateError(obstacle)
    if config.node_rank > 0:
        return None, None, obstacle
    try:
        return listening(config.master_addr, config.master_port), None, obstacle
    except OSError as error:
        raise CannotListenError(f"{config.master_addr}:{config.master_port}: cannot listen there ({error})") from error


def _obstacle(config: LaunchConfig) -> str:
    """The key of `config` that excludes a network of the ranks' own; empty if there is none."""
    if config.isolate is False:
        return "isolate=false"
    if config.nnodes > 1:
        return f"nnodes={config.nnodes}"
    if config.interface not in (None, loopback_interface()):
        return f"interface={config.interface}"
    return "" if is_loopback(config.master_addr) else f"master_addr={config.master_addr}"


def _end_of(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return condition()


def _stop_ranks(ranks: list[Process], *, asks: bool) -> None:
    """Stops the ranks that still run: SIGTERM first, SIGKILL after a second. `asks`: a user has asked them to stop."""
    # The first rank would take SIGTERM for a request to save and stop. If it still runs, and nobody has asked, all are
    # killed at once.
    by_force = bool(ranks) and ranks[0].poll() is None and not asks
    for number in (signal.SIGKILL,) if by_force else (signal.SIGTERM, signal.SIGKILL):
        for process in ranks:
            process.send_signal(number)
        if _wait_until(lambda: all(process.poll() is not None for process in ranks), END_SECONDS):
            return
