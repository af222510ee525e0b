"""What the strategies by remote calls share: chunks are dealt out by number, any worker computes them, and the results
come back in chunk order, or as partial sums. Parameters and results travel as flat buffers."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.api import parts_of, remote_sync_call
from distributed.calls.message import traffic
from distributed.calls.session import default_timeout, start_rpc, stop_rpc
from distributed.calls.worker import pure
from distributed.info import check_timeout, get_world_rank, get_world_size
from distributed.launch.isolation import exposure
from distributed.partition import Args, PartitionFunction, TensorDimensionPartitioner, Whole
from distributed.reduce import Tensors, partials
from distributed.strategies.common.work import (
    ROUND,
    ChunkStrategy,
    Connect,
    Evaluator,
    Flat,
    Work,
    WorkerCost,
    WorkPlan,
    advised,
    as_metrics,
    diagnose_chunk,
    even_runs,
    flatten,
    in_rounds,
    to_cpu,
    unflatten,
)

log = logging.getLogger(__name__)

_work: Work | None = None  # the work of this process, for remote calls; set before RPC starts


def current_work() -> Work:
    """The work that this process was given when its session started."""
    assert _work is not None
    return _work


def deal(partitioner: PartitionFunction, count: int) -> list[tuple[int | str, list[int]]]:
    """Which worker computes which chunks, by their numbers. Raises ValueError if the partitioner leaves a chunk out, or
    gives it out twice."""
    plain = type(partitioner) is TensorDimensionPartitioner and not partitioner.exclusive and not partitioner.workers
    if plain:  # whose last part would have the whole remainder: of 8 workers and 15 chunks, 8 chunks
        return [(worker, list(run)) for worker, run in enumerate(even_runs(range(count), get_world_size())) if run]
    dealt = []
    for worker, args, kwargs in parts_of(partitioner, (torch.arange(count),), {}):
        numbers = next(iter([*(args or ()), *(kwargs or {}).values()]), None)
        numbers = numbers.value if isinstance(numbers, Whole) else numbers
        if not isinstance(numbers, Tensor):
            raise ValueError(f"partitioner={partitioner!r}: a part must hold a tensor with the numbers of its chunks")
        dealt.append((worker, numbers.reshape(-1).tolist()))
    times, chunks = Counter(number for _, numbers in dealt for number in numbers), set(range(count))
    twice = {number for number in times if times[number] > 1}
    faults = {"to no worker": chunks - times.keys(), "twice": twice, "that do not exist": times.keys() - chunks}
    for what, wrong in faults.items():
        if wrong:
            raise ValueError(f"partitioner={partitioner!r}: of {count} chunks it gave out {sorted(wrong)} {what}")
    return dealt


PartAnswer = tuple[dict[Any, Any] | Flat, Counter[int]]
"""The results of one or more workers, by chunk number or by subtree; and seconds of compute, by rank."""


def compute(numbers: list[int], results: Iterable[Any], adds: int | None = None, *, flat: bool = True) -> PartAnswer:
    """Runs on a worker: computes the results of its chunks, one after the other. They are added up as far as possible
    if `adds` is the number of all workers' chunks. If `flat`, they travel as flat buffers, and without graphs."""
    began = time.perf_counter()
    numbered = zip(numbers, results, strict=True)
    computed: dict[Any, Any] = dict(numbered) if adds is None else partials(numbered, adds)
    seconds = Counter({get_world_rank(): time.perf_counter() - began})
    return flatten(computed) if flat else computed, seconds


def call(
    func: Callable[..., PartAnswer], partitioner: PartitionFunction, chunks: Sequence[Tensor],
    args: Callable[[list[int]], Args],
) -> tuple[dict[Any, Any], Counter[int]]:  # fmt: skip
    """Calls `func(numbers, chunks, *args(numbers))` on the workers from here: the numbers of a worker's chunks, as the
    partitioner deals them out, and the indices of their samples. Returns all results, in the order of the chunks or
    subtrees, and seconds of compute, by rank."""
    dealt = deal(partitioner, len(chunks))
    # An object that is in several items of a worker, such as the parameters, goes there once.
    parts = [(worker, (numbers, [chunks[i] for i in numbers], *args(numbers)), None) for worker, numbers in dealt]
    try:
        answers = remote_sync_call(func, partitioner=lambda: parts)
    except TimeoutError as error:
        raise advised(error, default_timeout()) from error
    results, seconds = dict[Any, Any](), Counter[int]()
    for of_worker, took in answers:
        results |= unflatten(of_worker) if isinstance(of_worker, Flat) else of_worker
        seconds += took
    return {key: results[key] for key in sorted(results)}, seconds


@pure
def _evaluate(numbers: list[int], chunks: list[Tensor], flat: Flat, split: str) -> PartAnswer:
    params = unflatten(flat)
    return compute(numbers, (current_work().evaluate(params, split, chunk) for chunk in chunks))


@pure
def _diagnose(numbers: list[int], chunks: list[Tensor], flat: Flat, step: int) -> PartAnswer:
    params, rank = unflatten(flat), get_world_rank()
    return compute(numbers, (diagnose_chunk(current_work(), params, chunk, step, rank) for chunk in chunks))


def start_session(work: Work, timeout: float) -> bool:
    """Starts RPC; returns whether this is rank zero, which logs who can connect."""
    global _work
    _work = work
    start_rpc(timeout=timeout)
    leads = get_world_rank() == 0
    if leads:
        log.info("%s", exposure())
    return leads


MapChunks = Callable[[Flat, Sequence[Tensor], int], tuple[list[Any], Counter[int], Counter[int]]]
"""From flat parameters, chunks and step to the results, the seconds of each worker's compute, and the bytes that each
has sent and the counter of remote calls does not see."""


def by_calls(plan: WorkPlan, timeout: float, map_chunks: MapChunks) -> Connect:
    """A strategy that maps chunks by remote calls of rank zero. Raises ValueError for a partitioner that would split
    chunks, or a time limit that is not above 0."""
    check_timeout(timeout)
    if isinstance(plan.partitioner, TensorDimensionPartitioner) and plan.partitioner.dim != 0:
        dim = plan.partitioner.dim
        raise ValueError(f"partitioner.dim={dim}: chunks lie along dimension 0; type partitioner.dim=0")
    return lambda: _ByCalls(plan, timeout, map_chunks)


class _ByCalls(ChunkStrategy):
    """From the start of the session to its end."""

    def __init__(self, plan: WorkPlan, timeout: float, map_chunks: MapChunks) -> None:
        self._partitioner, self._map_chunks = plan.partitioner, map_chunks
        self.drives = start_session(plan.work, timeout)

    def map(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        before, began = traffic(), time.perf_counter()
        results, seconds, beside = self._map_chunks(flatten(to_cpu(params)), chunks, step)
        duration = time.perf_counter() - began
        sent, received = traffic().since(before)
        by_rank = received + beside + Counter({0: sent})
        costs = [WorkerCost(seconds[rank], by_rank[rank]) for rank in range(get_world_size())]
        self._cost = as_metrics(duration, costs)
        return [to_cpu(result) for result in results]

    def evaluator(self, params: Tensors, split: str) -> Evaluator:
        return self._by(_evaluate, flatten(to_cpu(params)), split)

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        return in_rounds(self._by(_diagnose, flatten(to_cpu(params)), step), chunks)

    def _by(self, func: Callable[..., PartAnswer], *args: Any) -> Evaluator:
        def values_of(group: Sequence[Tensor]) -> list[Tensors]:
            results, _ = call(func, self._partitioner, group, lambda _: args)
            return [to_cpu(values) for values in results.values()]

        return ROUND * get_world_size(), values_of

    def close(self, failure: BaseException | None = None) -> None:
        stop_rpc(failure)
