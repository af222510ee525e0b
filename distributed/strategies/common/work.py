"""What a strategy carries, in words that need no knowledge of learning."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from distributed.partition import PartitionFunction
from distributed.reduce import Combine, add_up, mean_of_sums

Tensors = dict[str, Tensor]


class Stage(Protocol):
    """One of the steps that a network is a sequence of, with the names of its parameters: `apply(params, h, known)`
    takes what the stage before gave, and a number that comes with the inputs."""

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> tuple[str, ...]: ...

    @property
    def apply(self) -> Callable[[Tensors, Tensor, int], Tensor]: ...


class Pieces(NamedTuple):
    """A network, its loss and its optimiser, as what can be computed in different places.

    `inputs(split, indices)` gives the first stage's input [1, known + n, …] and the number `known` that all stages
    get. From the last one's outputs [1, n, …], `values(outputs, split, indices)` gives a value per sample, and
    `outcome` what `Work.loss` gives; `faults` is what `Work.diagnose` would give, made of these values. `start(params)`
    makes an optimiser; `sizes` are the parameters' numbers of elements.
    """

    stages: Sequence[Stage]
    inputs: Callable[[str, Tensor], tuple[Tensor, int]]
    outcome: Callable[[Tensor, str, Tensor], tuple[Tensor, Any]]
    values: Callable[[Tensor, str, Tensor], Tensors]
    faults: Callable[[Tensors], Tensors]
    start: Callable[[Tensors], torch.optim.Optimizer]
    sizes: Mapping[str, int]

    def size(self, stage: Stage) -> int:
        return sum(self.sizes[name] for name in stage.params)


class Work(NamedTuple):
    """What any worker can compute of a chunk, all pure functions, and the device that it computes on.

    `map(params, indices, step)` gives sums over the chunk's samples, nested in any way, the gradients among
    them; `evaluate(params, split, indices)` gives a value per sample, and so does `diagnose(params, indices, step)`,
    which looks for the samples with which something is wrong. Where the loss has a graph,
    `loss(params, indices, step)` gives its sum over the chunk, with the graph, and whatever else
    `result(gradients, rest)` needs to make of it what `map` gives. `plain` says that no gradient is taken
    inside the loss; `pieces` are given where the network can be cut.
    """

    map: Callable[[Tensors, Tensor, int], Any]
    evaluate: Callable[[Tensors, str, Tensor], Tensors]
    diagnose: Callable[[Tensors, Tensor, int], Tensors]
    loss: Callable[[Tensors, Tensor, int], tuple[Tensor, Any]] | None
    result: Callable[[Tensors, Any], Any]
    device: torch.device
    plain: bool = False
    pieces: Pieces | None = None


class Plan(NamedTuple):
    """What a strategy is made for: what is computed, by how many workers, how the numbers of the chunks are dealt
    out, and what makes one gradient of the chunks'."""

    work: Work
    workers: int
    partitioner: PartitionFunction
    reduce: Combine

    @property
    def only_adds(self) -> bool:
        """Whether the reducer wants no more than the sum of the chunks' results, and how many samples that is."""
        return self.reduce in (mean_of_sums, add_up)


class Close(Protocol):
    def __call__(self, failure: BaseException | None = None) -> None:
        """Ends the session. With `failure`, the others are as_metrics to stop at once."""
        ...


def as_it_is(value: Any) -> Any:
    """What a world with one driver makes of the driver's word."""
    return value


class Strategy(NamedTuple):
    """How chunks travel: see `metalearn.types.Strategy`."""

    drives: bool
    map: Callable[[Tensors, Sequence[Tensor], int], list[Any]]
    evaluate: Callable[[Tensors, str, Sequence[Tensor]], Tensors]
    diagnose: Callable[[Tensors, Sequence[Tensor], int], Tensors]
    cost: Callable[[], dict[str, float]]
    close: Close
    agree: Callable[[bool], bool] = as_it_is
    share: Callable[[bytes], bytes] = as_it_is
    owner: Any = None


Connect = Callable[[], Strategy]
"""What a strategy's factory returns: its settings are checked, nothing is started yet."""


def diagnosed(work: Work, params: Tensors, chunk: Tensor, step: int, rank: int) -> Tensors:
    """What a worker finds wrong with a chunk, beside its rank."""
    found = work.diagnose(params, chunk, step)
    return found | {"worker": torch.full((len(chunk),), rank)}


def join(values: Sequence[Tensors]) -> Tensors:
    """Per-sample values of several chunks, one after the other."""
    return {name: torch.cat([value[name] for value in values]) for name in values[0]}
