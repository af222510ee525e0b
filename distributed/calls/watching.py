"""Notices lost workers by pings. A loop that waits asks a `Pinger` again and again."""

import threading
from collections.abc import Iterable, Iterator, Sequence

from torch.distributed import rpc
from torch.futures import Future

from distributed.errors import worker_error

POLL_SECONDS = 1.0


class Pinger:
    """Pings workers, all at the same time, so that a stopped worker does not hide a dead one."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._pings: dict[str, Future[bool]] = {}

    def lost(self, names: Iterable[str]) -> Exception | None:
        """Returns at once: the error of a worker whose last ping has failed; else None. Call it again and again."""
        for name in names:
            try:
                if name in self._pings and self._pings[name].done():
                    self._pings.pop(name).value()
                if name not in self._pings:
                    self._pings[name] = rpc.rpc_async(name, ping, timeout=self._timeout)
            except RuntimeError as error:
                return worker_error(name, error, self._timeout)
        return None


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
            answer.wait()
        except RuntimeError as error:
            yield name, worker_error(name, error, seconds)
