"""How the ranks of a world meet, before torch's RPC or its process group starts: on the world's key-value store.

1. Rank zero sets a new random number, the *call*: the store of an agent outlives the processes, and what an earlier
   start has left there must not count.
2. Every other rank answers the call with a request, signed with the run's secret token.
3. Rank zero reads the requests, and lets each rank in, or refuses those that differ from itself (`compare_workers`).
"""

import errno
import functools
import hmac
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from distributed.info import get_world_info, is_here, listening, on_one_host

# Environment variable: the secret of a run, which its processes share. It may be absent.
TOKEN = "DISTRIBUTED_TOKEN"  # noqa: S105 (the variable's name)
ENDED = "ended"  # key of the agent's store: rank zero's exit code, once the run has ended and is not to be repeated
_POLL_SECONDS = 0.005
_LATE_SECONDS = 5.0
_REFUSAL_SECONDS = 2.0  # time that rank zero waits until those that it has refused know it
# Time beyond its limit before a waiting thread is left behind. torch connects twice before it reports a failure, with
# a pause of seconds between, and Python aborts if it ends while the thread is inside torch.
_MARGIN_SECONDS = 10.0

T = TypeVar("T")
log = logging.getLogger(__name__)
_store: dist.Store | None = None


def process_store(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store of this process's world. It is opened once, so that RPC can start on it again. Raises RuntimeError for
    a world of several processes without MASTER_ADDR, or if the store does not answer within `timeout`."""
    global _store
    if _store is None:
        _store = _open(world_rank, world_size, timeout)
    _store.set_timeout(timeout)
    return _store


def _open(world_rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    by_hand = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if world_size == 1 and by_hand:
        return dist.HashStore()
    if "MASTER_ADDR" not in os.environ:
        raise RuntimeError(f"WORLD_SIZE={world_size} without MASTER_ADDR: start the program by torchrun")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves, listener = by_hand and world_rank == 0, None
    if serves and is_here(address):  # torch would listen on every interface
        try:
            listener = listening(address, port).detach()
        except OSError as error:
            # torch says that the port is in use, or shares this process's earlier store there.
            if error.errno != errno.EADDRINUSE:
                raise RuntimeError(f"MASTER_ADDR={address}: cannot listen there ({error})") from error
    # torch would wait for the others in a way that no signal ends; `meet` waits.
    return dist.TCPStore(
        address, port, is_master=serves, timeout=timeout, wait_for_workers=False,
        multi_tenant=serves and listener is None, master_listen_fd=listener,
    )  # fmt: skip


def note_end(code: int) -> None:
    """On rank zero: tells the agents, if they have started it, that the run has ended with this exit code. So they do
    not start it again, whatever becomes of the other ranks."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with suppress(dist.DistError):  # the agent's store, which has left
            rank, size, *_ = get_world_info()
            store = _store or process_store(rank, size, timedelta(seconds=_LATE_SECONDS))
            store.set(ENDED, str(code))


def within(seconds: float, run: Callable[[], T]) -> T:
    """Calls `run` in a thread and returns its result. Raises TimeoutError if it has not returned within `seconds`."""
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(run())
        except BaseException as error:
            outcome.set_exception(error)

    # torch waits without limit, its store for a server that has stopped; a thread can be left behind.
    threading.Thread(target=call, daemon=True).start()
    return outcome.result(seconds)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Ends this process, with exit code 1, if torch's start on the store takes longer than `seconds`."""

    def give_up() -> None:
        log.error("error: %s: rank 0 did not go on within %g s", get_world_info().worker_name, seconds)
        os._exit(1)

    # Rank zero may stop at any moment. torch then waits for its store without limit, and no exception ends that.
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    if int(os.environ.get("RANK", 0)) > 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class UnlikeWorkerError(RuntimeError):
    """A worker differs from rank zero in what `compare_workers` compares; the message says in what."""


_likeness: Callable[[], Mapping[str, str]] | None = None
_mixed = False


def compare_workers(likeness: Callable[[], Mapping[str, str]], *, mixed: bool) -> None:
    """Called on every worker before it meets the others: ranks of several hosts, which may be of other programs or
    machines, are compared from now on by their `likeness`, a text for each name, which is called once, if it is needed.
    `mixed`: those that differ from rank zero are not refused; a line of its log says in what."""
    global _likeness, _mixed
    _likeness, _mixed = functools.cache(likeness), mixed


def admits_mixed() -> bool:
    """Whether workers that differ from rank zero are admitted; on every rank."""
    return _mixed


def meet(timeout: timedelta) -> dist.Store:
    """Waits until every rank of the world has called this; returns an empty store for what they do next. Raises
    ConnectionError if a rank, which the message names, did not come within `timeout`, or rank zero has ended; and
    UnlikeWorkerError if this rank, or another one, differs from rank zero."""
    rank, size, *_ = get_world_info()
    likeness = {} if _likeness is None or on_one_host() else _likeness()  # may take seconds, which are not of the limit
    if size == 1:  # the store stays open for the next start, which needs an empty one
        return dist.PrefixStore(uuid.uuid4().hex, process_store(rank, size, timeout))
    seconds = timeout.total_seconds()
    missing = set(range(1, size)) if rank == 0 else {0}

    def warn() -> None:
        names = ", ".join(map(str, sorted(missing)))
        more = ", or for ranks that it waits for" if rank else ""
        log.warning("waiting up to %g s for rank %s of %d%s", seconds, names, size, more)

    late = threading.Timer(_LATE_SECONDS, warn)
    late.daemon = True
    late.start()
    deadline = time.monotonic() + seconds
    try:
        if rank == 0:
            return _call_ranks(process_store(rank, size, timeout), missing, deadline, likeness)
        return within(seconds + _MARGIN_SECONDS, partial(_request_place, rank, timeout, deadline, likeness))
    except dist.DistError as error:
        raise ConnectionError(f"rank 0 of {size} has left while the others were coming: {error}") from error
    except TimeoutError as error:
        late_ranks = f"rank 0 of {size} did not come, or had not met all others"
        raise ConnectionError(f"{late_ranks}, within {seconds:g} s") from error
    finally:
        late.cancel()


def _call_ranks(store: dist.Store, missing: set[int], deadline: float, ours: Mapping[str, str]) -> dist.Store:
    """Rank zero's part: waits until all ranks have come, and takes them out of `missing`."""
    size, began = len(missing) + 1, time.monotonic()
    call, numbers, unlike = uuid.uuid4().hex, list[str](), list[str]()
    store.set("call", call)
    while missing:
        for rank in [rank for rank in sorted(missing) if store.check([f"{call}/request/{rank}"])]:
            try:
                request = _opened(call, store.get(f"{call}/request/{rank}"))
                number, host, likeness = str(request["number"]), str(request["host"]), dict(request["likeness"])
            except (KeyError, TypeError, ValueError):  # any process that reaches the store can write there
                log.warning("rank %d does not have the token of this run (%s), and is ignored", rank, TOKEN)
                store.delete_key(f"{call}/request/{rank}")
                continue
            missing.discard(rank)
            numbers.append(number)
            if differences := _differences(ours, likeness):
                line = f"rank {rank} on {host} differs from rank 0: {', '.join(differences)}"
                if _mixed:
                    log.warning("%s; the bits of one program on one machine are not promised", line)
                else:
                    unlike.append(line)
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise ConnectionError(f"rank {names} of {size} did not come within {deadline - began:.0f} s")
        time.sleep(_POLL_SECONDS)
    reason = "; ".join(unlike)
    for number in numbers:
        store.set(f"{call}/answer/{number}", reason)
    if reason:
        deadline = time.monotonic() + _REFUSAL_SECONDS
        while not store.check([f"{call}/read/{number}" for number in numbers]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        raise UnlikeWorkerError(reason)
    return dist.PrefixStore(call, store)


def _differences(local: Mapping[str, str], remote: Mapping[str, str]) -> list[str]:
    """In what another rank differs from this one, both values each."""
    if not local or not remote:
        return []
    pairs = [(name, remote.get(name, "nothing"), local.get(name, "nothing")) for name in {**local, **remote}]
    return [f"{name}={theirs:.80} instead of {ours:.80}" for name, theirs, ours in pairs if theirs != ours]


def _request_place(rank: int, timeout: timedelta, deadline: float, likeness: Mapping[str, str]) -> dist.Store:
    """The other ranks' part: waits until rank zero has let this one in."""
    store = process_store(rank, get_world_info().world_size, timeout)
    request = {"number": uuid.uuid4().hex, "host": socket.gethostname(), "likeness": dict(likeness)}
    answered = None
    while time.monotonic() < deadline:
        call = store.get("call").decode() if store.check(["call"]) else None
        if call is not None and call != answered:  # rank zero has called, or what was there was an earlier one's
            text = json.dumps(request)
            store.set(f"{call}/request/{rank}", f"{_signature(call, text)} {text}")
            answered = call
        if call is not None and store.check([f"{call}/answer/{request['number']}"]):
            if reason := store.get(f"{call}/answer/{request['number']}").decode():
                store.set(f"{call}/read/{request['number']}", "")
                raise UnlikeWorkerError(reason)
            return dist.PrefixStore(call, store)
        time.sleep(_POLL_SECONDS)
    raise TimeoutError


def _opened(call: str, signed: bytes) -> dict[str, Any]:
    """The content of a request. Raises ValueError where its signature is wrong."""
    signature, _, text = signed.decode().partition(" ")
    if not hmac.compare_digest(signature.encode(), _signature(call, text).encode()):
        raise ValueError("wrong signature")
    content: dict[str, Any] = json.loads(text)
    return content


def _signature(call: str, text: str) -> str:
    # Over the call too: a copied request is worth nothing at another meeting.
    return hmac.new(os.environ.get(TOKEN, "").encode(), f"{call} {text}".encode(), "sha256").hexdigest()
