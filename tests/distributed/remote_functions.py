"""What the tests call on workers; imported by name there."""

import os
import threading
import time
from typing import Any, NoReturn

import torch
from torch import Tensor

import distributed as todist


class OwnError(Exception):
    """An exception that is rebuilt from its arguments."""


class StubbornError(Exception):
    """An exception that cannot be rebuilt: it takes other arguments than it keeps."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def rank() -> int:
    return todist.get_rank()


def size_and_rank(x: Tensor, label: str = "") -> tuple[int, int, str]:
    return x.shape[0] if x.ndim else 0, todist.get_rank(), label


def total(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x.sum() + (0 if y is None else y.sum())


def shape_of(*values: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


def fail(x: Tensor) -> NoReturn:
    raise OwnError(f"no good: {x.tolist()} \\N{{DASH}}")


def fail_stubbornly(x: Tensor) -> NoReturn:
    raise StubbornError(1, 2)


def fetch(x: Tensor, reference: Any) -> float:
    """Calls back to whoever holds the reference."""
    return float((reference.to_here(timeout=30) * x).sum())


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def threads() -> int:
    return torch.get_num_threads()


def lock() -> Any:
    """What cannot be pickled."""
    return threading.Lock()


def _plain(x: Tensor) -> Tensor:
    return x.sum()


renamed = todist.parallelize(reducer=lambda values: sum(values).view(1))(_plain)


@todist.rank_zero_only
@todist.parallelize(reducer=lambda values: sum(values).view(1))
def wrapped(x: Tensor) -> Tensor:
    return x.sum()


@todist.parallelize()
def mean_of_squares(x: Tensor) -> Tensor:
    return x.square().mean()


@todist.parallelize(partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False), reducer=todist.sum_reducer)
def sum_by_task(x: Tensor, factor: float) -> Tensor:
    assert x.ndim == 1
    return factor * x.sum()


@todist.parallelize_async(partitioner=1)
def later(x: Tensor) -> Tensor:
    return x + todist.get_rank()
