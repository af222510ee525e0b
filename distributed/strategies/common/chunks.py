"""What the strategies by remote calls share: chunks are dealt out by number, any worker computes them, and the results
come back in chunk order, or as partial sums. Parameters and results travel as flat buffers."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distributed.engine.info import get_world_info, get_world_rank, on_one_host
from distributed.engine.listening import listening_line, session_listeners
from distributed.engine.session import DeviceMaps, start_rpc, stop_rpc
from distributed.engine.traffic import Traffic, traffic
from distributed.partition import Args, DynamicPartitioner, PartitionFunction, TensorDimensionPartitioner, Whole, whole
from distributed.remote import parts_of, remote_sync_call
from distributed.strategies.common.cost import WorkerCost, as_metrics
from distributed.strategies.common.flat import Flat, flatten, unflatten
from distributed.strategies.common.work import Plan, Strategy, Tensors, Work, diagnose_chunk, join
from distributed.tree_sum import partials_of_terms

ROUND = 4
"""Chunks that a worker evaluates in one call."""

DEVICE_MAPS = ("auto", "none")

log = logging.getLogger(__name__)

_work: Work | None = None
"""The work of this process, for remote calls; set before RPC starts."""


def current_work() -> Work:
    """The work that this process was given when its session started."""
    if _work is None:
        raise RuntimeError("this worker got a call before its strategy was started")
    return _work


def check_partitioner(partitioner: PartitionFunction) -> None:
    """Raises ValueError for a partitioner that would split chunks."""
    if isinstance(partitioner, TensorDimensionPartitioner | DynamicPartitioner) and partitioner.dim != 0:
        raise ValueError(f"partitioner.dim={partitioner.dim}: chunks lie along dimension 0; type partitioner.dim=0")


def check_device_maps(device_maps: str) -> None:
    """Raises ValueError if the value is neither `auto` nor `none`."""
    if device_maps not in DEVICE_MAPS:
        raise ValueError(f"device_maps={device_maps}: must be {' or '.join(DEVICE_MAPS)}")


def deal(partitioner: PartitionFunction, count: int) -> list[tuple[int | str | None, list[int]]]:
    """Which worker computes which chunks: (worker, or None for the first free worker; numbers of its chunks).

    Raises:
        ValueError: the partitioner leaves a chunk out, or gives it out twice.
    """
    dealt = []
    for worker, args, kwargs in parts_of(partitioner, (torch.arange(count),), {}):
        numbers = next(iter([*(args or ()), *(kwargs or {}).values()]), None)
        numbers = numbers.value if isinstance(numbers, Whole) else numbers
        if not isinstance(numbers, Tensor):
            raise ValueError(f"partitioner={partitioner!r}: a part must hold a tensor with the numbers of its chunks")
        dealt.append((worker, numbers.reshape(-1).tolist()))
    given = sorted(number for _, numbers in dealt for number in numbers)
    twice = {number for number, after in itertools.pairwise(given) if number == after}
    everything = set(range(count))
    faults = {"to nobody": everything - set(given), "twice": twice, "that do not exist": set(given) - everything}
    for what, wrong in faults.items():
        if wrong:
            raise ValueError(f"partitioner={partitioner!r}: of {count} chunks it gave out {sorted(wrong)} {what}")
    return dealt


class PartResult(NamedTuple):
    """The results of a worker's part, by chunk number or by subtree; its rank; and the seconds that it took."""

    results: dict[Any, Any] | Flat
    rank: int
    seconds: float

    def flat(self) -> "PartResult":
        """The same with flat buffers, and without graphs."""
        return self._replace(results=flatten(self.results))


def compute(numbers: list[int], results: Iterable[Any], adds: int | None = None) -> PartResult:
    """Runs on a worker: computes the results of its chunks, one after the other.

    `adds`: the number of all workers' chunks if results are added up as far as possible; None if they are not.
    """
    began = time.perf_counter()
    numbered = zip(numbers, results, strict=True)
    computed: dict[Any, Any] = dict(numbered) if adds is None else partials_of_terms(numbered, adds)
    return PartResult(computed, get_world_rank(), time.perf_counter() - began)


def call(
    func: Callable[..., PartResult],
    partitioner: PartitionFunction,
    chunks: Sequence[Tensor],
    args: Callable[[list[int]], Args],
    timeout: float,
) -> tuple[dict[Any, Any], Counter[int]]:
    """Calls `func` on the workers; returns the results by chunk number or by subtree, and each worker's seconds, by
    rank.

    Args:
        func: called on a worker with the numbers of its chunks, the chunks, and `args(numbers)`.
        partitioner: deals the numbers of the chunks out to the workers.
        chunks: the indices of each chunk's samples.
        args: gives the further arguments for a worker's chunks.
        timeout: seconds that the error names if a worker does not answer.
    """
    parts = [
        (worker, (numbers, [chunks[i] for i in numbers], *args(numbers)), None)
        for worker, numbers in deal(partitioner, len(chunks))
    ]
    try:
        answers = remote_sync_call(func, partitioner=lambda: parts)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; type strategy.timeout=SECONDS to allow more than {timeout:g}") from error
    seconds: Counter[int] = Counter()
    results: dict[Any, Any] = {}
    for done in answers:
        seconds[done.rank] += done.seconds
        results.update(unflatten(done.results) if isinstance(done.results, Flat) else done.results)
    return results, seconds


def in_order(results: dict[int, Any]) -> list[Any]:
    """The results in the order of the chunks."""
    return [results[number] for number in sorted(results)]


def sample_values(
    func: Callable[..., PartResult],
    partitioner: PartitionFunction,
    params: Tensors,
    chunks: Sequence[Tensor],
    argument: Any,
    timeout: float,
) -> Tensors:
    """The values of every sample by `func`, in order. Chunks are sent in rounds, so that the time limit is for a few
    chunks only, however many there are."""
    size = ROUND * get_world_info().world_size
    shared = (whole(flatten(for_transport(params))), argument)
    rounds = [chunks[i : i + size] for i in range(0, len(chunks), size)]
    by_chunk = [v for part in rounds for v in in_order(call(func, partitioner, part, lambda _: shared, timeout)[0])]
    joined: Tensors = to_cpu(join(by_chunk))
    return joined


def _evaluate(numbers: list[int], chunks: list[Tensor], flat: Flat, split: str) -> PartResult:
    params = unflatten(flat)
    return compute(numbers, (current_work().evaluate(params, split, chunk) for chunk in chunks)).flat()


def _diagnose(numbers: list[int], chunks: list[Tensor], flat: Flat, step: int) -> PartResult:
    params, rank = unflatten(flat), get_world_rank()
    return compute(numbers, (diagnose_chunk(current_work(), params, chunk, step, rank) for chunk in chunks)).flat()


class Meter:
    """Measures the cost of a step on rank zero, from its own calls and the workers' answers."""

    def __init__(self) -> None:
        self._began = 0.0
        self._before = traffic()
        self._cost: dict[str, float] = {}

    def start(self) -> None:
        self._before = traffic()
        self._began = time.perf_counter()

    def stop(self, compute: Counter[int], backward: Traffic | None = None) -> None:
        """`compute`: each worker's seconds. `backward`: bytes of a backward pass, which remote calls do not count."""
        seconds = time.perf_counter() - self._began
        (sent, received) = traffic().since(self._before)
        (more_sent, more_received) = backward or Traffic(0, Counter())
        by_rank = received + more_received + Counter({0: sent + more_sent})
        self._cost = as_metrics(
            seconds, [WorkerCost(compute[r], by_rank[r]) for r in range(get_world_info().world_size)]
        )

    def cost(self) -> dict[str, float]:
        return self._cost


# GPUs


def automatic_device_maps() -> DeviceMaps:
    """From this worker's GPU to that of each other worker, if all workers are on one host and each has its own GPU."""
    info = get_world_info()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return mapped_devices(info.world_rank, info.world_size, gpus) if on_one_host() else {}


def mapped_devices(rank: int, workers: int, gpus: int) -> DeviceMaps:
    """Worker's name → {GPU of `rank`: that worker's}; worker i has GPU i. Empty if there are too few GPUs."""
    if workers < 2 or gpus < workers:
        return {}
    width = len(str(workers))
    return {f"worker{other:0{width}d}": {rank: other} for other in range(workers) if other != rank}


_by_gpu = False


def for_transport(params: Tensors) -> Tensors:
    """Parameters on the device that they are sent from: the GPU if GPUs are mapped, else the CPU."""
    device = current_work().device if _by_gpu else torch.device("cpu")
    return {name: value.detach().to(device) for name, value in params.items()}


def to_cpu(values: Any) -> Any:
    """Moves results to the CPU, where the loop keeps its parameters."""
    return pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, values)


# The session


def start_session(work: Work, timeout: float, device_maps: str = "none") -> bool:
    """Starts RPC; returns whether this is rank zero, which logs the addresses that the workers listen on."""
    global _work, _by_gpu
    _work = work
    maps = automatic_device_maps() if device_maps == "auto" and work.device.type == "cuda" else {}
    _by_gpu = bool(maps)
    start_rpc(timeout=timeout, device_maps=maps)
    leads = get_world_rank() == 0
    if leads:
        log.info("%s", listening_line(session_listeners()))
    return leads


def connect(
    plan: Plan,
    timeout: float,
    device_maps: str,
    map_chunks: Callable[[Tensors, Sequence[Tensor], int], list[Any]],
    meter: Meter,
) -> Strategy:
    """Starts the session of a strategy that maps chunks by remote calls; returns the strategy."""
    leads = start_session(plan.work, timeout, device_maps)

    def map_metered(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        return [to_cpu(result) for result in map_chunks(params, chunks, step)]

    def evaluate_chunks(params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
        return sample_values(_evaluate, plan.partitioner, params, chunks, split, timeout)

    def diagnose_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        return sample_values(_diagnose, plan.partitioner, params, chunks, step, timeout)

    return Strategy(leads, map_metered, evaluate_chunks, diagnose_chunks, meter.cost, stop_rpc)
