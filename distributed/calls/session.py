"""Starts and stops RPC in this process, and knows its workers and time limits.

No other file starts or stops torch's RPC agent. Worlds on one host stay on loopback, except for the store that
torchrun itself opens.

A call nested `d` deep waits only for calls that are nested deeper. Every worker has separate handler threads for each
depth: `window` threads for each caller, and no caller sends more messages than that at once. So calls always end,
however many there are and however wide. Calls deeper than `MAX_DEPTH` are refused.

At the end every worker calls `stop_rpc`: each other worker reports to rank zero that it has finished, or failed, and
goes on serving calls; rank zero waits for all reports and dismisses the others; all leave together.
"""

import contextlib
import ctypes
import itertools
import logging
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from operator import index
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api as rpc_api
from torch.futures import Future

from distributed.calls.message import Packed, pack, unpack
from distributed.errors import StoppedByLeader, describe, worker_error
from distributed.info import (
    DEFAULT_TIMEOUT,
    GOODBYE_SECONDS,
    check_timeout,
    default_worker_name,
    get_world_info,
    get_world_rank,
    get_world_size,
    set_worker_name,
    stay_on_loopback,
)
from distributed.launch.meeting import ended_after, meet
from distributed.launch.processes import allow_sockets, share_arena

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_DEPTH = 4  # the deepest nesting of remote calls
MAX_WINDOW = 8  # the most messages of one depth that are under way from one caller to one worker
POLL_SECONDS = 1.0  # between two looks at the pings of workers that may be lost
_CALL_THREADS = 256
_OTHER_THREADS = 16
_LAST_WORD_SECONDS = 1.0
_ANSWER_SECONDS = 2.0  # how long a worker may take to answer after an error, or it counts as missing
_GATHER_SECONDS = 0.002
_SCHEME = "distributed"


class Pinger:
    """Pings workers, all at the same time, so that a stopped worker does not hide a dead one."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._pings: dict[str, Future[int]] = {}

    def lost(self, names: Iterable[str]) -> Exception | None:
        """Returns at once: the error of a worker whose last ping has failed; else None. Call it again and again."""
        for name in names:
            try:
                if name in self._pings and self._pings[name].done():
                    self._pings.pop(name).value()
                if name not in self._pings:
                    self._pings[name] = rpc.rpc_async(name, os.getpid, timeout=self._timeout)
            except RuntimeError as error:
                return worker_error(name, error, self._timeout)
        return None


def ping_errors(names: Iterable[str], seconds: float) -> Iterator[tuple[str, Exception]]:
    """Pings workers, all at the same time; gives the name and the error of each that does not answer in `seconds`."""
    pings = {name: rpc.rpc_async(name, os.getpid, timeout=seconds) for name in names}
    for name, answer in pings.items():
        try:
            answer.wait()
        except RuntimeError as error:
            yield name, worker_error(name, error, seconds)


class Session:
    """RPC in this process, from its start to its stop. `name` is this worker's, `store` that of this world."""

    def __init__(self, name: str, options: rpc.TensorPipeRpcBackendOptions, window: int, store: dist.Store) -> None:
        self.name, self.rank, self.store = name, get_world_rank(), store
        self.timeout = float(options.rpc_timeout)  # seconds that a call may take unless the call sets another limit
        # By worker's name, this worker's devices whose tensors can be sent to that worker's GPUs.
        self.device_maps = {worker: set(devices) for worker, devices in options.device_maps.items()}
        self.workers: list[str] = []  # each worker's name, by rank
        self.infos: list[rpc.WorkerInfo] = []  # and its address in torch
        self.joined = threading.Event()  # both are there
        places = itertools.product(range(get_world_size()), range(1, MAX_DEPTH + 1))  # (rank, depth)
        self.slots = {place: threading.Semaphore(window) for place in places}  # free places for messages to that worker
        # The GPU of the thread that started the session; None if that thread has used none.
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # On rank zero, the ranks that have finished, and the failure of each, if any; on the others, rank zero alone,
        # once it has ended the session.
        self.finished: dict[int, str | None] = {}
        self.changed = threading.Condition()  # of `finished`
        self.gatherings: Counter[str] = Counter()  # how many this process has come to, by their members

    def failure(self) -> RuntimeError | None:
        """The failure of the first of the workers that have reported one to rank zero."""
        for rank, cause in sorted(self.finished.items()):
            if rank and cause:
                return RuntimeError(f"{self.workers[rank]} has failed: {cause}")
        return None


_session: Session | None = None
serving: set[int] = set()  # the threads of this process that compute a remote call


def current() -> Session:
    """The session that this process is in. If it is still starting, waits for that. Raises RuntimeError if RPC is not
    started; or, on rank zero, another worker has reported a failure."""
    session = _session
    # The workers leave init_rpc one after the other. A call of a fast one may come before this one knows the names.
    if session is None or not (session.joined.is_set() or session.joined.wait(session.timeout)) or not session.workers:
        raise RuntimeError("RPC is not started: put @auto_init_rpc() on the program's main function")
    if session.finished and (failure := session.failure()) is not None:
        raise failure
    return session


def is_started() -> bool:
    return _session is not None


def get_worker_id(id: str | int | None = None) -> int:  # noqa: A002 (the name is the original's)
    """The rank of a worker given by rank, by name, or None for this one. Raises ValueError if there is none, and
    RuntimeError for a name if RPC is not started."""
    if id is None:
        return get_world_rank()
    if isinstance(id, str):
        names = current().workers
        if id not in names:
            raise ValueError(f"worker={id!r}: the workers are {', '.join(names)}")
        return names.index(id)
    size = len(current().workers) if is_started() else get_world_size()
    if isinstance(id, bool) or not hasattr(id, "__index__") or index(id) not in range(size):
        raise ValueError(f"worker={id!r}: the world has the workers 0 to {size - 1}")
    return index(id)


def use_own_gpu() -> None:
    """Gives this thread the session's GPU. torch's handler threads begin on GPU 0, on every rank."""
    if _session is not None and _session.gpu is not None:
        torch.cuda.set_device(_session.gpu)


def default_timeout() -> float:
    """Seconds that a call of this session may take unless the call sets another limit."""
    return _session.timeout if _session else DEFAULT_TIMEOUT


def gather(value: T, worker_names: set[str] | None = None) -> dict[str, T]:
    """Every worker's value, by name. Waits until all workers, or those named, have called this. Raises as
    `distributed.world.barrier`."""
    session = current()
    store = session.store
    group = sorted(worker_names or session.workers)
    if session.name not in group or not set(group) <= set(session.workers):
        allowed = ", ".join(session.workers)
        raise ValueError(f"worker_names={group}: must be some of {allowed}, with this worker, {session.name}")
    members = " ".join(group)
    number, session.gatherings[members] = session.gatherings[members], session.gatherings[members] + 1
    keys = {name: f"gathering {number} of {members}: {name}" for name in group}
    watch, deadline = Pinger(session.timeout), time.monotonic() + session.timeout
    try:
        store.set(keys[session.name], pack(value, graphs=False, carries=lambda _: False).payload.hex())
        while missing := [name for name in group if not store.check([keys[name]])]:
            lost = watch.lost(missing)
            if (failure := session.failure() or lost) is not None:  # a worker that has failed may have left since
                raise failure
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(missing)} did not come to the barrier within {session.timeout:g} s")
            time.sleep(_GATHER_SECONDS)
        answers = {name: bytes.fromhex(store.get(key).decode()) for name, key in keys.items()}
        return {name: unpack(Packed(answer, [])) for name, answer in answers.items()}
    except dist.DistError as error:
        raise ConnectionError(f"{session.workers[0]} does not answer: {error}") from error


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    info = get_world_info()
    assert _session is not None
    yield _session.store, info.world_rank, info.world_size


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def start_rpc(
    *, name: str | None = None, timeout: float = DEFAULT_TIMEOUT, backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> None:  # fmt: skip
    """Joins this process to its world; returns when all workers have joined. Raises RuntimeError if RPC is started
    already, and ConnectionError if a worker did not join within the time limit.

    Args:
        name: of this worker; default `worker{rank}`.
        timeout: seconds that the others may take to come, and that a remote call may take unless the call sets
            another limit. `rpc_backend_options` have their own limit, which replaces this one.
        backend, rpc_backend_options: as for `torch.distributed.rpc.init_rpc`; the number of threads is raised
            to what nested calls need, and the default `init_method` means the store of this package.
    """
    global _session
    if rpc_backend_options is not None:
        timeout = rpc_backend_options.rpc_timeout
    check_timeout(timeout)
    if _session is not None:
        raise RuntimeError("RPC is already started in this process; stop_rpc() ends it")
    share_arena()  # before torch makes its threads
    stay_on_loopback()
    store = meet(timedelta(seconds=timeout))
    info = get_world_info()
    allow_sockets(info.world_size)
    # Every caller has threads of its own at every depth, so in a large world each gets fewer.
    window = max(1, min(MAX_WINDOW, _CALL_THREADS // (MAX_DEPTH * info.world_size)))
    # Private arguments of torch: messages go by sockets only. On one host its default is shared memory, whose threads
    # poll without a pause, and take that time from compute.
    channels = None if torch.cuda.is_available() else ["basic"]
    options = rpc_backend_options or rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=timeout, _transports=["uv"], _channels=channels
    )
    threads = _OTHER_THREADS + MAX_DEPTH * window * info.world_size
    options.num_worker_threads = max(threads, options.num_worker_threads)
    if options.init_method == rpc.constants.DEFAULT_INIT_METHOD:
        options.init_method = f"{_SCHEME}://"
    session = _session = Session(name or default_worker_name(**info._asdict()), options, window, store)
    try:
        # Private names of torch, and a constant of a module that is no argument. It counts the starts and gatherings of
        # a process, but the other processes of this world may be new; and its own time limit for a start is weeks.
        rpc._init_counter = 0
        rpc_api._all_gather_sequence_id.clear()
        rpc_api._all_gather_sequence_id_to_states.clear()
        rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = timedelta(seconds=session.timeout)
        with ended_after(session.timeout + GOODBYE_SECONDS), warnings.catch_warnings():
            # init_rpc itself uses what torch has deprecated
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            rpc.init_rpc(
                session.name, backend=backend, rank=info.world_rank, world_size=info.world_size,
                rpc_backend_options=options,
            )  # fmt: skip
        # Private too: public names give a worker's address by its name, and the others' names are not known yet.
        session.infos = sorted(rpc_api._get_current_rpc_agent().get_worker_infos(), key=lambda worker: worker.id)
        session.workers = [worker.name for worker in session.infos]
        set_worker_name(session.name)
        session.joined.set()
    except BaseException as error:  # RPC is then not started, and can be started again
        session.joined.set()  # calls that wait for the start end
        _session = None
        with contextlib.suppress(RuntimeError):  # torch has not come as far as to have something to shut down
            rpc.shutdown(graceful=False)
        if isinstance(error, dist.DistError):  # of a store that still answers, as the agent's does
            late = f"rank 0, or a rank that it waits for, did not go on within {session.timeout:g} s"
            raise ConnectionError(f"{session.name}: {late}") from error
        raise


def stop_rpc(failure: BaseException | None = None) -> None:
    """Ends the session. Serves the other workers until all have called this; then all leave together. A call that still
    runs after its time limit is left behind, and ends with the program. With `failure`, rank zero does not wait but
    stops the other workers, which then raise. Raises ConnectionError if a worker does not answer, RuntimeError if
    another one has failed, and StoppedByLeader if rank zero has."""
    global _session
    session = _session
    if session is None:
        return
    cause = describe(failure) if failure is not None else None
    together = False
    try:
        end = _dismiss_others if session.rank == 0 else _serve_until_dismissed
        end(session, cause)
        together = cause is None
    finally:
        try:
            _shut_down(session, together)
        finally:
            _session = None
            set_worker_name(None)


def _shut_down(session: Session, together: bool) -> None:
    """Shuts torch's RPC down, which waits without a limit for every call that is served."""

    def shut_torch_down() -> None:
        with contextlib.suppress(RuntimeError):  # a worker died at the very end; torch has dropped the agent even so
            rpc.shutdown(graceful=together, timeout=GOODBYE_SECONDS)

    if together:  # all mains have ended, so torch's last barrier is short
        session.store.set_timeout(timedelta(seconds=GOODBYE_SECONDS))
    ending = threading.Thread(target=shut_torch_down, daemon=True)
    ending.start()
    if together:
        ending.join(session.timeout)
    for thread in [*serving] if ending.is_alive() else ():  # ends Python code; a call that waits in C stays
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
    ending.join(GOODBYE_SECONDS)
    if ending.is_alive():
        log.warning("a call is still running, and ends with this process")
        # The process ends with the program's exit code, before torch waits for its threads again.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "on_exit"):  # of glibc; it passes the exit code on, which atexit does not know
            libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _note_finished(rank: int, failure: str | None) -> None:
    """Another worker has finished, or has failed. Runs on rank zero; and on the others, if `rank` is 0."""
    if _session is not None:
        with _session.changed:
            _session.finished[rank] = failure
            _session.changed.notify_all()


def _dismiss_others(session: Session, cause: str | None) -> None:
    """Rank zero's part of a stop: waits until all others have finished, unless there is a `cause`; then stops them."""
    others = {rank: name for rank, name in enumerate(session.workers) if rank}
    watch = Pinger(session.timeout)
    missing: Exception | None = None
    with session.changed:
        while cause is None and missing is None and not any(session.finished.values()):
            if session.changed.wait_for(lambda: others.keys() <= session.finished.keys(), POLL_SECONDS):
                missing = next((error for _, error in ping_errors(others.values(), GOODBYE_SECONDS)), None)
                break
            missing = watch.lost(name for rank, name in others.items() if rank not in session.finished)
    failure = session.failure() or missing
    reason = cause or (None if failure is None else str(failure))
    patience = GOODBYE_SECONDS if reason is None else _LAST_WORD_SECONDS
    # All at once: a worker that hangs must not keep the others from hearing it.
    running = [name for rank, name in others.items() if session.finished.get(rank) is None]
    for goodbye in [rpc.rpc_async(name, _note_finished, (0, reason), timeout=patience) for name in running]:
        with contextlib.suppress(RuntimeError):  # a worker that has left already needs no goodbye
            goodbye.wait()
    if cause is None and failure is not None:
        raise failure


def _serve_until_dismissed(session: Session, cause: str | None) -> None:
    """The other ranks' part of a stop: reports to rank zero, then serves calls until rank zero ends the session."""
    first = session.workers[0]
    try:
        rpc.rpc_sync(first, _note_finished, (session.rank, cause), timeout=session.timeout)
    except RuntimeError as error:
        if 0 not in session.finished:  # rank zero leaves when all have heard why, this report may then come too late
            raise ConnectionError(f"{first} does not answer: {error}") from error
    watch = Pinger(session.timeout)
    while cause is None:
        with session.changed:
            if session.changed.wait_for(lambda: 0 in session.finished, timeout=POLL_SECONDS):
                break
        lost = watch.lost([first])
        if lost is not None and 0 not in session.finished:  # rank zero may leave right after its goodbye
            raise lost
    if (reason := session.finished.get(0)) is not None:
        raise StoppedByLeader(f"stopped by {first}: {reason}")


def missing_workers() -> tuple[str, bool]:
    """After a call has failed: the workers that are lost, as `worker1 and worker2`, and whether they are dead. If some
    are, names these alone: a worker that does not answer may wait for them. The text is empty if all answer, or no
    session is started."""
    if not is_started():
        return "", False
    session = current()
    lost = dict(ping_errors([name for name in session.workers if name != session.name], _ANSWER_SECONDS))
    dead = [name for name, error in lost.items() if isinstance(error, ConnectionError)]
    return " and ".join(dead or lost), bool(dead)
