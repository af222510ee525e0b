"""Where the processes of a world first meet: a key-value store."""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

STORE_FD = "DISTRIBUTED_STORE_FD"
"""Environment variable of rank zero: the listening socket, opened by `launch`, that its store serves."""

INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What tells torch's transports the network interface to use."""

_store: dist.Store | None = None
_meetings = 0


def loopback_interface() -> str:
    """The name of this host's loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")


def process_store(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of this process's world: opened once, so that RPC can start again on it.

    Raises:
        RuntimeError: a world of several processes that does not say where to meet, or a store that does
            not answer within `timeout`.
    """
    global _store
    if _store is None:
        _store = _open(world_rank, world_size, timeout)
    _store.set_timeout(timeout)
    return _store


def forget_store() -> None:
    """Lets go of the store, so that this process can join another world."""
    global _store, _meetings
    _store, _meetings = None, 0


def meet(world_rank: int, world_size: int, timeout: timedelta) -> int:
    """Waits until every process of the world has come here as often as this one; returns how often that was before.

    Raises:
        ConnectionError: someone did not come within `timeout`; the message names who.
    """
    global _meetings
    store = process_store(world_rank, world_size, timeout)
    keys = [f"meeting{_meetings}/{rank}" for rank in range(world_size)]
    store.set(keys[world_rank], "here")
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:  # rank zero has given up and taken the store with it
            raise ConnectionError(f"rank 0 of {world_size} has left while the others were coming") from error
        raise ConnectionError(
            f"rank {', '.join(missing)} of {world_size} did not come within {timeout.total_seconds():g} s"
        ) from error
    _meetings += 1
    return _meetings - 1


def _open(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    if STORE_FD in os.environ and world_rank == 0:
        port, fd = int(os.environ["MASTER_PORT"]), int(os.environ[STORE_FD])
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
    if "MASTER_ADDR" not in os.environ:
        raise RuntimeError(f"WORLD_SIZE={world_size} without MASTER_ADDR: start the program by torchrun")
    store: dist.Store
    store, _, _ = next(iter(dist.rendezvous("env://", rank=world_rank, world_size=world_size, timeout=timeout)))
    return store
