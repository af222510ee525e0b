"""Who am I, and who else is there: start and stop of RPC, rank selectors, barrier.

The only file that touches the RPC agent's life cycle. Single-node worlds stay on loopback, except for
the store that torchrun itself opens.
"""

import functools
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.rpc import api as rpc_api

from distributed.store import loopback_interface, process_store

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 60.0
"""Seconds that a remote call may take where nothing else is said."""

_HANDLER_THREADS = 32
_GOODBYE_SECONDS = 5.0
_SCHEME = "distributed"


class WorldInfo(NamedTuple):
    """This process's place among all, and among those of its host."""

    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def rank(self) -> int:
        return self.world_rank

    @property
    def worker_name(self) -> str:
        return _session.name if _session else default_worker_name(**self._asdict())


class StoppedByLeader(RuntimeError):  # noqa: N818 (it is no error of this worker)
    """Rank zero has failed and ended the session."""


class _Session:
    """One start of RPC in this process, and who has finished in it (kept by rank zero)."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name = name
        self.timeout = timeout
        self.changed = threading.Condition()
        self.finished: dict[int, str | None] = {}
        self.stopped = False
        self.failure: str | None = None


_session: _Session | None = None


def get_world_info() -> WorldInfo:
    """Read from RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; a world of one without them."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    return WorldInfo(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def get_world_rank() -> int:
    return get_world_info().world_rank


get_rank = get_world_rank


def get_world_size() -> int:
    return get_world_info().world_size


def get_local_rank() -> int:
    return get_world_info().local_rank


def get_local_world_size() -> int:
    return get_world_info().local_world_size


def default_worker_name(*, world_rank: int, world_size: int, **_: int) -> str:
    """worker0, worker1, …, zero-padded to the width of the world size."""
    return f"worker{world_rank:0{len(str(world_size))}d}"


def is_available() -> bool:
    """Whether this torch was built with RPC."""
    return dist.is_available() and rpc.is_available()


def default_timeout() -> float:
    """Seconds that a call of this session may take where the call does not say."""
    return _session.timeout if _session else DEFAULT_TIMEOUT


def get_worker_id(id: str | int | None = None) -> int:  # noqa: A002 (the name is the original's)
    """The rank of a worker given by rank, by name, or None for this one.

    Raises:
        RuntimeError: a name is asked for before RPC is started.
        ValueError: there is no such worker.
    """
    info = get_world_info()
    if id is None:
        return info.world_rank
    if isinstance(id, str):
        names = {worker.name: worker.id for worker in worker_infos()}
        if id not in names:
            raise ValueError(f"worker={id!r}: the workers are {', '.join(names)}")
        return int(names[id])
    if id not in range(info.world_size):
        raise ValueError(f"worker={id!r}: the world has the workers 0 to {info.world_size - 1}")
    return int(id)


def worker_infos() -> list[rpc.WorkerInfo]:
    """Everyone in the session, by rank.

    Raises:
        RuntimeError: RPC is not started.
    """
    if _session is None:
        raise RuntimeError("RPC is not started: put @auto_init_rpc() on the program's main function")
    return sorted(rpc_api._get_current_rpc_agent().get_worker_infos(), key=lambda worker: worker.id)


def barrier(worker_names: Iterable[str] | None = None) -> None:
    """Waits until all workers, or those named, have come here.

    Raises:
        RuntimeError: they did not within the session's time limit.
    """
    _gather(None, None if worker_names is None else set(worker_names))


def _gather(value: T, worker_names: set[str] | None = None) -> dict[str, T]:
    gathered: dict[str, T] = rpc_api._all_gather(value, worker_names, timeout=default_timeout())
    return gathered


# Start


def check_timeout(seconds: float) -> None:
    """Raises ValueError for what is no time limit."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"timeout={seconds!r}: must be a finite number of seconds above 0; for example timeout=60")


def _rendezvous(url: str, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    info = get_world_info()
    yield (
        process_store(info.world_rank, info.world_size, timedelta(seconds=default_timeout())),
        info.world_rank,
        info.world_size,
    )


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


def start_rpc(
    *,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> None:
    """Joins this process to its world; returns when everyone is there.

    Args:
        name: of this worker; default `worker{rank}`.
        timeout: seconds that a remote call may take unless it says otherwise.
        backend, rpc_backend_options: as for `torch.distributed.rpc.init_rpc`.

    Raises:
        RuntimeError: RPC is already started, or the others did not come within the time limit.
    """
    global _session
    check_timeout(timeout)
    if _session is not None:
        raise RuntimeError("RPC is already started in this process; stop_rpc() ends it")
    info = get_world_info()
    if info.local_world_size == info.world_size:
        for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback_interface())
    options = rpc_backend_options or rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_HANDLER_THREADS, rpc_timeout=timeout, init_method=f"{_SCHEME}://"
    )
    session = _Session(name or default_worker_name(**info._asdict()), float(options.rpc_timeout))
    _session = session
    try:
        process_store(info.world_rank, info.world_size, timedelta(seconds=session.timeout))
        with warnings.catch_warnings():  # init_rpc itself uses what torch has deprecated
            warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
            rpc.init_rpc(
                session.name, backend=backend, rank=info.world_rank, world_size=info.world_size,
                rpc_backend_options=options,
            )  # fmt: skip
    except BaseException:
        _session = None
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


def _dismiss_others(session: _Session, cause: str | None) -> None:
    others = {worker.id: worker.name for worker in worker_infos() if worker.id != 0}
    missing: BaseException | None = None
    while cause is None and missing is None:
        with session.changed:
            if session.changed.wait_for(lambda: len(session.finished) == len(others), timeout=1.0):
                break
        missing = next(filter(None, (_lost(others[rank]) for rank in others if rank not in session.finished)), None)
    failures = [f"{others[rank]}: {text}" for rank, text in sorted(session.finished.items()) if text]
    told = cause or (str(missing) if missing else None) or (failures[0] if failures else None)
    for name in (name for rank, name in others.items() if session.finished.get(rank) is None):
        try:
            rpc.rpc_sync(name, _note_stop, (told,), timeout=_GOODBYE_SECONDS)
        except RuntimeError as error:  # whoever has left already needs no goodbye
            log.debug("goodbye to %s: %s", name, error)
    if missing is not None:
        raise missing
    if cause is None and failures:
        raise RuntimeError(failures[0])


def _serve_until_dismissed(session: _Session, cause: str | None) -> None:
    first = worker_infos()[0].name
    try:
        rpc.rpc_sync(first, _note_finished, (get_world_rank(), cause), timeout=session.timeout)
    except RuntimeError as error:
        raise ConnectionError(f"{first} does not answer: {error}") from error
    while cause is None:
        with session.changed:
            if session.changed.wait_for(lambda: session.stopped, timeout=1.0):
                break
        lost = _lost(first)
        if lost is not None and not session.stopped:
            raise lost
    if session.failure is not None:
        raise StoppedByLeader(f"stopped by {first}: {session.failure}")


def _lost(worker: str) -> ConnectionError | None:
    """None if the worker answers."""
    try:
        rpc.rpc_sync(worker, _ping, timeout=default_timeout())
    except RuntimeError as error:
        return ConnectionError(f"{worker} does not answer: {str(error).splitlines()[0]}")
    return None


def auto_init_rpc(
    worker_init_fn: Callable[[], None] | None = None,
    worker_name_format: Callable[..., str] = default_worker_name,
    *,
    backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for the main function: RPC is started before it and stopped after it.

    Args:
        worker_init_fn: called on every worker before the function; if it fails anywhere, all stop.
        worker_name_format: from the fields of `WorldInfo`, as keywords, to the worker's name.
        backend, rpc_backend_options: as for `torch.distributed.rpc.init_rpc`.

    Raises:
        RuntimeError: `worker_init_fn` failed on another worker.
    """

    def decorate(main: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(main)
        def started(*args: P.args, **kwargs: P.kwargs) -> T:
            name = worker_name_format(**get_world_info()._asdict())
            start_rpc(name=name, backend=backend, rpc_backend_options=rpc_backend_options)
            try:
                _initialise_together(worker_init_fn)
                value = main(*args, **kwargs)
            except BaseException as error:
                try:
                    stop_rpc(failure=error)
                except (RuntimeError, ConnectionError) as later:
                    log.debug("while stopping: %s", later)
                raise
            stop_rpc()
            return value

        return started

    return decorate


def _initialise_together(worker_init_fn: Callable[[], None] | None) -> None:
    own: BaseException | None = None
    if worker_init_fn is not None:
        try:
            worker_init_fn()
        except Exception as error:
            own = error
    causes = _gather(f"{type(own).__name__}: {own}" if own is not None else None)
    if own is not None:
        raise own
    failed = {name: cause for name, cause in causes.items() if cause is not None}
    for name, cause in sorted(failed.items()):
        raise RuntimeError(f"worker_init_fn failed on {name}: {cause}")


# Rank selectors


def _on(chosen: Callable[[int], bool]) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    def decorate(func: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(func)
        def selected(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return func(*args, **kwargs) if chosen(get_world_rank()) else None

        return selected

    return decorate


def on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator: only these ranks call the function, the others get None."""
    return _on(lambda rank: rank in ranks)


def not_on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator: these ranks get None, the others call the function."""
    return _on(lambda rank: rank not in ranks)


def rank_all(func: Callable[P, T]) -> Callable[P, T | None]:
    """Every rank calls the function."""
    return _on(lambda rank: True)(func)


def rank_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Only rank zero calls the function."""
    return on_rank(0)(func)


def rank_non_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Every rank but zero calls the function."""
    return not_on_rank(0)(func)
