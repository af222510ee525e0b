"""What a strategy carries, in words that need no knowledge of learning."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Tensors = dict[str, Tensor]


class Work(NamedTuple):
    """The two things that any worker can compute of a chunk, both pure functions.

    `map(params, indices, step)` gives sums over the chunk's samples, nested in any way;
    `evaluate(params, split, indices)` gives a value per sample.
    """

    map: Callable[[Tensors, Tensor, int], Any]
    evaluate: Callable[[Tensors, str, Tensor], Tensors]


class Close(Protocol):
    def __call__(self, failure: BaseException | None = None) -> None:
        """Ends the session. With `failure`, the others are told to stop at once."""
        ...


class Strategy(NamedTuple):
    """How chunks travel: see `metalearn.types.Strategy`."""

    drives: bool
    map: Callable[[Tensors, Sequence[Tensor], int], Any]
    evaluate: Callable[[Tensors, str, Sequence[Tensor]], Tensors]
    close: Close


Connect = Callable[[Work], Strategy]
"""What a strategy's factory returns: its settings are checked, nothing is started yet."""


def join(values: Sequence[Tensors]) -> Tensors:
    """Per-sample values of several chunks, one after the other."""
    return {name: torch.cat([value[name] for value in values]) for name in values[0]}


def to_rows(chunks: Sequence[Tensor]) -> Tensor:
    """Chunks of indices, of uneven length, as the rows of one tensor; −1 fills them up."""
    return pad_sequence(list(chunks), batch_first=True, padding_value=-1)


def from_row(row: Tensor) -> Tensor:
    """The chunk that was put into a row."""
    return row[row >= 0]
