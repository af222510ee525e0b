"""RPC map-reduce: rank zero deals chunks out to all workers, itself included, and each computes its chunks alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.calls.worker import pure
from distributed.info import check_timeout
from distributed.partition import whole
from distributed.reduce import combine
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.work import Connect, Flat, Tensors, WorkPlan, flatten, unflatten


def rpc(*, plan: WorkPlan, timeout: float) -> Connect:
    """Rank zero drives and also computes. The other workers serve until rank zero closes the session.

    The parameters go to each worker once per step. If the reducer only adds, a worker adds its chunks' results as far
    as the order of `distributed.reduce` allows. Then fewer results come back, one for an aligned run of chunks.

    Args:
        plan: the work, the number of workers, the partitioner of the chunk numbers, and the reducer.
        timeout: seconds that a worker may take for its part.

    Raises:
        ValueError: the partitioner would split chunks, or the time limit is not above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(plan.partitioner)
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        count = len(chunks)
        adds = count if plan.only_adds else None
        shared = whole(flatten(dealing.to_cpu(params))), step, adds
        result = dealing.call(_map, plan.partitioner, chunks, lambda _: shared, timeout)
        ordered = dealing.in_order(result) if adds is None else [combine(result.unpacked().items(), count)]
        meter.stop(result.seconds)
        return ordered

    return lambda: dealing.ByCalls(plan, timeout, map_chunks, meter)


@pure
def _map(numbers: list[int], chunks: list[Tensor], flat: Flat, step: int, adds: int | None) -> dealing.PartResult:
    params, work = unflatten(flat), dealing.current_work()
    return dealing.compute(numbers, (work.map(params, chunk, step) for chunk in chunks), adds).flat()
