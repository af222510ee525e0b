"""Starts the ranks of a program by torch's elastic agent, which starts all again where one is lost.

On one host the ranks' store listens on loopback, in a network of their own where the kernel allows it (`isolation`).
With several hosts each host has an agent, and the first one's store is at an address that the config gives.
"""

import atexit
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from distributed.info import (
    DEFAULT_TIMEOUT,
    default_worker_name,
    is_loopback,
    listening,
    loopback_interface,
    use_interface,
)
from distributed.launch.isolation import NOT_ISOLATED, CannotIsolateError, enter_network, new_network
from distributed.launch.meeting import ENDED, TOKEN, within
from distributed.launch.processes import FINAL, FOLLOWS, LAUNCHER, PREEMPTIONS, STOPPED, STOPS, die_with

LEAVE_SECONDS = 30.0  # time limit for the ranks to end by themselves after the run has ended
SAVE_SECONDS = 600  # time limit for rank zero to save after a request to stop
# Signals within this time are one request: a terminal, or a supervisor, may signal more than once.
SAME_REQUEST_SECONDS = 2.0
_POLL_SECONDS = 0.05


class CannotListenError(OSError):
    """The launcher cannot listen on the address where the ranks meet."""


class LaunchConfig(NamedTuple):
    """The part of a job that is started here: `workers` ranks on host number `node_rank` of `nnodes`.

    With several hosts the store is at `master_addr`:`master_port`, all traffic uses the network interface `interface`,
    and a host may come up to `timeout` seconds after the others. `isolate` gives the ranks of a world on one host a
    network of their own: always, never, or where the kernel allows it and neither an interface nor an address of the
    host is asked for.
    """

    workers: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    interface: str | None = None
    isolate: bool | Literal["auto"] = "auto"
    timeout: float = DEFAULT_TIMEOUT


def check_isolation(config: LaunchConfig) -> None:
    """Raises CannotIsolateError if `launch` would; starts nothing."""
    if config.isolate is True:
        with _listening(config):
            pass


def launch(
    command: Sequence[str] | Callable[[], int], config: LaunchConfig, *, max_restarts: int = 0,
    say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Runs `command` once for each rank and waits. A function runs in forks of this process, which must have one thread
    and must not have used a GPU.

    Where a rank is killed, or ends with an exit code other than 0, all ranks of all hosts are started again, up to
    `max_restarts` times, unless rank zero has noted how the run has ended (`meeting.note_end`). Before that they get
    SIGTERM, and SIGKILL 30 seconds later.

    SIGTERM and SIGINT are passed on to the ranks once; SIGUSR1 and SIGUSR2, which announce the end of the job, count as
    SIGTERM, and a handler of theirs that was there before is called when the ranks have ended. A second request kills.

    Returns how rank zero has ended the run, if it has noted that; else 0 if all ranks succeeded, 128 + the signal that
    stopped this process, or 1. Raises CannotListenError if the launcher cannot listen on its address and port, and
    CannotIsolateError if `isolate` is true, and the ranks cannot have a network of their own.
    """
    with _listening(config) as (listener, network, obstacle):
        run = partial(_run_agent, command, config, listener, obstacle, max_restarts, say)
        if network:
            return _run_isolated(network, run)
        stop = _Stop()
        with handling(stop):
            return run(stop)


def _run_isolated(network: Sequence[int], run: "Callable[[_Stop], int]") -> int:
    """Runs the agent in a fork that has entered the network: this process may need the host's own afterwards."""
    starter = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # the fork would write buffered output a second time
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            stop = _Stop()
            for number in STOPS:
                signal.signal(number, stop)
            enter_network(network)
            die_with(starter)  # not before: the kernel forgets this where a process changes its rights
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            code = run(stop)
        except SignalException as stopped:
            code = 128 + stopped.sigval
        except Exception:  # nothing below would print it
            traceback.print_exc()
        finally:
            with suppress(OSError):  # a reader that has left; nothing may keep this fork from its end
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    with handling(lambda number, frame: os.kill(pid, number)):
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


@contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handles signals by `handler`. In the end, calls the earlier handler of one that has announced the job's end:
    submitit's queues the job again, after the ranks have saved."""
    if threading.current_thread() is not threading.main_thread():  # Python allows it nowhere else
        yield
        return
    announced: int | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal announced
        if number in PREEMPTIONS:
            announced = announced or number
        handler(number, frame)

    previous = {int(number): signal.signal(number, note) for number in STOPS}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
        if announced is not None and callable(earlier := previous[announced]):
            earlier(announced, None)


class _Stop:
    """The handler of signals in the agent's process: the first raises torch's SignalException, which the agent passes
    on to the ranks; a later request kills them."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._since = 0.0
        self.agent: Agent | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number, self._since = int(signal.SIGTERM) if number in PREEMPTIONS else number, time.monotonic()
            raise SignalException(f"stopped by signal {number}", signal.Signals(self.number))
        if time.monotonic() - self._since > SAME_REQUEST_SECONDS and self.agent is not None:
            self.agent.kill_ranks()


def _run_agent(
    command: Sequence[str] | Callable[[], int], config: LaunchConfig, listener: socket.socket | None, not_isolated: str,
    max_restarts: int, say: Callable[[str], None], stop: _Stop,
) -> int:  # fmt: skip
    """Runs torch's agent on this host; returns the exit code of the job."""
    # We say ourselves what torch's agent does. Its loggers have levels and handlers of their own, but all pass their
    # records on to these.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    # Launchers of other hosts would not know a token that is drawn here.
    token = os.environ.get(TOKEN) or (secrets.token_hex() if config.nnodes == 1 else "")
    before = dict(os.environ)
    use_interface(config.interface or loopback_interface())
    os.environ.update({LAUNCHER: str(os.getpid()), NOT_ISOLATED: not_isolated, TOKEN: token})
    # An agent handles these by itself; the signals above are ours, since it would take a second one for another.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    hosts = Hosts(config, listener)
    try:
        with tempfile.TemporaryDirectory(prefix="ranks-") as logs:
            entry: Sequence[Any] = (_run_rank, command, os.getpid()) if callable(command) else command
            spec = WorkerSpec(
                role="rank", local_world_size=config.workers, rdzv_handler=hosts, max_restarts=max_restarts,
                monitor_interval=_POLL_SECONDS, local_addr=config.master_addr, entrypoint=entry[0], args=(*entry[1:],),
            )  # fmt: skip
            stop.agent = agent = Agent(spec, hosts, DefaultLogsSpecs(log_dir=logs), say, stop)
            failed = agent.run().is_failed()
            ended = agent.ended if failed else hosts.ended()
    except SignalException:
        assert stop.number is not None
        return 128 + stop.number if (ended := hosts.ended()) is None else ended
    except (dist.DistError, RendezvousTimeoutError, TimeoutError) as error:
        say(f"host {config.node_rank} of {config.nnodes}: {error}")
        failed, ended = True, None
    finally:
        os.environ.clear()
        os.environ.update(before)
    return int(failed) if ended is None else ended


def _run_rank(run: Callable[[], int], agent: int) -> None:
    """Runs the program's function in a fork, which is to be the agent's process in nothing but its memory."""
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in PREEMPTIONS:  # Slurm and others send them to all; by default they would end the rank
        signal.signal(number, signal.SIG_IGN)
    die_with(agent)
    atexit._clear()  # what the agent's process has registered is not the fork's
    try:
        code = run()
    except SystemExit as leaving:  # 0 without a value returned: the agent would wait for ever
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # torch keeps the traceback to itself
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing does not
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it may wait for the other ranks now, and has nothing to save
    if code:
        sys.exit(code)


class Agent(LocalElasticAgent):
    """torch's agent, which says what has become of its ranks, and does not repeat a run that has ended."""

    # A class of ours, since `elastic_launch` has no place for one: it would repeat a run that has diverged, and its own
    # reports are tracebacks.

    def __init__(
        self, spec: WorkerSpec, hosts: "Hosts", logs: DefaultLogsSpecs, say: Callable[[str], None], stop: _Stop
    ) -> None:
        super().__init__(spec, logs, start_method="fork")
        self._hosts, self._say, self._stop = hosts, say, stop
        self._ended_since: float | None = None
        self.ended: int | None = None  # how the run has ended, after a failure that nothing is to repeat

    def kill_ranks(self) -> None:
        for worker in self.get_worker_group().workers:
            if worker.id:
                with suppress(ProcessLookupError):
                    os.kill(worker.id, signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.number is not None:  # its exception was lost, in code that catches all
            raise SignalException("stopped", signal.Signals(self._stop.number))
        # Of forks torch reports one failure, which may be that of a rank that lost another, and then ends all.
        context = self._pcontext
        forks = context._pc.processes if isinstance(context, MultiprocessContext) and context._pc is not None else ()
        dead = {worker.global_rank: fork.exitcode for worker, fork in zip(worker_group.workers, forks, strict=False)}
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and self._hosts.ended() is not None:
            self._ended_since = self._ended_since or time.monotonic()
            if time.monotonic() - self._ended_since > LEAVE_SECONDS:
                self._say(f"a rank did not end within {LEAVE_SECONDS:g} s after the run, and is killed")
                self.kill_ranks()
        if result.state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            return result
        codes = {rank: code for rank, code in dead.items() if code}
        codes |= {rank: failure.exitcode for rank, failure in result.failures.items()}
        # By now the agent has ended the other ranks by SIGTERM, for which rank zero saves: these are no causes.
        losses = {
            rank: code for rank, code in codes.items()
            if code not in (-signal.SIGTERM, FOLLOWS) and (rank or code not in STOPPED)
        }  # fmt: skip
        causes = losses or codes
        killed = {rank: code for rank, code in causes.items() if code < 0 and dead}  # others may have failed for these
        for rank, code in sorted((killed or causes).items()):
            name = default_worker_name(rank, worker_group.workers[0].world_size)
            if code < 0:
                self._say(f"{name} was killed by {signal.Signals(-code).name}")
            elif rank and code != FOLLOWS:  # rank zero says itself why it ends
                self._say(f"{name} ended with exit code {code}")
        self.ended = self._hosts.ended()
        if self.ended in STOPPED and losses and 0 not in losses:
            self.ended = None
        if self.ended is None:
            self.ended = next((code for code in causes.values() if code in FINAL), None)
        if self.ended is not None:
            self._remaining_restarts = 0
            if self.ended == 0:
                self._exit_barrier()  # type: ignore[no-untyped-call]  # where the agent of rank zero waits
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Rank zero may save for long before it stops; a second request of the user kills it.
        super()._shutdown(death_sig, timeout if self._stop.number is None else SAVE_SECONDS)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        most = worker_group.spec.max_restarts
        count = most - self._remaining_restarts
        self._ended_since = None
        others = "another host starts its ranks again, and so does this one"
        self._say(f"restart {count} of {most}" if count else others)
        super()._restart_workers(worker_group)


class Hosts(StaticTCPRendezvous):
    """Where the agents of a fixed number of hosts meet before each start of the ranks: on a store of the first host.

    torch's class would listen on every interface, and start nothing again.
    """

    def __init__(self, config: LaunchConfig, listener: socket.socket | None) -> None:
        port = config.master_port if listener is None else listener.getsockname()[1]
        super().__init__(config.master_addr, port, config.node_rank, config.nnodes, "run", int(config.timeout))
        self._config, self._listener = config, listener

    def next_rendezvous(self) -> RendezvousInfo:
        config = self._config
        if self._store is None:
            self._store = dist.TCPStore(
                config.master_addr, self.master_port, is_master=self._listener is not None, wait_for_workers=False,
                timeout=timedelta(seconds=config.timeout),
                master_listen_fd=None if self._listener is None else self._listener.detach(),
            )  # fmt: skip
        store = self._store
        if config.node_rank == 0:
            store.delete_key(ENDED)
        number = store.add("starts", 0) + 1
        deadline = time.monotonic() + max(config.timeout, 60.0)  # another host may kill a stopped rank for 30 s
        if store.add(f"start {number}", 1) == config.nnodes:
            store.add("starts", 1)
        while store.add("starts", 0) < number:
            if time.monotonic() > deadline:
                come = store.add(f"start {number}", 0)
                raise RendezvousTimeoutError(f"{come} of {config.nnodes} hosts came within {config.timeout:g} s")
            time.sleep(_POLL_SECONDS)
        place = RendezvousStoreInfo(config.master_addr, self.master_port)
        return RendezvousInfo(dist.PrefixStore(f"agents {number}", store), config.node_rank, config.nnodes, place)

    def ended(self) -> int | None:
        """The exit code with which rank zero has ended the run; None if it has not, or is lost."""
        store = self._store

        def look() -> int | None:
            return int(store.get(ENDED)) if store is not None and store.check([ENDED]) else None

        try:
            return look() if self._config.nnodes == 1 else within(self._config.timeout, look)
        except (dist.DistError, TimeoutError):  # the first host has left
            return None

    def num_nodes_waiting(self) -> int:
        store = self._store
        if store is None or self._config.nnodes == 1:
            return 0
        # In a thread: behind a link that is cut torch would wait without limit, and no signal would end that.
        return within(self._config.timeout, lambda: store.add(f"start {store.add('starts', 0) + 1}", 0))


@contextmanager
def _listening(config: LaunchConfig) -> Iterator[tuple[socket.socket | None, Sequence[int], str]]:
    """Gives, and closes in the end: the store's listening socket, on the first host; the ranks' own network, if they
    have one. Also gives the reason why they have none."""
    listener: socket.socket | None = None
    network: Sequence[int] = ()
    obstacles = {
        "isolate=false": config.isolate is False,
        f"nnodes={config.nnodes}": config.nnodes > 1,
        f"interface={config.interface}": config.interface not in (None, loopback_interface()),
        f"master_addr={config.master_addr}": not is_loopback(config.master_addr),
    }
    obstacle = next((text for text, holds in obstacles.items() if holds), "")
    if not obstacle:
        try:
            network, listener = new_network(config.master_addr, config.master_port)
        except CannotIsolateError as error:
            obstacle = str(error)
    if obstacle and config.isolate is True:
        raise CannotIsolateError(obstacle)
    if obstacle and config.node_rank == 0:
        try:
            listener = listening(config.master_addr, config.master_port)
        except OSError as error:
            place = f"{config.master_addr}:{config.master_port}"
            raise CannotListenError(f"{place}: cannot listen there ({error})") from error
    try:
        yield listener, network, obstacle
    finally:
        if listener is not None:
            listener.close()
        for namespace in network:
            os.close(namespace)
