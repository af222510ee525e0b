"""RPC map-reduce: rank zero deals chunks out to all workers, itself included, and each computes its chunks alone."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.calls.worker import pure
from distributed.reduce import combine
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.work import Connect, Flat, WorkPlan, unflatten


def rpc(*, plan: WorkPlan, timeout: float) -> Connect:
    """Rank zero drives and also computes. The other workers serve until rank zero closes the session.

    The parameters go to each worker once per step. If the reducer only adds, a worker adds its chunks' results as far
    as the order of `distributed.reduce` allows. Then fewer results come back, one for an aligned run of chunks.

    A worker may take `timeout` seconds for its part. Raises ValueError if the partitioner would split chunks, or the
    time limit is not above 0.
    """

    def map_chunks(params: Flat, chunks: Sequence[Tensor], step: int) -> tuple[list[Any], Counter[int], Counter[int]]:
        count = len(chunks)
        adds = count if plan.only_adds else None
        results, seconds = dealing.call(_map, plan.partitioner, chunks, lambda _: (params, step, adds))
        ordered = list(results.values()) if adds is None else [combine(results.items(), count)]
        return ordered, seconds, Counter()

    return dealing.by_calls(plan, timeout, map_chunks)


@pure
def _map(numbers: list[int], chunks: list[Tensor], flat: Flat, step: int, adds: int | None) -> dealing.PartAnswer:
    params, work = unflatten(flat), dealing.current_work()
    return dealing.compute(numbers, (work.map(params, chunk, step) for chunk in chunks), adds)
