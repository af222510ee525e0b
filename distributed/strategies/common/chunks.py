"""What the strategies by remote calls share: chunks are dealt out by number, any worker computes them, and the results
come back in chunk order, or as partial sums. Parameters and results travel as flat buffers."""

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from distributed.api import parts_of, remote_sync_call
from distributed.calls.session import DeviceMaps, current, start_rpc
from distributed.calls.traffic import Traffic, traffic
from distributed.cluster.ending import regroup, stop_rpc
from distributed.cluster.info import default_worker_name, get_world_info, get_world_rank, get_world_size, on_one_host
from distributed.cluster.listening import listening_line, session_listeners
from distributed.functions import pure
from distributed.partition import Args, DynamicPartitioner, PartitionFunction, TensorDimensionPartitioner, Whole, whole
from distributed.strategies.common.relay import PartFunction, PartResult, RelayedCall, fan_out_for, grow, joined, relay
from distributed.strategies.common.work import (
    ChunkStrategy,
    Done,
    Flat,
    Tensors,
    Work,
    WorkerCost,
    WorkPlan,
    as_metrics,
    diagnose_chunk,
    evaluated,
    even_runs,
    flatten,
    in_rounds,
    unflatten,
    unnoticed,
)
from distributed.tree_sum import partials_of_terms
from distributed.world import get_worker_id

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


Dealt = list[tuple[int | str | None, list[int]]]
"""Parts of a call: (worker, or None for the first free worker; the numbers of its chunks)."""


def deal(partitioner: PartitionFunction, count: int) -> Dealt:
    """Which worker computes which chunks.

    Raises:
        ValueError: the partitioner leaves a chunk out, or gives it out twice.
    """
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
    given = sorted(number for _, numbers in dealt for number in numbers)
    twice = {number for number, after in itertools.pairwise(given) if number == after}
    everything = set(range(count))
    faults = {"to nobody": everything - set(given), "twice": twice, "that do not exist": set(given) - everything}
    for what, wrong in faults.items():
        if wrong:
            raise ValueError(f"partitioner={partitioner!r}: of {count} chunks it gave out {sorted(wrong)} {what}")
    return dealt


class How(NamedTuple):
    """How a strategy sends chunks to the workers.

    Attributes:
        partitioner: deals the numbers of the chunks out to the workers.
        timeout: seconds that a worker may take for its part.
        fan_out: the base of the tree, see `relay`; or `auto`.
        max_lost: how many workers may be lost; `auto`: all but rank zero.
    """

    partitioner: PartitionFunction
    timeout: float
    fan_out: int | str
    max_lost: int | str

    def retries(self) -> int:
        """How often a chunk may be sent to another worker."""
        return get_world_size() - 1 if isinstance(self.max_lost, str) else self.max_lost


def compute(numbers: list[int], results: Iterable[Any], adds: int | None = None) -> PartResult:
    """Runs on a worker: computes the results of its chunks, one after the other.

    `adds`: the number of all workers' chunks if results are added up as far as possible; None if they are not.
    """
    began = time.perf_counter()
    numbered = zip(numbers, results, strict=True)
    computed: dict[Any, Any] = dict(numbered) if adds is None else partials_of_terms(numbered, adds)
    return PartResult(computed, Counter({get_world_rank(): time.perf_counter() - began}), Counter())


def call(
    func: PartFunction,
    partitioner: PartitionFunction,
    chunks: Sequence[Tensor],
    args: Callable[[list[int]], Args],
    timeout: float,
) -> PartResult:
    """Calls `func` on the workers from here; returns all results, by chunk number or by subtree.

    Args:
        func: called on a worker with the numbers of its chunks, the chunks, and `args(numbers)`.
        partitioner: deals the numbers of the chunks out to the workers.
        chunks: the indices of each chunk's samples.
        args: gives the further arguments for a worker's chunks.
        timeout: seconds that the error names if a worker does not answer.
    """
    with _naming_the_setting(timeout):
        return _call_dealt(func, deal(partitioner, len(chunks)), chunks, args)


def call_along_tree(
    func: PartFunction, shared: Args, adds: int | None, chunks: Sequence[Tensor], how: How
) -> PartResult:
    """As `call`, with the same further arguments for all workers, which pass them on; see `relay`.

    If the partitioner leaves chunks to the first free worker, all workers get them from here. If workers are lost, the
    others compute their chunks, in this call and in all later ones.

    Args:
        func: as for `call`, and pure.
        shared: the further arguments.
        adds: the number of all chunks if results are added up as far as possible; None if they are not.
        chunks: the indices of each chunk's samples.
        how: the settings of the strategy.

    Raises:
        ConnectionError, TimeoutError: more workers are lost than the strategy allows.
    """
    for change in regroup() if how.max_lost else ():
        log.info("%s", change)
    dealt = deal(how.partitioner, len(chunks))
    session = current()
    away = session.away
    before = set(away)
    with _naming_the_setting(how.timeout):
        if any(worker is None for worker, _ in dealt):
            once = tuple(map(whole, shared))
            result = _call_dealt(func, dealt, chunks, lambda _: once, how.retries())
        else:
            tree = grow(_to_present_workers(dealt, away), get_world_rank(), fan_out_for(how.fan_out, get_world_size()))
            request = RelayedCall(func, shared, adds, how.timeout, how.retries())
            result = relay(tree, dict(enumerate(chunks)), request)
    away |= result.lost
    if away - before:
        lost = " and ".join(session.workers[rank] for rank in sorted(away - before))
        if isinstance(how.max_lost, int) and session.lost() > how.max_lost:
            raise ConnectionError(
                f"{lost} does not answer any more, the last of {session.lost()} lost workers; type "
                "strategy.max_lost=auto to go on with those that are left"
            )
        do, their = ("do", "their") if len(away - before) > 1 else ("does", "its")
        log.warning("%s %s not answer any more; the other workers compute %s chunks from now on", lost, do, their)
    return result


def _to_present_workers(dealt: Dealt, away: Collection[int]) -> dict[int, list[int]]:
    """By rank, the numbers of its chunks. Those of workers that are away go to the workers that have the fewest."""
    numbers: defaultdict[int, list[int]] = defaultdict(list)
    for worker, its_numbers in dealt:
        assert worker is not None
        numbers[get_worker_id(worker)] += its_numbers
    present = {rank: numbers[rank] for rank in range(get_world_size()) if rank not in away}
    for rank in sorted(numbers.keys() & set(away)):
        for number in numbers[rank]:
            min(present.values(), key=len).append(number)
    return {rank: sorted(its_numbers) for rank, its_numbers in present.items() if its_numbers}


def _call_dealt(
    func: PartFunction,
    dealt: Dealt,
    chunks: Sequence[Tensor],
    args: Callable[[list[int]], Args],
    retries: int = 0,
) -> PartResult:
    parts = [(worker, (numbers, [chunks[i] for i in numbers], *args(numbers)), None) for worker, numbers in dealt]
    return joined(remote_sync_call(func, partitioner=lambda: parts, retries=retries))


@contextmanager
def _naming_the_setting(timeout: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{error}; type strategy.timeout=SECONDS to allow more than {timeout:g}") from error


def in_order(result: PartResult) -> list[Any]:
    """The results in the order of the chunks."""
    by_number = result.unpacked()
    return [by_number[number] for number in sorted(by_number)]


def sample_values(
    func: PartFunction, params: Tensors, argument: Any, chunks: Sequence[Tensor], how: How, done: Done = unnoticed
) -> Tensors:
    """The values of every sample by `func`, in order."""
    shared = (flatten(for_transport(params)), argument)
    rounds = in_rounds(chunks, get_world_info().world_size)
    values: Tensors = to_cpu(
        evaluated(rounds, lambda part: in_order(call_along_tree(func, shared, None, part, how)), done)
    )
    return values


@pure
def _evaluate(numbers: list[int], chunks: list[Tensor], flat: Flat, split: str) -> PartResult:
    params = unflatten(flat)
    return compute(numbers, (current_work().evaluate(params, split, chunk) for chunk in chunks)).flat()


@pure
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

    def stop(self, seconds: Counter[int], beside: Traffic | None = None) -> None:
        """`seconds`: of each worker's compute. `beside`: bytes that this process's remote calls do not count."""
        duration = time.perf_counter() - self._began
        (sent, received) = traffic().since(self._before)
        (more_sent, more_received) = beside or Traffic(0, Counter())
        by_rank = received + more_received + Counter({0: sent + more_sent})
        costs = [WorkerCost(seconds[rank], by_rank[rank]) for rank in range(get_world_info().world_size)]
        self._cost = as_metrics(duration, costs)

    def cost(self) -> dict[str, float]:
        return self._cost


# GPUs


def mapped_devices(rank: int, workers: int, gpus: int) -> DeviceMaps:
    """Worker's name → {GPU of `rank`: that worker's}; worker i has GPU i. Empty if there are too few GPUs."""
    if workers < 2 or gpus < workers:
        return {}
    return {default_worker_name(other, workers): {rank: other} for other in range(workers) if other != rank}


def for_transport(params: Tensors) -> Tensors:
    """Parameters on the device that they are sent from: the GPU if GPUs are mapped, else the CPU."""
    device = current_work().device if current().device_maps else torch.device("cpu")
    return {name: value.detach().to(device) for name, value in params.items()}


def to_cpu(values: Any) -> Any:
    """Moves results to the CPU, where the loop keeps its parameters."""
    return pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, values)


# The session


def start_session(work: Work, timeout: float, device_maps: str = "none") -> bool:
    """Starts RPC; returns whether this is rank zero, which logs the addresses that the workers listen on.

    With `device_maps=auto`, tensors go from GPU to GPU if all workers are on one host and each has its own.
    """
    global _work
    _work = work
    maps: DeviceMaps = {}
    if device_maps == "auto" and work.device.type == "cuda" and on_one_host():
        maps = mapped_devices(get_world_rank(), get_world_size(), torch.cuda.device_count())
    start_rpc(timeout=timeout, device_maps=maps)
    leads = get_world_rank() == 0
    if leads:
        log.info("%s", listening_line(session_listeners()))
    return leads


MapChunks = Callable[[Tensors, Sequence[Tensor], int], list[Any]]


class ByCalls(ChunkStrategy):
    """A strategy that maps chunks by remote calls of rank zero, from the start of the session to its end."""

    def __init__(self, plan: WorkPlan, how: How, device_maps: str, map_chunks: MapChunks, meter: Meter) -> None:
        self._how, self._map_chunks, self._meter = how, map_chunks, meter
        self.drives = start_session(plan.work, how.timeout, device_maps)

    def map(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        return [to_cpu(result) for result in self._map_chunks(params, chunks, step)]

    def evaluate(self, params: Tensors, split: str, chunks: Sequence[Tensor], done: Done = unnoticed) -> Tensors:
        return sample_values(_evaluate, params, split, chunks, self._how, done)

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        return sample_values(_diagnose, params, step, chunks, self._how)

    def cost(self) -> dict[str, float]:
        return self._meter.cost()

    def close(self, failure: BaseException | None = None) -> None:
        try:
            stop_rpc(failure)
        except ConnectionError as error:
            if failure is not None or not self.drives or not self._how.max_lost:
                raise
            log.warning("%s; all is computed, so it is not needed any more", error)
