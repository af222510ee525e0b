"""The key-value store of a world, and what limits the time that torch spends on it."""

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from distributed.cluster.info import get_world_info, is_here, listening

STORE_FD = "DISTRIBUTED_STORE_FD"
"""Environment variable of rank zero: the listening socket for its store, which `launch` has opened."""

MET_FD = "DISTRIBUTED_MET_FD"
"""Environment variable of a host's first rank: the pipe into which it writes for `launch` when all ranks have met, and
rank zero also from then on, as a sign of life."""

INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that set the network interface of torch's transports."""

T = TypeVar("T")

log = logging.getLogger(__name__)

_store: dist.Store | None = None


def loopback_interface() -> str:
    """The name of this host's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")


def process_store(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of this process's world. It is opened once, so that RPC can start on it again.

    Raises:
        RuntimeError: a world of several processes without MASTER_ADDR; or the store does not answer within
            `timeout`.
    """
    global _store
    if _store is None:
        _store = _open(world_rank, world_size, timeout)
    _store.set_timeout(timeout)
    return _store


def forget_store() -> None:
    """Drops the store, so that this process can join another world."""
    global _store
    _store = None


def within(seconds: float, run: Callable[[], T], progress: Callable[[], object] = lambda: None) -> T:
    """Calls `run` in a thread and returns its result.

    Raises:
        TimeoutError: it has not returned within `seconds`, nor has what `progress` returns changed in such a time.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)

    # torch waits without limit, its store for a server that has stopped; a thread can be left behind.
    threading.Thread(target=call, daemon=True).start()
    while True:
        reached = progress()
        with suppress(TimeoutError):
            outcome.exception(seconds)
        if outcome.done() or progress() == reached:
            return outcome.result(0)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Ends this process, with exit code 1, if torch's start on the store takes longer than `seconds`."""
    # Rank zero may stop at any moment. torch then waits for its store without limit, and no exception ends that.
    timer = threading.Timer(seconds, _give_up, (seconds,))
    timer.daemon = True
    if int(os.environ.get("RANK", 0)) > 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(seconds: float) -> None:
    log.error("error: %s: rank 0 did not go on within %g s", get_world_info().worker_name, seconds)
    os._exit(1)


def _open(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    if "MASTER_ADDR" not in os.environ:
        raise RuntimeError(f"WORLD_SIZE={world_size} without MASTER_ADDR: start the program by torchrun")
    if world_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        given = int(os.environ[STORE_FD]) if STORE_FD in os.environ else None
        if given is None and is_here(address):  # torch would listen on every interface
            try:
                given = listening(address, port).detach()
            except OSError as error:
                # torch says that the port is in use, or shares this process's earlier store there.
                if error.errno != errno.EADDRINUSE:
                    raise RuntimeError(f"MASTER_ADDR={address}: cannot listen there ({error})") from error
        return dist.TCPStore(
            address,
            port,
            None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,  # torch would wait in a way that no signal ends; `meet` waits
            multi_tenant=given is None,
            master_listen_fd=given,
        )
    store: dist.Store
    store, _, _ = next(iter(dist.rendezvous("env://", rank=world_rank, world_size=world_size, timeout=timeout)))
    return store
