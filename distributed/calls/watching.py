"""Notices lost workers by pings, and lets a group of workers wait for each other.

A loop that waits asks a `Pinger` again and again: `ending` at the end of a session, and `lost_before` for an event.

`session.gather`, the barrier, makes a `Gathering` on each worker of a group. Each gives its value to the first, the
leader. When all have come, the leader sends all values to each. It pings the missing ones, so a dead one ends the wait.
"""

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.distributed import rpc
from torch.futures import Future

from distributed.errors import worker_error
from distributed.info import GOODBYE_SECONDS

T = TypeVar("T")
Key = tuple[str, int]

POLL_SECONDS = 1.0


class DeafError(TimeoutError):
    """This worker cannot hear the others: all threads that torch has for messages are in calls that do not end."""

    def __init__(self) -> None:
        super().__init__("this worker cannot hear the others: all its threads are in calls beyond their time limits")


class Pinger:
    """Pings workers, all at the same time, so that a stopped worker does not hide a dead one."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._pings: dict[str, Future[bool]] = {}
        self._waited: dict[str, float] = {}
        self._looked = time.monotonic()

    def lost(self, names: Iterable[str]) -> Exception | None:
        """Returns at once: the error of a worker whose last ping has failed; else None. Call it again and again."""
        # A process that has been stopped, and goes on, has waited for nothing in that time.
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * POLL_SECONDS), now
        for name in names:
            try:
                if name in self._pings and self._pings[name].done():
                    self._pings.pop(name).value()
                if name not in self._pings:
                    self._pings[name] = rpc.rpc_async(name, ping, timeout=self._timeout)
                    self._waited[name] = 0.0
                    continue
                self._waited[name] += passed
                # torch ends a call that is over by one of its threads, so without a free one it ends none.
                if self._waited[name] > self._timeout + GOODBYE_SECONDS:
                    return DeafError()
            except RuntimeError as error:
                return worker_error(name, error, self._timeout)
        return None


def wait_for(future: "Future[T]", timeout: float) -> T:
    """The value of a remote call with this time limit.

    Raises:
        RuntimeError: the call's own.
        DeafError: torch does not end the call.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(timeout + GOODBYE_SECONDS) and not done.wait(POLL_SECONDS):  # it may just have been stopped
        raise DeafError
    return future.wait()


def lost_before(event: threading.Event, names: Sequence[str], timeout: float) -> Exception | None:
    """Waits for an event, and pings these workers meanwhile, each for `timeout` seconds at most. Returns the error of
    one that is lost before the event comes; else None."""
    watch = Pinger(timeout)
    while not event.wait(POLL_SECONDS):
        lost = watch.lost(names)
        if lost is not None:
            return lost
    return None


def ping() -> bool:
    return True


def ping_errors(names: Iterable[str], seconds: float) -> Iterator[tuple[str, Exception]]:
    """Pings workers, all at the same time; gives the name and the error of each that does not answer in `seconds`."""
    pings = {name: rpc.rpc_async(name, ping, timeout=seconds) for name in names}
    for name, answer in pings.items():
        try:
            wait_for(answer, seconds)
        except RuntimeError as error:
            yield name, worker_error(name, error, seconds)
        except DeafError as error:
            yield name, error


class _Gatherings:
    """The gatherings of this process, by key: the values that it has as leader, and outcomes that leaders have sent."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.counts: Counter[str] = Counter()
        self.values: defaultdict[Key, dict[str, Any]] = defaultdict(dict)
        self.outcomes: dict[Key, tuple[dict[str, Any], str | None]] = {}


_here = _Gatherings()


def forget_gatherings() -> None:
    """Called before a session starts: all its workers count their gatherings from zero."""
    global _here
    _here = _Gatherings()


class Gathering(NamedTuple):
    """A meeting of workers at which each gives a value and gets all values.

    Attributes:
        me: this worker's name.
        group: the names of the workers, sorted; the first one leads.
        timeout: seconds to wait.
        failures: gives the failures that other workers have reported to this one.
    """

    me: str
    group: Sequence[str]
    timeout: float
    failures: Callable[[], Sequence[str]]

    def gather(self, value: T) -> dict[str, T]:
        """The values of all workers of the group, by name. Waits until each of them has called this.

        Raises:
            ConnectionError: a worker is lost; the message names it.
            RuntimeError: a worker has failed, or the leader has raised one of the other errors.
            TimeoutError: a worker has not called this in time.
        """
        here, members = _here, " ".join(self.group)
        with here.changed:
            key = members, here.counts[members]
            here.counts[members] += 1
        return self._lead(here, key, value) if self.me == self.group[0] else self._follow(here, key, value)

    def _lead(self, here: _Gatherings, key: Key, value: T) -> dict[str, T]:
        values: dict[str, T] = {}
        error: Exception | None = None
        try:
            values = self._collect(here, key, value)
        except Exception as failed:
            error = failed
        cause = None if error is None else str(error)
        others = [name for name in self.group if name != self.me]
        sent = [rpc.rpc_async(name, _end, (key, values, cause), timeout=GOODBYE_SECONDS) for name in others]
        for future in sent:
            with contextlib.suppress(RuntimeError):  # a worker that is lost now has given its value, or is the error
                future.wait()
        if error is not None:
            raise error
        return values

    def _collect(self, here: _Gatherings, key: Key, value: T) -> dict[str, T]:
        _give(key, self.me, value)
        watch = Pinger(self.timeout)
        deadline = time.monotonic() + self.timeout
        while True:
            with here.changed:
                if here.changed.wait_for(lambda: len(here.values[key]) == len(self.group), POLL_SECONDS):
                    values = here.values.pop(key)
                    return {name: values[name] for name in self.group}
                missing = [name for name in self.group if name not in here.values[key]]
            lost = watch.lost(missing)
            for failure in self.failures():  # first: a worker that has failed may have left since, and names no cause
                raise RuntimeError(failure)
            if lost is not None:
                raise lost
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(missing)} did not come to the barrier within {self.timeout:g} s")

    def _follow(self, here: _Gatherings, key: Key, value: T) -> dict[str, T]:
        leader = self.group[0]
        watch = Pinger(self.timeout)
        deadline = time.monotonic() + self.timeout + GOODBYE_SECONDS  # the leader's error comes before
        try:
            rpc.rpc_sync(leader, _give, (key, self.me, value), timeout=self.timeout)
        except RuntimeError as error:
            raise worker_error(leader, error, self.timeout) from error
        while True:
            with here.changed:
                if here.changed.wait_for(lambda: key in here.outcomes, POLL_SECONDS):
                    values, cause = here.outcomes.pop(key)
                    if cause is not None:
                        raise RuntimeError(cause)
                    return values
            lost = watch.lost([leader])
            if lost is not None:
                raise lost
            if time.monotonic() > deadline:
                raise TimeoutError(f"{leader} did not come to the barrier within {self.timeout:g} s")


def _give(key: Key, name: str, value: Any) -> None:
    """Runs on the group's first worker: another one gives its value."""
    with _here.changed:
        _here.values[key][name] = value
        _here.changed.notify_all()


def _end(key: Key, values: dict[str, Any], error: str | None) -> None:
    """Runs on the other workers of the group: all values, or why there are none."""
    with _here.changed:
        _here.outcomes[key] = values, error
        _here.changed.notify_all()
