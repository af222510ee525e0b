"""The functions that the tests of remote objects call on workers."""

import gc
import threading
import time
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import rpc

import distributed as todist
from tests.distributed.remote_functions import OwnError


class Counter:
    """A number that others add to."""

    def __init__(self, start: int, timeout: float = 0.0) -> None:
        if start < 0:
            raise OwnError("begins below zero")
        time.sleep(timeout)
        self._value = start
        self._lock = threading.Lock()
        _counters.add(self)

    def add(self, amount: int) -> int:
        with self._lock:
            self._value += amount
            return self._value

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
    """What may keep a counter alive here: torch's counts of references, and what Python knows."""
    gc.collect()
    holders = [type(holder).__name__ for counter in list(_counters) for holder in gc.get_referrers(counter)]
    return f"{rpc._rref_context_get_debug_info()}; referrers: {holders}"


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
