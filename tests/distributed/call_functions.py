"""The functions that the tests of result streams, retries, open futures and remote objects call on workers."""

import os
import signal
import time
from typing import Any

from torch import Tensor

import distributed as todist

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


def fails_at_three(number: Tensor) -> int:
    if int(number) == 3:
        raise LookupError("no three today")
    return int(number)


def scaled(net: Any, x: Tensor) -> Tensor:
    return net(x).square().sum()


@todist.pure
def square_or_die(number: Tensor | int, deadly: int, after: int) -> int:
    """Worker `deadly` is killed at the item that follows the first `after` items that it has computed."""
    if todist.get_rank() == deadly and counted("squares") >= after:
        os.kill(os.getpid(), signal.SIGKILL)
    count("squares")
    time.sleep(0.02)
    return int(number) ** 2


@todist.pure
def slow_off_rank_zero(seconds: float) -> int:
    if todist.get_rank() != 0:
        time.sleep(seconds)
    return todist.get_rank()


@todist.pure
def fails_purely(name: str) -> None:
    count(name)
    raise LookupError("not found")
