"""The life of RPC in this process: start, who is there, time limits, stop.

The only file that touches the RPC agent's life cycle. Worlds on one host stay on loopback, except for
the store that torchrun itself opens.

A call nested `d` deep waits only for calls that are nested deeper, and every depth has handler threads of
its own on every worker: `window` for each caller, who sends no more at once. So calls of any number and
width end, up to `MAX_DEPTH`; what goes deeper is refused.
"""

import logging
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api as rpc_api

from distributed.engine.info import (
    DEFAULT_TIMEOUT,
    check_timeout,
    default_worker_name,
    get_world_info,
    get_world_rank,
    on_one_host,
    set_worker_name,
)
from distributed.engine.store import INTERFACE_VARIABLES, loopback_interface, meet

T = TypeVar("T")
DeviceMaps = Mapping[str, Mapping[int | str | torch.device, int | str | torch.device]]

log = logging.getLogger(__name__)

MAX_DEPTH = 4
"""How deep remote calls may be nested."""

MAX_WINDOW = 8
"""Messages of one depth that a caller has under way to one worker, at most."""

_CALL_THREADS = 256
_OTHER_THREADS = 16
_GOODBYE_SECONDS = 5.0
_LAST_WORD_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_SCHEME = "distributed"


class StoppedByLeader(RuntimeError):  # noqa: N818 (it is no error of this worker)
    """Rank zero has failed and ended the session."""


class Session:
    """One start of RPC in this process, and who has finished in it (kept by rank zero).

    Attributes:
        name, rank: of this worker.
        timeout: seconds that a call may take where it does not say.
        device_maps: where tensors on a GPU go on each worker.
        workers, infos: everyone's name, and how torch addresses them, by rank.
    """

    def __init__(self, name: str, options: rpc.TensorPipeRpcBackendOptions, window: int) -> None:
        self.name = name
        self.rank = get_world_rank()
        self.timeout = float(options.rpc_timeout)
        self.device_maps = {worker: set(devices) for worker, devices in options.device_maps.items()}
        self.workers: list[str] = []
        self.infos: list[rpc.WorkerInfo] = []
        self.slots: defaultdict[tuple[int, int], threading.Semaphore] = defaultdict(lambda: threading.Semaphore(window))
        self.changed = threading.Condition()
        self.finished: dict[int, str | None] = {}
        self.stopped = False
        self.failure: str | None = None

    def failures(self) -> list[str]:
        """What the others have failed with, as far as rank zero has been told."""
        return [f"{self.workers[rank]} has failed: {cause}" for rank, cause in sorted(self.finished.items()) if cause]


_session: Session | None = None


def current() -> Session:
    """The session that this process is in.

    Raises:
        RuntimeError: RPC is not started; or a worker has failed (known to rank zero).
    """
    if _session is None:
        raise RuntimeError("RPC is not started: put @auto_init_rpc() on the program's main function")
    if _session.finished:
        for failure in _session.failures():
            raise RuntimeError(failure)
    return _session


def is_started() -> bool:
    return _session is not None


def default_timeout() -> float:
    """Seconds that a call of this session may take where the call does not say."""
    return _session.timeout if _session else DEFAULT_TIMEOUT


def gather(value: T, worker_names: set[str] | None = None) -> dict[str, T]:
    """Everyone's value by name, once all workers (or those named) have come here."""
    gathered: dict[str, T] = rpc_api._all_gather(value, worker_names, timeout=default_timeout())
    return gathered


# Start


_meeting: dist.Store | None = None


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    assert _meeting is not None
    info = get_world_info()
    yield _meeting, info.world_rank, info.world_size


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def stay_on_loopback() -> None:
    """In a world on one host: what torch opens from here on listens on loopback only."""
    if on_one_host():
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, loopback_interface())


def _quiet_options(timeout: float) -> rpc.TensorPipeRpcBackendOptions:
    """Messages by sockets alone. torch's default on one host, shared memory, has threads that look for messages
    without a pause, and take that time from those that compute."""
    channels = None if torch.cuda.is_available() else ["basic"]
    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout, _transports=["uv"], _channels=channels)


def start_rpc(
    *,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
    device_maps: DeviceMaps | None = None,
) -> None:
    """Joins this process to its world; returns when everyone is there.

    Args:
        name: of this worker; default `worker{rank}`.
        timeout: seconds that a remote call may take unless it says otherwise; without options of one's own.
        backend, rpc_backend_options: as for `torch.distributed.rpc.init_rpc`; the number of threads is raised
            to what nested calls need, and the default `init_method` stands for our own store.
        device_maps: worker's name → {own device: its device}, for tensors that go from GPU to GPU.

    Raises:
        RuntimeError: RPC is already started.
        ConnectionError: someone did not come within the time limit.
    """
    global _session, _meeting
    check_timeout(timeout)
    if _session is not None:
        raise RuntimeError("RPC is already started in this process; stop_rpc() ends it")
    info = get_world_info()
    stay_on_loopback()
    window = max(1, min(MAX_WINDOW, _CALL_THREADS // (MAX_DEPTH * info.world_size)))
    threads = _OTHER_THREADS + MAX_DEPTH * window * info.world_size
    options = rpc_backend_options or _quiet_options(timeout)
    check_timeout(options.rpc_timeout)
    options.num_worker_threads = max(threads, options.num_worker_threads)
    if options.init_method == rpc.constants.DEFAULT_INIT_METHOD:
        options.init_method = f"{_SCHEME}://"
    for worker, devices in (device_maps or {}).items():
        options.set_device_map(worker, dict(devices))
    session = Session(name or default_worker_name(**info._asdict()), options, window)
    _session = session
    try:
        patience = timedelta(seconds=session.timeout)
        _meeting = meet(info.world_rank, info.world_size, patience)
        # torch counts its starts and gatherings by process, where the others may be new; and it would wait for weeks.
        rpc._init_counter = 0
        rpc.constants.DEFAULT_PROCESS_GROUP_TIMEOUT = patience
        rpc_api._all_gather_sequence_id.clear()
        rpc_api._all_gather_sequence_id_to_states.clear()
        with warnings.catch_warnings():  # init_rpc itself uses what torch has deprecated
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            rpc.init_rpc(
                session.name, backend=backend, rank=info.world_rank, world_size=info.world_size,
                rpc_backend_options=options,
            )  # fmt: skip
        infos = sorted(rpc_api._get_current_rpc_agent().get_worker_infos(), key=lambda worker: worker.id)
        session.infos = infos
        session.workers = [worker.name for worker in infos]
        set_worker_name(session.name)
    except BaseException:
        _session = None
        if rpc_api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
        raise


# Stop


def _note_finished(rank: int, failure: str | None) -> None:
    """On rank zero: worker `rank` has nothing more to do."""
    session = _session
    if session is not None:
        with session.changed:
            session.finished[rank] = failure
            session.changed.notify_all()


def _note_stop(failure: str | None) -> None:
    """On the others: rank zero ends the session."""
    session = _session
    if session is not None:
        with session.changed:
            session.stopped, session.failure = True, failure
            session.changed.notify_all()


def _ping() -> bool:
    return True


def stop_rpc(failure: BaseException | None = None) -> None:
    """Ends the session: serves the others until everyone has come here, then leaves together.

    With `failure`, rank zero does not wait but tells the others to stop; they then raise.

    Raises:
        ConnectionError: a worker is gone.
        RuntimeError: another worker has failed.
    """
    global _session
    session = _session
    if session is None:
        return
    cause = f"{type(failure).__name__}: {failure}" if failure is not None else None
    together = False
    try:
        if get_world_rank() == 0:
            _dismiss_others(session, cause)
        else:
            _serve_until_dismissed(session, cause)
        together = cause is None
    finally:
        try:
            rpc.shutdown(graceful=together, timeout=_GOODBYE_SECONDS)
        except RuntimeError as error:  # someone died on the last metre; torch has let go of the agent all the same
            log.debug("shutdown: %s", error)
        finally:
            _session = None
            set_worker_name(None)


def _dismiss_others(session: Session, cause: str | None) -> None:
    others = dict(enumerate(session.workers))
    others.pop(0)
    missing: BaseException | None = None
    while cause is None and missing is None:
        with session.changed:
            if session.changed.wait_for(lambda: len(session.finished) == len(others), timeout=_LOOK_SECONDS):
                break
        missing = next(filter(None, (_lost(others[rank]) for rank in others if rank not in session.finished)), None)
    failures = session.failures()
    told = cause or (str(missing) if missing else None) or (failures[0] if failures else None)
    patience = _GOODBYE_SECONDS if told is None else _LAST_WORD_SECONDS
    goodbyes = {
        name: rpc.rpc_async(name, _note_stop, (told,), timeout=patience)
        for rank, name in others.items()
        if session.finished.get(rank) is None
    }
    for name, goodbye in goodbyes.items():
        try:
            goodbye.wait()
        except RuntimeError as error:  # whoever has left already needs no goodbye
            log.debug("goodbye to %s: %s", name, error)
    if missing is not None:
        raise missing
    if cause is None and failures:
        raise RuntimeError(failures[0])


def _serve_until_dismissed(session: Session, cause: str | None) -> None:
    first = session.workers[0]
    try:
        rpc.rpc_sync(first, _note_finished, (get_world_rank(), cause), timeout=session.timeout)
    except RuntimeError as error:
        raise ConnectionError(f"{first} does not answer: {error}") from error
    while cause is None:
        with session.changed:
            if session.changed.wait_for(lambda: session.stopped, timeout=_LOOK_SECONDS):
                break
        lost = _lost(first)
        if lost is not None and not session.stopped:
            raise lost
    if session.failure is not None:
        raise StoppedByLeader(f"stopped by {first}: {session.failure}")


def missing_workers(seconds: float) -> list[str]:
    """After a call has failed: who does not answer within so many seconds."""
    session = current()
    others = [name for name in session.workers if name != session.name]
    if len(others) == 1:
        return others
    futures = {name: rpc.rpc_async(name, _ping, timeout=seconds) for name in others}
    missing = []
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError:
            missing.append(name)
    return missing


def _lost(worker: str) -> ConnectionError | None:
    """None if the worker answers."""
    try:
        rpc.rpc_sync(worker, _ping, timeout=default_timeout())
    except RuntimeError as error:
        return ConnectionError(f"{worker} does not answer: {str(error).splitlines()[0]}")
    return None
