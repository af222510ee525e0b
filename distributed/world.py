"""This process's rank and the other workers; the decorator of the main function, the barrier, rank selectors."""

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import index
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from distributed.calls import rpc
from distributed.calls.session import gather, get_worker_id, start_rpc, stop_rpc
from distributed.errors import describe
from distributed.info import (
    WorldInfo,
    get_local_rank,
    get_local_world_size,
    get_rank,
    get_world_info,
    get_world_rank,
    get_world_size,
)
from distributed.info import default_worker_name as default_worker_name_format

__all__ = [
    "WorldInfo", "auto_init_rpc", "barrier", "default_worker_name_format", "get_local_rank", "get_local_world_size",
    "get_rank", "get_worker_id", "get_world_info", "get_world_rank", "get_world_size", "is_available",
    "not_on_rank", "on_rank", "rank_all", "rank_non_zero_only", "rank_zero_only",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

get_world_info()  # sets its attributes


def is_available() -> bool:
    """Whether this torch was built with RPC."""
    return dist.is_available() and rpc.is_available()


def barrier(worker_names: Iterable[str] | None = None) -> None:
    """Waits until all workers, or those named, have called this. Raises ConnectionError or RuntimeError if a worker is
    lost or has failed, which the message names; TimeoutError if one did not call it within the session's time limit;
    ValueError if there is no such worker, or this one is not among those named."""
    gather(None, set(worker_names or ()) or None)


def auto_init_rpc(
    worker_init_fn: Callable[[], None] | None = None,
    worker_name_format: Callable[..., str] = default_worker_name_format, *, backend: rpc.BackendType | None = None,
    rpc_backend_options: rpc.TensorPipeRpcBackendOptions | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:  # fmt: skip
    """A decorator for the main function: starts RPC before it and stops RPC after it. Raises RuntimeError or
    ConnectionError if `worker_init_fn` failed on another worker, or that worker was lost in it.

    Args:
        worker_init_fn: called on every worker before the function; if it fails on one, all stop.
        worker_name_format: called with the fields of `WorldInfo` as keywords; returns the worker's name.
        backend, rpc_backend_options: as for `torch.distributed.rpc.init_rpc`.
    """

    def decorate(main: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(main)
        def started(*args: P.args, **kwargs: P.kwargs) -> T:
            name = worker_name_format(**get_world_info()._asdict())
            start_rpc(name=name, backend=backend, rpc_backend_options=rpc_backend_options)
            try:
                failure: BaseException | None = None
                try:
                    if worker_init_fn is not None:
                        worker_init_fn()
                except (Exception, SystemExit) as error:
                    failure = error
                causes = gather(None if failure is None else describe(failure))
                if failure is not None:
                    raise failure
                for worker, cause in sorted(causes.items()):
                    if cause is not None:
                        raise RuntimeError(f"worker_init_fn failed on {worker}: {cause}")
                value = main(*args, **kwargs)
            except BaseException as error:
                if isinstance(error, SystemExit) and error.code in (None, 0):  # a good end, as if it had returned
                    stop_rpc()
                    raise
                with suppress(RuntimeError, ConnectionError):  # which would hide the first error
                    stop_rpc(failure=error)
                raise
            stop_rpc()
            return value

        return started

    return decorate


def _on(ranks: tuple[int, ...], includes: Callable[[int], bool]) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    for rank in ranks:
        if isinstance(rank, bool) or not hasattr(rank, "__index__") or index(rank) < 0:
            raise ValueError(f"rank={rank!r}: must be a whole number from 0; type on_rank(0), or on_rank(0, 2) for two")

    def decorate(func: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(func)
        def selected(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return func(*args, **kwargs) if includes(get_world_rank()) else None

        return selected

    return decorate


def on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator: only these ranks call the function, the others get None. Raises ValueError for a rank that is no
    whole number from 0."""
    return _on(ranks, lambda rank: rank in ranks)


def not_on_rank(*ranks: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """A decorator: these ranks get None, the others call the function. Raises ValueError for a rank that is no whole
    number from 0."""
    return _on(ranks, lambda rank: rank not in ranks)


def rank_all(func: Callable[P, T]) -> Callable[P, T | None]:
    """Every rank calls the function."""
    return not_on_rank()(func)


def rank_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Only rank zero calls the function."""
    return on_rank(0)(func)


def rank_non_zero_only(func: Callable[P, T]) -> Callable[P, T | None]:
    """Every rank but zero calls the function."""
    return not_on_rank(0)(func)
