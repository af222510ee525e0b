"""The types of the strategies: the work that they distribute, the plan that they get, and `ChunkStrategy` itself; the
cost of a step; and flat buffers, as which parameters and results travel.

None of them knows of learning.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distributed.partition import PartitionFunction
from distributed.reduce import Combine, Tensors, add_up, mean_of_sums

T = TypeVar("T")


class PipelineStage(NamedTuple):
    """One step of a network that is a sequence of steps: the names of its parameters, the number of their elements, and
    `apply(params, h, support_size)`, which gets the outputs `h` of the previous stage, and the number from
    `Pieces.inputs`."""

    name: str
    params: tuple[str, ...]
    size: int
    apply: Callable[[Tensors, Tensor, int], Tensor]


class Pieces(NamedTuple):
    """A network, its loss and its optimiser in pieces that different workers can compute.

    `inputs(split, indices)` gives the first stage's input [1, support_size + n, …] and the `support_size` that all
    stages get. From the last stage's outputs [1, n, …], `values(outputs, split, indices)` gives a value per sample, and
    `outcome` gives the same as `Work.loss`. From these values `faults` gives the same as `Work.diagnose`.
    `start(params)` makes an optimiser with `param_groups`, `step`, `state_dict` and `load_state_dict` as torch's.
    """

    stages: Sequence[PipelineStage]
    inputs: Callable[[str, Tensor], tuple[Tensor, int]]
    outcome: Callable[[Tensor, str, Tensor], tuple[Tensor, Any]]
    values: Callable[[Tensor, str, Tensor], Tensors]
    faults: Callable[[Tensors], Tensors]
    start: Callable[[Tensors], Any]


class Work(NamedTuple):
    """Pure functions that any worker can compute on a chunk, and the device that it computes on.

    `map(params, indices, step)` gives sums over the chunk's samples, nested in any way, with the gradients among
    them. `evaluate(params, split, indices)` gives a value per sample. `diagnose(params, indices, step)` gives the
    fault of each sample, if any. If the loss has a graph, `loss(params, indices, step)` gives its sum over the chunk
    with the graph, and the rest that `result(gradients, rest)` needs to give the same as `map`. `plain`: no gradient is
    taken inside the loss. `pieces`: set if the network can be cut.
    """

    map: Callable[[Tensors, Tensor, int], Any]
    evaluate: Callable[[Tensors, str, Tensor], Tensors]
    diagnose: Callable[[Tensors, Tensor, int], Tensors]
    loss: Callable[[Tensors, Tensor, int], tuple[Tensor, Any]] | None
    result: Callable[[Tensors, Any], Any]
    device: torch.device
    plain: bool = False
    pieces: Pieces | None = None


class WorkPlan(NamedTuple):
    """What a strategy needs to know: the work, the number of workers, the partitioner of the chunk numbers, the reducer
    of the chunks' gradients, whether the loop averages the parameters, which it then updates itself, and whether the
    optimiser needs the norm of the whole gradient."""

    work: Work
    workers: int
    partitioner: PartitionFunction
    reduce: Combine
    averages: bool = False
    by_norm: bool = False

    @property
    def only_adds(self) -> bool:
        """Whether the reducer needs only the sum of the chunks' results and the number of samples."""
        return self.reduce in (mean_of_sums, add_up)


ROUND = 4  # chunks that a worker evaluates between two exchanges


def even_runs(chunks: Sequence[T], ranks: int) -> list[Sequence[T]]:
    """Each rank's chunks, or their numbers: consecutive, and as even as possible; the first ranks have one more."""
    each, more = divmod(len(chunks), ranks)
    ends = [each * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return [chunks[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


Evaluator = tuple[int, Callable[[Sequence[Tensor]], Sequence[Tensors]]]
"""How many chunks are evaluated together, and what gives the per-sample values of each of them."""


def in_rounds(
    evaluator: Evaluator, chunks: Sequence[Tensor], done: Callable[[int], None] = lambda samples: None
) -> Tensors:
    """The values of all samples. `done` is called with the number of samples after each round."""
    # Workers wait for each other for a few chunks only, however many there are, and a time limit is for a few, too.
    size, values_of = evaluator
    values: list[Tensors] = []
    for first in range(0, len(chunks), size):
        group = chunks[first : first + size]
        values += values_of(group)
        done(sum(map(len, group)))
    return join(values)


class ChunkStrategy:
    """A way to distribute chunks over workers; for the methods see `metalearn.types.Strategy`.

    The defaults are those of a strategy that one process drives, which updates the parameters itself.
    """

    drives = True
    shares: Any = None
    _cost: dict[str, float] | None = None  # of the last step, by `as_metrics`

    def map(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        raise NotImplementedError

    def evaluator(self, params: Tensors, split: str) -> Evaluator:
        """What evaluates chunks of a split by these parameters."""
        raise NotImplementedError

    def evaluate(
        self, params: Tensors, split: str, chunks: Sequence[Tensor], done: Callable[[int], None] = lambda samples: None
    ) -> Tensors:
        return in_rounds(self.evaluator(params, split), chunks, done)

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        raise NotImplementedError

    def updater(self, here: Any, params: Tensors, optimizer: Any) -> Any:
        return here

    def cost(self) -> dict[str, float]:
        return self._cost or {}

    def share(self, value: Any) -> Any:
        return value

    def dismiss(self) -> None:
        """There are no other drivers to dismiss."""

    def close(self, failure: BaseException | None = None) -> None:
        """There is nothing to end."""


Connect = Callable[[], ChunkStrategy]
"""What a strategy's factory returns. The settings are checked; the call starts the strategy."""


def diagnose_chunk(work: Work, params: Tensors, chunk: Tensor, step: int, rank: int) -> Tensors:
    """The faults of a chunk's samples, and the rank of the worker that computed them."""
    faults = work.diagnose(params, chunk, step)
    return faults | {"worker": torch.full((len(chunk),), rank)}


def join(values: Sequence[Tensors]) -> Tensors:
    """Joins the per-sample values of several chunks, in their order."""
    return {name: torch.cat([value[name] for value in values]) for name in values[0]}


def advised(error: Exception, timeout: float) -> Exception:
    """The error; with advice on the setting if it is a TimeoutError."""
    advice = f"; type strategy.timeout=SECONDS to allow more than {timeout:g}"
    return TimeoutError(f"{error}{advice}") if isinstance(error, TimeoutError) else error


# The cost of a step


class WorkerCost(NamedTuple):
    """One worker's cost of a step: seconds of compute, and bytes sent."""

    compute: float
    sent: float


def as_metrics(seconds: float, costs: Sequence[WorkerCost]) -> dict[str, float]:
    """Metrics by name, worker by worker, of a step that took `seconds` on rank zero.

    Every worker's seconds add up to the step's. Compute: the worker computed. Waiting: it was done, but the slowest
    worker was not. Communication, that is, packing, sending and adding: the rest of the step.
    """
    slowest = max(cost.compute for cost in costs)
    metrics = {}
    for rank, cost in enumerate(costs):
        metrics[f"worker{rank}/compute_seconds"] = cost.compute
        metrics[f"worker{rank}/waiting_seconds"] = slowest - cost.compute
        metrics[f"worker{rank}/communication_seconds"] = max(0.0, seconds - slowest)
        metrics[f"worker{rank}/bytes_sent"] = cost.sent
    return metrics


Windows = dict[int, tuple[float, float]]


def watch(windows: Windows, key: int, tensors: Iterable[Tensor]) -> None:
    """Notes in `windows`, by this key, the times when the backward pass, which torch runs, has computed the first and
    the latest gradient of these tensors."""

    def note(gradient: Tensor) -> None:
        now = time.perf_counter()
        began, _ = windows.get(key, (now, now))
        windows[key] = (began, now)

    for tensor in tensors:
        tensor.register_hook(note)


# Flat buffers: all tensors and numbers of a nested value in one tensor for each type, so that few tensors travel


@dataclass(frozen=True)
class Slot:
    """The place of a leaf: its buffer, its first element there, its shape; of a number its class, else None."""

    buffer: int
    start: int
    shape: tuple[int, ...]
    number: type | None


class Flat(NamedTuple):
    """A nested value in which a `Slot` stands for each leaf, and one buffer [k] for each type and device."""

    buffers: list[Tensor]
    form: Any


def flatten(value: Any) -> Flat:
    """Copies the leaves of a value to flat buffers. Numbers become int64 or float64. A graph is left behind."""
    pieces: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: list[int] = []

    def slot(leaf: Any) -> Slot:
        number = torch.float64 if isinstance(leaf, float) else torch.int64
        tensor = leaf.detach() if isinstance(leaf, Tensor) else torch.tensor(leaf, dtype=number)
        kind = (tensor.dtype, tensor.device)
        if kind not in pieces:
            pieces[kind] = []
            sizes.append(0)
        buffer = list(pieces).index(kind)
        start = sizes[buffer]
        pieces[kind].append(tensor.reshape(-1))
        sizes[buffer] += tensor.numel()
        return Slot(buffer, start, tuple(tensor.shape), None if isinstance(leaf, Tensor) else type(leaf))

    form = pytree.tree_map(slot, value)
    return Flat([torch.cat(tensors) for tensors in pieces.values()], form)


def unflatten(flat: Flat) -> Any:
    """The value. Its tensors are copies, so they are aligned as any other tensor, and kernels give the same bits."""

    def leaf(slot: Slot) -> Any:
        size = torch.Size(slot.shape).numel()
        values = flat.buffers[slot.buffer][slot.start : slot.start + size]
        return values.clone().view(slot.shape) if slot.number is None else slot.number(values.item())

    return pytree.tree_map(leaf, flat.form)


def to_cpu(values: Any) -> Any:
    """Moves parameters and results to the CPU, where they travel, and where the loop keeps its parameters."""
    return pytree.tree_map_only(Tensor, Tensor.cpu, values)
