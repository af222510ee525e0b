"""The key-value store where the processes of a world meet before anything else."""

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch.distributed as dist

STORE_FD = "DISTRIBUTED_STORE_FD"
"""Environment variable of rank zero: the listening socket for its store, which `launch` has opened."""

STAND_IN = "DISTRIBUTED_STAND_IN"
"""Environment variable of a rank that `launch` has started for one that was lost: it waits until rank zero has time."""

MET_FD = "DISTRIBUTED_MET_FD"
"""Environment variable of rank zero: the pipe into which it writes when all ranks have met, for `launch`."""

INTERFACE_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that set the network interface of torch's transports."""

_POLL_SECONDS = 0.005
_LATE_SECONDS = 5.0

_MARGIN_SECONDS = 5.0
"""So much later is a thread given up that must end by itself. Python must not end while it is inside torch."""

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


def meet(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Waits until every process of the world has called this; returns an empty store for what they do next.

    After a restart the launcher's store still holds the entries of the earlier processes. So rank zero sets a new
    random call number, every other rank answers it with its own random number, and rank zero acknowledges each
    answer. A rank that sees its own number acknowledged has met this rank zero, and not an earlier one's entries.

    Raises:
        ConnectionError: a rank did not come within `timeout`; the message names it.
    """
    if world_size == 1:
        return dist.PrefixStore(uuid.uuid4().hex, process_store(world_rank, world_size, timeout))
    if os.environ.pop(STAND_IN, None):
        return _stand_in(world_rank, world_size, timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world_size)) if world_rank == 0 else {0}
    late = threading.Timer(_LATE_SECONDS, _warn_of_late_ranks, (missing, world_size, timeout.total_seconds()))
    late.daemon = True
    late.start()
    try:
        if world_rank == 0:
            return _call_ranks(process_store(world_rank, world_size, timeout), world_size, missing, deadline)
        answer = partial(_answer_rank_zero, world_rank, world_size, timeout, deadline)
        return within(timeout.total_seconds() + _MARGIN_SECONDS, answer)
    except dist.DistError as error:
        raise ConnectionError(f"rank 0 of {world_size} has left while the others were coming: {error}") from error
    except TimeoutError as error:
        raise ConnectionError(
            f"rank 0 of {world_size} did not come, or had not met all others, within {timeout.total_seconds():g} s"
        ) from error
    finally:
        late.cancel()


def _stand_in(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """As `meet`, for a rank that rank zero meets when it has time, or never."""
    try:
        return _answer_rank_zero(world_rank, world_size, timeout, deadline=math.inf)
    except dist.DistError as error:
        raise ConnectionError("rank 0 has ended without this stand-in for a lost worker") from error


def within(seconds: float, run: Callable[[], T]) -> T:
    """What `run` returns. A thread calls it, since torch's store waits without limit for a server that has stopped.

    Raises:
        TimeoutError: it has not returned within `seconds`.
    """
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome.result(seconds)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """While torch starts on the store: ends this process, with exit code 1, if that takes longer. Rank zero may stop
    at any moment, and then torch waits for its store without limit, in a way that no exception ends."""
    timer = threading.Timer(seconds, _give_up, (seconds,))
    timer.daemon = True
    if int(os.environ.get("RANK", 0)) > 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(seconds: float) -> None:
    log.error("error: worker%s: rank 0 did not go on within %g s", os.environ["RANK"], seconds)
    os._exit(1)


def _warn_of_late_ranks(missing: set[int], world_size: int, seconds: float) -> None:
    if missing == {0}:
        log.warning("waiting up to %g s for rank 0 of %d, or for ranks that it waits for", seconds, world_size)
    else:
        names = ", ".join(map(str, sorted(missing)))
        log.warning("waiting up to %g s for rank %s of %d", seconds, names, world_size)


_met: tuple[str, dict[int, str]] = ("", {})
"""On rank zero: the number of the last call, and each rank's answer."""


def newcomers(ranks: Iterable[int]) -> set[int]:
    """On rank zero: those of the ranks for which a new process waits to be met."""
    call, answers = _met
    if _store is None or not call:
        return set()
    return {rank for rank in ranks if _store.get(f"{call}/{rank}").decode() != answers[rank]}


def _call_ranks(store: dist.Store, world_size: int, missing: set[int], deadline: float) -> dist.Store:
    """Rank zero's part: returns the store of the call that all ranks have answered; takes them out of `missing`."""
    call = uuid.uuid4().hex
    began = time.monotonic()
    store.set("call", call)
    while missing:
        missing -= {rank for rank in missing if store.check([f"{call}/{rank}"])}
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise ConnectionError(f"rank {names} of {world_size} did not come within {deadline - began:.0f} s")
        time.sleep(_POLL_SECONDS)
    global _met
    _met = call, {rank: store.get(f"{call}/{rank}").decode() for rank in range(1, world_size)}
    for answer in _met[1].values():
        store.set(f"{call}/{answer}", "seen")
    return dist.PrefixStore(call, store)


def _answer_rank_zero(world_rank: int, world_size: int, timeout: timedelta, deadline: float) -> dist.Store:
    """The other ranks' part: returns the store of the call when rank zero has acknowledged the answer."""
    store = process_store(world_rank, world_size, timeout)
    answer = uuid.uuid4().hex
    answered = None
    while time.monotonic() < deadline:
        call = store.get("call").decode() if store.check(["call"]) else None
        if call is not None and call != answered:
            store.set(f"{call}/{world_rank}", answer)
            answered = call
        if call is not None and store.check([f"{call}/{answer}"]):
            return dist.PrefixStore(call, store)
        time.sleep(_POLL_SECONDS)
    raise TimeoutError


def _open(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    if world_size == 1:
        return dist.HashStore()
    if "MASTER_ADDR" not in os.environ:
        raise RuntimeError(f"WORLD_SIZE={world_size} without MASTER_ADDR: start the program by torchrun")
    if world_rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        given = int(os.environ[STORE_FD]) if STORE_FD in os.environ else None
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
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
