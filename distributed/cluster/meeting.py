"""How the processes of a world meet: all of them at its start, and again when some have left or new ones have come.

They meet on the world's key-value store. Each meeting goes in this order:

1. Rank zero sets a new random number, the *call*.
2. Every other process answers the call with a request for a seat, signed with the run's secret token.
3. Rank zero reads the requests and gives each process a *seat*: its rank, and the size of the world.

`session` and `process_group` call `meet` when they start, and `session.begin_again` on rank zero calls `meet_again`.
`ending` reads requests between two steps. `joining` posts one from outside, to let a worker go.

A process that comes too late for a call becomes a *newcomer*: it waits for the next one. A process started with `JOINS`
is a newcomer from the beginning.

Newcomers, and the ranks of other hosts, say in their request what they are like (`compare_workers`). Rank zero refuses
who is not like itself.
"""

import functools
import hmac
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from distributed.cluster.info import get_world_info, on_one_host
from distributed.cluster.store import process_store, within

TOKEN = "DISTRIBUTED_TOKEN"  # noqa: S105 (the variable's name)
"""Environment variable: the secret of a run, which its processes share. It may be absent."""

JOINS = "DISTRIBUTED_JOINS"
"""Environment variable of a process that joins a world under way. Its rank is not known yet."""

PATIENCE_SECONDS = 2.0
"""Time that rank zero waits, when it calls again, for the processes that it knows. A later one is a newcomer."""

_POLL_SECONDS = 0.005
_LATE_SECONDS = 5.0

_MARGIN_SECONDS = 10.0
"""Time beyond its limit before a waiting thread is left behind. torch connects twice before it reports a failure, with
a pause of seconds between, and Python aborts if it ends while the thread is inside torch."""

_MOST_OPEN = 4096
"""The most requests that rank zero looks for at one time."""

log = logging.getLogger(__name__)


class Seat(NamedTuple):
    """A process's place in a world that has just met.

    Attributes:
        store: an empty one, for what the processes do next.
        limit: seconds that their start may take, if they have met before: when it fails, they meet again. Else None.
    """

    store: dist.Store
    limit: float | None = None


class _Request(NamedTuple):
    """`process` is a random number that a process keeps, `number` a new one for each meeting of it. `rank` is the seat
    that it was started for; None if it is a newcomer. `likeness` is what a process says of itself that may be of
    another program, or another machine."""

    process: str
    number: str
    rank: int | None
    host: str
    likeness: Mapping[str, str] | None = None

    def is_valid(self) -> bool:
        types = (str, str, int | None, str, dict | None)
        return all(map(isinstance, self, types)) and all(
            isinstance(text, str) for text in (self.likeness or {}).values()
        )


class UnlikeWorkerError(RuntimeError):
    """A worker differs from rank zero in what `compare_workers` compares; the message says in what."""


class _Comparison(NamedTuple):
    """How this process is compared with others: what it is like, and whether rank zero may let in who differs."""

    own: Callable[[], Mapping[str, str]]
    mixed: bool


_comparison: _Comparison | None = None


def compare_workers(own: Callable[[], Mapping[str, str]], *, mixed: bool) -> None:
    """Called on every worker before it meets the others: from now on those are compared that may be of other programs
    or machines: ranks of several hosts, and processes that join.

    Args:
        own: what this worker is like, by names; called once, if it is needed.
        mixed: on rank zero: those that differ are not refused; a line of the log says in what.
    """
    global _comparison
    _comparison = _Comparison(functools.cache(own), mixed)


def _likeness() -> Mapping[str, str] | None:
    return None if _comparison is None else _comparison.own()


class _Desk:
    """Where rank zero reads the requests for one call."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        # New for each meeting: torchrun's store outlives the processes, and entries of an earlier start must not count.
        self.call = uuid.uuid4().hex
        self.requests: dict[str, _Request] = {}
        self.farewells: dict[str, str] = {}
        self.unlike: list[str] = []
        self._count = 0
        self._unread: set[int] = set()
        store.set("call", self.call)

    def read(self) -> None:
        """Reads the requests that have come."""
        # `_post` counts first and writes then, so a number may be here before its request.
        count = min(self.store.add(f"{self.call}/requests", 0), self._count + _MOST_OPEN)
        self._unread |= set(range(self._count + 1, count + 1))
        self._count = count
        for number in sorted(self._unread):
            key = f"{self.call}/request/{number}"
            if self.store.check([key]):
                self._unread.discard(number)
                self._note(self.store.get(key))

    def _note(self, signed: bytes) -> None:
        # Any process that reaches the store can write anything there.
        request = None
        try:
            content = _opened(self.call, signed)
            if "leave" in content:
                self.farewells[str(content["number"])] = str(content["leave"])
            else:
                request = _Request(**content)
                if not request.is_valid():
                    raise TypeError
        except (KeyError, TypeError, ValueError):
            log.warning("a request to this run is not signed with its token, or cannot be read; it is ignored")
            return
        if request is not None:
            self._admit(request)

    def _admit(self, request: _Request) -> None:
        """Takes a request, or refuses it at once. A rank that was started with the others is taken first: the world
        cannot begin without it."""
        joins = request.rank is None
        differences = _differences(request.likeness or ({} if joins else None))
        if differences:
            who = "a new process" if joins else f"rank {request.rank}"
            line = f"{who} on {request.host} differs from rank 0: {', '.join(differences)}"
            assert _comparison is not None
            if _comparison.mixed:
                log.warning("%s; the bits of one program on one machine are not promised", line)
            elif joins:
                log.warning("%s; it is refused", line)
                self.refuse(request, line)
                return
            else:
                self.unlike.append(line)
        self.requests[request.process] = request

    def refuse(self, request: _Request, reason: str) -> None:
        self.store.set(f"{self.call}/seat/{request.number}", json.dumps({"refused": reason}))

    def refuse_all(self) -> None:
        """Ends a meeting with ranks that differ, and waits for a moment until all know it.

        Raises:
            UnlikeWorkerError: in any case.
        """
        reason = "; ".join(self.unlike)
        for request in self.requests.values():
            self.refuse(request, reason)
        numbers = [f"{self.call}/read/{request.number}" for request in self.requests.values()]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.store.check(numbers) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        raise UnlikeWorkerError(reason)

    def seat(self, ranks: Mapping[str, int], limit: float | None) -> Seat:
        """Gives the processes their seats, and this one the first."""
        size = len(ranks) + 1
        one_host = on_one_host() and all(self.requests[process].host == _host() for process in ranks)
        _take_seat(0, size, one_host)
        for process, rank in ranks.items():
            seat = json.dumps({"rank": rank, "size": size, "one_host": one_host, "limit": limit})
            self.store.set(f"{self.call}/seat/{self.requests[process].number}", seat)
        return Seat(dist.PrefixStore(self.call, self.store), limit)


def _differences(other: Mapping[str, str] | None) -> list[str]:
    """In what another process differs from this one, both values each."""
    if other is None or (own := _likeness()) is None:
        return []
    names = [*own, *(name for name in other if name not in own)]
    pairs = [(name, other.get(name, "nothing"), own.get(name, "nothing")) for name in names]
    return [f"{name}={theirs:.80} instead of {ours:.80}" for name, theirs, ours in pairs if theirs != ours]


_desk: _Desk | None = None
"""On rank zero: the desk of the last call."""

_seated: dict[str, int] = {}
"""On rank zero: the rank of each other process, as of the last meeting."""

_process: tuple[int, str] = (0, "")
_has_seat = False
"""Whether this process has met its world before, which has compared it then."""


def meet(timeout: timedelta) -> Seat:
    """Waits until every process of the world has called this. A newcomer waits until rank zero has time for it. Sets
    this process's rank, and the size of the world, where they are new.

    Raises:
        ConnectionError: a rank did not come within `timeout`, the message names it; or rank zero has ended.
        UnlikeWorkerError: this process, or a rank that was started with it, differs from rank zero.
    """
    rank, size, *_ = get_world_info()
    joins = os.environ.get(JOINS) is not None
    if joins or not on_one_host():
        _likeness()  # may take seconds, which are not those of the time limit
    if size == 1 and not joins:  # the store stays open for the next start, which needs an empty one
        return Seat(dist.PrefixStore(uuid.uuid4().hex, process_store(rank, size, timeout)))
    seconds = timeout.total_seconds()
    missing = set(range(1, size)) if rank == 0 else {0}
    late = threading.Timer(_LATE_SECONDS, _warn_of_late_ranks, (missing, size, seconds))
    late.daemon = True
    try:
        if joins:  # a step may take any time, but the store answers at once
            heard = deque[float](maxlen=1)
            ask = partial(_request_seat, None, timeout, math.inf, heard.append)
            return within(seconds + _MARGIN_SECONDS, ask, lambda: tuple(heard))
        late.start()
        deadline = time.monotonic() + seconds
        if rank == 0:
            return _call_ranks(process_store(rank, size, timeout), missing, deadline)
        return within(seconds + _MARGIN_SECONDS, partial(_request_seat, rank, timeout, deadline))
    except dist.DistError as error:
        if joins:
            raise ConnectionError("rank 0 has ended before it had a seat for this new process") from error
        raise ConnectionError(f"rank 0 of {size} has left while the others were coming: {error}") from error
    except TimeoutError as error:
        if joins:
            raise ConnectionError(
                f"the world's store does not answer this new process within {seconds:g} s: rank 0 has stopped"
            ) from error
        raise ConnectionError(
            f"rank 0 of {size} did not come, or had not met all others, within {seconds:g} s"
        ) from error
    finally:
        late.cancel()


def _warn_of_late_ranks(missing: set[int], world_size: int, seconds: float) -> None:
    if missing == {0}:
        log.warning("waiting up to %g s for rank 0 of %d, or for ranks that it waits for", seconds, world_size)
    else:
        names = ", ".join(map(str, sorted(missing)))
        log.warning("waiting up to %g s for rank %s of %d", seconds, names, world_size)


def _call_ranks(store: dist.Store, missing: set[int], deadline: float) -> Seat:
    """Rank zero's part of the first meeting: waits until all ranks have come, and takes them out of `missing`."""
    global _desk, _seated
    wanted, size = frozenset(missing), len(missing) + 1
    began = time.monotonic()
    _desk = _Desk(store)
    while missing:
        _desk.read()
        _seated = {request.process: request.rank for request in _desk.requests.values() if request.rank in wanted}
        missing -= set(_seated.values())
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, sorted(missing)))
            raise ConnectionError(f"rank {names} of {size} did not come within {deadline - began:.0f} s")
        time.sleep(_POLL_SECONDS)
    if _desk.unlike:
        _desk.refuse_all()
    latest = {rank: process for process, rank in _seated.items()}  # of a rank that has come twice, the second process
    _seated = {process: rank for rank, process in latest.items()}
    return _desk.seat(_seated, None)


def meet_again(present: Collection[int] | None, limit: float) -> Seat:
    """On rank zero: calls the newcomers, and the processes of the ranks that are still present, by default all. Waits
    for them for `PATIENCE_SECONDS`. A process keeps its rank if that is below the new size of the world."""
    global _desk, _seated
    assert _desk is not None
    known = {process: rank for process, rank in _seated.items() if present is None or rank in present}
    _desk.read()
    expected = known.keys() | newcomers()
    desk = _desk = _Desk(_desk.store)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not expected <= desk.requests.keys() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        desk.read()
    _seated = _ranks_for(sorted(desk.requests), known)
    return desk.seat(_seated, limit)


def _ranks_for(processes: Collection[str], known: Mapping[str, int]) -> dict[str, int]:
    """Ranks from 1 without a gap. A known process keeps its rank if that leaves none."""
    ranks = {process: known[process] for process in processes if known.get(process, math.inf) <= len(processes)}
    free = (rank for rank in range(1, len(processes) + 1) if rank not in ranks.values())
    others = [process for process in processes if process not in ranks]
    others.sort(key=lambda process: known.get(process, math.inf))
    return ranks | dict(zip(others, free, strict=False))


def seated() -> dict[str, int]:
    """On rank zero: the rank of each other process, as of the last meeting."""
    return dict(_seated)


def read_requests() -> bool:
    """On rank zero: reads new requests. Returns false in a world of one process, which has no desk."""
    if _desk is not None:
        _desk.read()
    return _desk is not None


def newcomers() -> set[str]:
    """On rank zero: the processes that wait for a seat, by the requests that have been read."""
    assert _desk is not None
    return _desk.requests.keys() - _seated.keys()


def farewells() -> dict[str, str]:
    """On rank zero: new requests to let a worker go, each with the worker's name. Each waits for an `answer`."""
    assert _desk is not None
    new, _desk.farewells = _desk.farewells, {}
    return new


def answer(request: str, text: str) -> None:
    """On rank zero: answers a request to let a worker go. `text` is the reason of a refusal, or empty."""
    assert _desk is not None
    _desk.store.set(f"{_desk.call}/answer/{request}", text)


def _request_seat(
    rank: int | None, timeout: timedelta, deadline: float, hear: Callable[[float], None] = lambda _: None
) -> Seat:
    """The other processes' part: waits until rank zero has given this process a seat. `hear` gets the time of each
    answer of the store."""
    store = process_store(rank or 1, get_world_info().world_size, timeout)
    may_differ = not _has_seat and (rank is None or not on_one_host())
    request = _Request(_own_number(), uuid.uuid4().hex, rank, _host(), _likeness() if may_differ else None)
    answered = None
    while (now := time.monotonic()) < deadline:
        hear(now)
        call = store.get("call").decode() if store.check(["call"]) else None
        if call is not None and call != answered:  # rank zero has called, or called again since
            _post(store, call, request._asdict())
            answered = call
        if call is not None and store.check([f"{call}/seat/{request.number}"]):
            seat = json.loads(store.get(f"{call}/seat/{request.number}"))
            if "refused" in seat:
                store.set(f"{call}/read/{request.number}", "")
                raise UnlikeWorkerError(seat["refused"])
            _take_seat(seat["rank"], seat["size"], seat["one_host"])
            return Seat(dist.PrefixStore(call, store), seat["limit"])
        time.sleep(_POLL_SECONDS)
    raise TimeoutError


def ask_to_let_go(store: dist.Store, name: str, seconds: float) -> str:
    """Asks rank zero to let a worker go; returns its answer, see `answer`. Any process may ask that has the token.

    Raises:
        TimeoutError: no answer within `seconds`.
    """
    number, calls = uuid.uuid4().hex, list[str]()
    deadline = time.monotonic() + seconds
    while True:
        call = store.get("call").decode()
        for earlier in calls:
            if store.check([f"{earlier}/answer/{number}"]):
                return store.get(f"{earlier}/answer/{number}").decode()
        if call not in calls:  # a new session may have begun before rank zero has read the request
            _post(store, call, {"leave": name, "number": number})
            calls.append(call)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {seconds:g} s")
        time.sleep(_POLL_SECONDS)


def _take_seat(rank: int, size: int, one_host: bool) -> None:
    global _has_seat
    _has_seat = True
    os.environ.pop(JOINS, None)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    if one_host:
        os.environ["LOCAL_WORLD_SIZE"] = str(size)


def _own_number() -> str:
    """A random number of this process; a fork has another one."""
    global _process
    if _process[0] != os.getpid():
        _process = os.getpid(), uuid.uuid4().hex
    return _process[1]


def _host() -> str:
    return socket.gethostname()


# Signed requests


def _post(store: dist.Store, call: str, content: Mapping[str, Any]) -> None:
    text = json.dumps(content)
    number = store.add(f"{call}/requests", 1)
    store.set(f"{call}/request/{number}", f"{_signature(call, text)} {text}")


def _opened(call: str, signed: bytes) -> Mapping[str, Any]:
    """The content of a request.

    Raises:
        TypeError, ValueError: it cannot be read, or its signature is wrong.
    """
    signature, _, text = signed.decode().partition(" ")
    if not hmac.compare_digest(signature, _signature(call, text)):
        raise ValueError("wrong signature")
    content: Mapping[str, Any] = json.loads(text)
    return content


def _signature(call: str, text: str) -> str:
    # Over the call too: a copied request is worth nothing at another meeting.
    return hmac.new(os.environ.get(TOKEN, "").encode(), f"{call} {text}".encode(), "sha256").hexdigest()
