"""What a strategy carries, in words that need no knowledge of learning."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Work(NamedTuple):
    """What any worker can compute of a chunk, all pure functions, and the device that it computes on.

    `map(params, indices, step)` gives sums over the chunk's samples, nested in any way, the gradients among
    them; `evaluate(params, split, indices)` gives a value per sample. Where the loss has a graph,
    `loss(params, indices, step)` gives its sum over the chunk, with the graph, and whatever else
    `result(gradients, rest)` needs to make of it what `map` gives.
    """

    map: Callable[[Tensors, Tensor, int], Any]
    evaluate: Callable[[Tensors, str, Tensor], Tensors]
    loss: Callable[[Tensors, Tensor, int], tuple[Tensor, Any]] | None
    result: Callable[[Tensors, Any], Any]
    device: torch.device


class Close(Protocol):
    def __call__(self, failure: BaseException | None = None) -> None:
        """Ends the session. With `failure`, the others are told to stop at once."""
        ...


class Strategy(NamedTuple):
    """How chunks travel: see `metalearn.types.Strategy`."""

    drives: bool
    map: Callable[[Tensors, Sequence[Tensor], int], list[Any]]
    evaluate: Callable[[Tensors, str, Sequence[Tensor]], Tensors]
    cost: Callable[[], dict[str, float]]
    close: Close


Connect = Callable[[], Strategy]
"""What a strategy's factory returns: its settings are checked, nothing is started yet."""


def join(values: Sequence[Tensors]) -> Tensors:
    """Per-sample values of several chunks, one after the other."""
    return {name: torch.cat([value[name] for value in values]) for name in values[0]}
