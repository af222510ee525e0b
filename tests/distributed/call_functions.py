"""The functions that the tests of result streams, open futures and remote objects call on workers."""

import gc
import math
import threading
import time
import weakref
from collections import defaultdict
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

import distributed as todist
from distributed.calls import shutdown, worker
from distributed.calls.worker import fetched
from tests.distributed.remote_functions import OwnError

counts: dict[str, int] = {}
"""How often a name was counted on this worker."""


def count(name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def counted(name: str) -> int:
    return counts.get(name, 0)


def slow_and_counted(number: Tensor, name: str) -> int:
    count(name)
    time.sleep(0.03)
    return int(number)


words: defaultdict[str, threading.Event] = defaultdict(threading.Event)


def waits_for_word(number: Tensor, word: str) -> bool:
    """Whether the word has come; item 0 does not wait for it."""
    return int(number) == 0 or words[word].wait(15)


def give_word(word: str) -> None:
    words[word].set()


def fails_at_three(number: Tensor) -> int:
    if int(number) == 3:
        raise LookupError("no three today")
    return int(number)


def scaled(net: Any, x: Tensor) -> Tensor:
    return net(x).square().sum()


# Open futures

waiting: list[Future[Any]] = []


@todist.async_execution
def wait_for_release(number: Tensor | int) -> Future[Any]:
    """Open until `release` is called on this worker."""
    waiting.append(Future())
    return waiting[-1].then(lambda done: (int(number), done.value()))


def release(value: Any) -> None:
    """Ends the futures that are open here, the last one first."""
    while waiting:
        waiting.pop().set_result(value)


def computed_here() -> int:
    """How many calls the threads of this worker compute that somebody waits for."""
    return sum(not call.is_over() for call in [*shutdown._served.values()])


def open_here() -> int:
    return len(waiting)


@todist.async_execution
def asks_next(number: Tensor | int) -> Future[Any]:
    """Asks the next worker for the square, and adds this worker's depth of nesting and the callback's."""
    other = (todist.get_rank() + 1) % todist.get_world_size()
    before = worker.depth()
    asked = todist.remote_async_call(math.pow, args=(int(number), 2), partitioner=other)
    return asked.then(lambda done: (done.value()[0], before, worker.depth()))


@todist.async_execution
def fails_later(number: Tensor | int) -> Future[Any]:
    """Fails with the exception of the next worker at item 3, in the callback at 4, and at once at 5."""
    if int(number) == 5:
        raise LookupError("no five at all")
    other = (todist.get_rank() + 1) % todist.get_world_size()
    asked = todist.remote_async_call(fails_at_three, args=(number,), partitioner=other)

    def read(done: Future[Any]) -> Any:
        if int(number) == 4:
            raise ArithmeticError("no four in the callback")
        return done.value()[0]

    return asked.then(read)


@todist.async_execution
def at_once(value: Any) -> Any:
    return value


@todist.async_execution
def scaled_elsewhere(net: Any, x: Tensor) -> Future[Tensor]:
    other = (todist.get_rank() + 1) % todist.get_world_size()
    return todist.remote_async_call(scaled, args=(net, x), partitioner=other, reducer=sum)


@todist.parallelize(partitioner=lambda count: [(1, (i,), None) for i in range(count)], reducer=list)
@todist.async_execution
def squares(number: int) -> Future[Any]:
    return asks_next(number)


@todist.async_execution
def at_once_or_later(number: Tensor) -> Any:
    """Odd ones are open until `release`."""
    return wait_for_release(number) if int(number) % 2 else int(number)


@todist.async_execution
def lock_later() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(threading.Lock())
    return future


def undeclared() -> Future[Any]:
    return Future()


def open_calls() -> int:
    """How many calls are open here that somebody may still wait for."""
    shutdown.end_open_calls()
    return len(shutdown._open)


# Remote objects


class Counter:
    """A number that others add to."""

    def __init__(self, start: int, timeout: float = 0.0) -> None:
        if start < 0:
            raise OwnError("begins below zero")
        time.sleep(timeout)
        self._value = start
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Future[int]]] = []
        _counters.add(self)

    def add(self, amount: int) -> int:
        with self._lock:
            self._value += amount
            for at_least, future in self._waiting:
                if self._value >= at_least:
                    future.set_result(self._value)
            return self._value

    @todist.async_execution
    def wait_for(self, at_least: int) -> Future[int]:
        with self._lock:
            self._waiting.append((at_least, Future()))
            if self._value >= at_least:
                self._waiting[-1][1].set_result(self._value)
            return self._waiting[-1][1]

    def where(self) -> int:
        return todist.get_rank()

    def fail(self) -> NoReturn:
        raise OwnError(f"the counter is at {self._value}")

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


_counters: weakref.WeakSet[Counter] = weakref.WeakSet()
_kept: list[Any] = []


def counters_alive() -> int:
    gc.collect()
    return len(_counters)


def what_holds_counters() -> str:
    """What may keep a counter alive here: torch's counts of references, our open calls, and what Python knows."""
    gc.collect()
    holders = [type(holder).__name__ for counter in list(_counters) for holder in gc.get_referrers(counter)]
    calls = [*shutdown._served.values(), *(call for call, _ in list(shutdown._open.values()))]
    return f"{rpc._rref_context_get_debug_info()}; calls: {calls}; referrers: {holders}"


def add_to(counter: Any, amount: int) -> int:
    return int(counter.add(amount))


def keep(counter: Any) -> None:
    _kept[:] = [counter]


def add_to_kept(amount: int) -> int:
    return int(_kept[0].add(amount))


class Linear(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, size))
        self.bias = torch.nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.named_parameters()}


def fetch_and_look(references: "list[rpc.RRef[Tensor]]") -> tuple[Tensor, bool]:
    """The value, and whether nothing here holds the reference any more."""
    reference = weakref.ref(references[0])
    return fetched(references, 10), reference() is None
