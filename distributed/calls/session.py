"""Starts and stops RPC in this process, and knows its workers and time limits.

No other file starts or stops torch's RPC agent. Worlds on one host stay on loopback, except for the store that
torchrun itself opens.

A call nested `d` deep waits only for calls that are nested deeper. Every worker has separate handler threads for each
depth: `window` threads for each caller, and no caller sends more messages than that at once. So calls always end,
however many there are and however wide. Calls deeper than `MAX_DEPTH` are refused. A call that waits for futures of its
function (`async_execution`) keeps its place among the messages, but not its thread.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc import api as rpc_api

from distributed.calls.shutdown import GOODBYE_SECONDS, is_stuck, shut_down
from distributed.calls.traffic import MessageSlots
from distributed.cluster.info import (
    DEFAULT_TIMEOUT,
    check_timeout,
    default_worker_name,
    get_world_info,
    get_world_rank,
    get_world_size,
    is_loopback,
    on_one_host,
    set_worker_name,
)
from distributed.cluster.meeting import Seat, meet, meet_again
from distributed.cluster.processes import allow_sockets, share_arena
from distributed.cluster.store import INTERFACE_VARIABLES, MET_FD, ended_after, loopback_interface
from distributed.cluster.watching import Gathering, forget_gatherings, ping_errors

T = TypeVar("T")
DeviceMaps = Mapping[str, Mapping[int | str | torch.device, int | str | torch.device]]

log = logging.getLogger(__name__)

MAX_DEPTH = 4
"""The deepest nesting of remote calls."""

MAX_WINDOW = 8
"""The most messages of one depth that are under way from one caller to one worker."""

_CALL_THREADS = 256
_OTHER_THREADS = 16
_START_SECONDS = 2.0
"""Time limit of the first start after the processes have met again. It doubles with every further start."""

_STARTS = 3
"""A new process gives up after this number of failed starts."""

_SIGN_SECONDS = 0.5
"""Time between two signs of life, see `launch.SIGN_SECONDS`."""

_SCHEME = "distributed"


class Session:
    """RPC in this process, from its start to its stop.

    Attributes:
        name, rank: of this worker.
        timeout: seconds that a call may take unless the call sets another limit.
        device_maps: by worker's name, this worker's devices whose tensors can be sent to that worker's GPUs.
        workers, infos: each worker's name, and its address in torch, by rank; known once `joined` is set.
        slots: by (rank, depth), free places for messages to that worker.
        losses: the ranks that calls with retries have lost, one call after the other.
        away: the ranks that the program has given up. They get no items that any free worker may take, and a stop does
            not wait for them.
        leaving: on rank zero, the ranks that have asked to leave.
        expected: the number of workers if none had been lost.
        settings: the arguments of `start_rpc`.
        gpu: the GPU of the thread that started the session; None if that thread has used none.
        finished: on rank zero, the ranks that have finished, and the failure of each, if any.
        stopped, failure: on the other ranks, whether rank zero has ended the session, and why.
        whole: whether no worker is lost, so that torch can let all leave together.
        goes_on: whether the end of the session is the beginning of the next one.
    """

    def __init__(self, name: str, options: rpc.TensorPipeRpcBackendOptions, window: int, settings: "_Settings") -> None:
        self.name = name
        self.settings = settings
        self.rank = get_world_rank()
        self.timeout = float(options.rpc_timeout)
        self.device_maps = {worker: set(devices) for worker, devices in options.device_maps.items()}
        self.joined = threading.Event()
        self.workers: list[str] = []
        self.infos: list[rpc.WorkerInfo] = []
        places = itertools.product(range(get_world_size()), range(1, MAX_DEPTH + 1))
        self.slots = {place: MessageSlots(window) for place in places}
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.losses: list[int] = []
        self.away: set[int] = set()
        self.leaving: set[int] = set()
        self.expected = get_world_size()
        self.changed = threading.Condition()
        self.finished: dict[int, str | None] = {}
        self.stopped = False
        self.failure: str | None = None
        self.whole = True
        self.goes_on = False

    def present(self) -> list[int]:
        """The ranks that are not away."""
        return [rank for rank in range(len(self.workers)) if rank not in self.away]

    def lost(self) -> int:
        """The number of workers that are lost and not replaced."""
        return self.expected - len(self.present())

    def failures(self) -> list[str]:
        """The failures that other workers have reported to rank zero."""
        return [f"{self.workers[rank]} has failed: {cause}" for rank, cause in sorted(self.finished.items()) if cause]


_session: Session | None = None


def current() -> Session:
    """The session that this process is in. If it is still starting, waits for that.

    Raises:
        RuntimeError: RPC is not started; or, on rank zero, another worker has reported a failure.
    """
    session = _session
    # The workers leave init_rpc one after the other. A call of a fast one may come before this one knows the names.
    if session is None or not (session.joined.is_set() or session.joined.wait(session.timeout)) or not session.workers:
        raise RuntimeError("RPC is not started: put @auto_init_rpc() on the program's main function")
    if session.finished:
        for failure in session.failures():
            raise RuntimeError(failure)
    return session


def present() -> Session | None:
    """The session that this process is in, also while it starts."""
    return _session


def is_started() -> bool:
    return _session is not None


def use_own_gpu() -> None:
    """Gives this thread the session's GPU. torch's handler threads begin on GPU 0, on every rank."""
    if _session is not None and _session.gpu is not None:
        torch.cuda.set_device(_session.gpu)


def default_timeout() -> float:
    """Seconds that a call of this session may take unless the call sets another limit."""
    return _session.timeout if _session else DEFAULT_TIMEOUT


def gather(value: T, worker_names: set[str] | None = None) -> dict[str, T]:
    """Every worker's value, by name. Waits until all workers, or those named, have called this; see `Gathering`.

    Raises:
        ValueError: there is no such worker, or this worker is not among those named.
    """
    session = current()
    group = sorted(worker_names or session.workers)
    if session.name not in group or not set(group) <= set(session.workers):
        known = ", ".join(session.workers)
        raise ValueError(f"worker_names={group}: must be some of {known}, with this worker, {session.name}")
    return Gathering(session.name, group, session.timeout, session.failures).gather(value)


# Start


_meeting_store: dist.Store | None = None


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    assert _meeting_store is not None
    info = get_world_info()
    yield _meeting_store, info.world_rank, info.world_size


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def stay_on_loopback() -> None:
    """If the world is on one host, or meets at a loopback address: torch listens on loopback only from now on."""
    if on_one_host() or is_loopback(os.environ.get("MASTER_ADDR", "")):
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, loopback_interface())


def start_rpc(
    *,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
    device_maps: DeviceMaps | None = None,
) -> None:
    """Joins this process to its world; returns when all workers have joined.

    Args:
        name: of this worker; default `worker{rank}`.
        timeout: seconds that the others may take to come, and that a remote call may take unless the call sets
            another limit. `rpc_backend_options` have their own limit, which replaces this one.
        backend, rpc_backend_options: as for `torch.distributed.rpc.init_rpc`; the number of threads is raised
            to what nested calls need, and the default `init_method` means the store of this package.
        device_maps: worker's name → {own device: its device}, for tensors that go from GPU to GPU.

    Raises:
        RuntimeError: RPC is already started, or a call of the last session has never returned.
        ConnectionError: a worker did not join within the time limit.
    """
    if rpc_backend_options is not None:
        timeout = rpc_backend_options.rpc_timeout
    check_timeout(timeout)
    if _session is not None:
        raise RuntimeError("RPC is already started in this process; stop_rpc() ends it")
    share_arena()  # before torch makes its threads
    stay_on_loopback()
    _join(_Settings(name, timeout, backend, rpc_backend_options, device_maps), None)


class _Settings(NamedTuple):
    """The arguments of `start_rpc`."""

    name: str | None
    timeout: float
    backend: rpc.BackendType | None
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None
    device_maps: DeviceMaps | None


def begin_again(present: Collection[int] = ()) -> None:
    """Ends RPC in this process and starts it again, with the settings of `start_rpc` but without device maps.

    On rank zero, `present` are the ranks that do the same; newcomers join them.
    """
    settings = current().settings
    leave(together=False)
    # A worker may get another rank, and with it another GPU.
    _join(settings._replace(device_maps=None), present)


def _join(settings: _Settings, present: Collection[int] | None) -> None:
    """Meets the other processes and starts RPC with them. If a start after a second meeting fails, they meet again."""
    if is_stuck():
        raise RuntimeError("RPC cannot be started again in this process: a call of the last session has never returned")
    limit, failed = _START_SECONDS, 0
    leads = get_world_rank() == 0
    seat = meet_again(present, limit) if leads and present is not None else meet(timedelta(seconds=settings.timeout))
    while True:
        try:
            return _start(settings, seat)
        except (RuntimeError, ConnectionError) as error:
            if seat.limit is None:
                raise
            failed += 1
            # A new process may itself be the cause, and would keep the others from going on.
            if present is None and not leads and failed == _STARTS:
                raise ConnectionError(
                    f"this new process reaches the world's store, but not its workers, in {failed} starts: {error}; "
                    "set TP_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the network interface by which it reaches them"
                ) from error
            log.debug("the processes meet once more: %s", error)
        limit = min(2 * limit, settings.timeout)
        seat = meet_again(None, limit) if leads else meet(timedelta(seconds=settings.timeout))


def _start(settings: _Settings, seat: Seat) -> None:
    """Starts torch's RPC agent in a world that has met, and fills the session's `workers` and `infos`."""
    global _session, _meeting_store
    info = get_world_info()
    allow_sockets(info.world_size)
    # Every caller has threads of its own at every depth, so in a large world each gets fewer.
    window = max(1, min(MAX_WINDOW, _CALL_THREADS // (MAX_DEPTH * info.world_size)))
    # Messages go by sockets only. On one host torch's default is shared memory, whose threads poll without a pause, and
    # take that time from compute.
    channels = None if torch.cuda.is_available() else ["basic"]
    options = settings.rpc_backend_options or rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=settings.timeout, _transports=["uv"], _channels=channels
    )
    threads = _OTHER_THREADS + MAX_DEPTH * window * info.world_size
    options.num_worker_threads = max(threads, options.num_worker_threads)
    if options.init_method == rpc.constants.DEFAULT_INIT_METHOD:
        options.init_method = f"{_SCHEME}://"
    for worker, devices in (settings.device_maps or {}).items():
        options.set_device_map(worker, dict(devices))
    session = Session(settings.name or default_worker_name(**info._asdict()), options, window, settings)
    _session = session
    forget_gatherings()
    _meeting_store = seat.store
    try:
        seconds = min(seat.limit or session.timeout, session.timeout)
        options.rpc_timeout = seconds
        patience = timedelta(seconds=seconds)
        # torch counts starts and gatherings per process, but after a restart the other processes may be new. Its own
        # time limit would be weeks.
        rpc._init_counter = 0
        rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = patience
        rpc_api._all_gather_sequence_id.clear()
        rpc_api._all_gather_sequence_id_to_states.clear()
        rank_may_be_new = _without_autograd() if seat.limit else contextlib.nullcontext()
        with ended_after(seconds + GOODBYE_SECONDS), warnings.catch_warnings(), rank_may_be_new:
            # init_rpc itself uses what torch has deprecated
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            rpc.init_rpc(
                session.name, backend=session.settings.backend, rank=info.world_rank, world_size=info.world_size,
                rpc_backend_options=options,
            )  # fmt: skip
        options.rpc_timeout = session.timeout
        rpc._set_rpc_timeout(session.timeout)
        seat.store.set_timeout(timedelta(seconds=session.timeout))
        infos = sorted(rpc_api._get_current_rpc_agent().get_worker_infos(), key=lambda worker: worker.id)
        session.infos = infos
        session.workers = [worker.name for worker in infos]
        set_worker_name(session.name)
        session.joined.set()
        note = os.environ.pop(MET_FD, None)
        if note is not None:  # the launcher waits for this before it lets a run go on without a lost rank
            os.write(int(note), b"1")
            if info.world_rank == 0:
                threading.Thread(target=_give_signs, args=(int(note),), daemon=True).start()
    except BaseException:  # RPC is then not started, and can be started again
        session.joined.set()  # calls that wait for the start end
        _session = None
        if rpc_api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        raise


def _give_signs(note: int) -> None:
    """Lets the launcher know that this process runs, as long as it does."""
    os.set_blocking(note, False)
    while True:
        with contextlib.suppress(OSError):  # the pipe is full, since the launcher has stopped
            os.write(note, b"1")
        time.sleep(_SIGN_SECONDS)


@contextlib.contextmanager
def _without_autograd() -> Iterator[None]:
    """Lets torch's RPC start under another rank than before. Distributed autograd does not work then."""
    # It keeps a process's first rank and refuses another. A world whose members change has no autograd contexts.
    start = dist_autograd._init

    def start_or_keep(worker_id: int) -> None:
        with contextlib.suppress(RuntimeError):
            start(worker_id)

    dist_autograd._init = start_or_keep
    try:
        yield
    finally:
        dist_autograd._init = start


def leave(*, together: bool) -> None:
    """Ends RPC in this process. `together`: all workers do so now."""
    global _session
    session = _session
    if session is not None:
        try:
            if together and _meeting_store is not None:
                # torch's last barrier counts the worlds that a process has left. If another process has left other
                # worlds before, neither finds the other there: all calls have ended by then, so the wait is short.
                _meeting_store.set_timeout(timedelta(seconds=GOODBYE_SECONDS))
            shut_down(graceful=together, timeout=session.timeout)
        finally:
            _session = None
            set_worker_name(None)


def missing_workers(seconds: float) -> tuple[str, bool]:
    """After a call has failed: the workers that are lost, as `worker1 and worker2`, and whether they are dead.

    If some are dead, names these alone: a worker that does not answer within `seconds` may wait for them. The text is
    empty if all answer, or no session is started.
    """
    if not is_started():
        return "", False
    session = current()
    lost = dict(ping_errors([name for name in session.workers if name != session.name], seconds))
    dead = [name for name, error in lost.items() if isinstance(error, ConnectionError)]
    return " and ".join(dead or lost), bool(dead)
