"""A shard that waits for another one in vain says so in its value: what it raises, torch prints with a traceback."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.reduce import mean_reducer
from distributed.strategies.common.work import Pieces
from distributed.strategies.split import Missed, Shard, State

TIMED_OUT = "RPCErr:1:RPC ran for more than set timeout (8000 ms) and will now be marked with an error"


class Earlier:
    """Stands for torch's reference to the outputs of the shard before."""

    def __init__(self, outputs: Callable[[], Any]) -> None:
        self._outputs = outputs

    def to_here(self, timeout: float) -> Any:
        return self._outputs()


def fails(message: str) -> Any:
    raise RuntimeError(message)


def unused(*_: Any) -> Any:
    raise AssertionError("this shard has nothing to compute")


def after(outputs: Callable[[], Any]) -> Any:
    pieces = Pieces((), unused, unused, unused, unused, lambda params: torch.optim.SGD([Tensor()]))
    shard = Shard(pieces, mean_reducer, 0, 0, State({}, {}, {}), device=torch.device("cpu"), timeout=8)
    return shard.run([Earlier(outputs)], "train", torch.arange(2), 0, None)


def test_late_outputs_fail_all_following_shards() -> None:
    missed = after(lambda: fails(f"{TIMED_OUT}\nTraceback (most recent call last):\n  File …"))
    assert missed == Missed(TIMED_OUT)
    assert after(lambda: missed) is missed


def test_another_error_of_an_earlier_shard_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a bad label"):
        after(lambda: fails("On WorkerInfo(id=1, name=worker1):\nValueError('a bad label')"))
