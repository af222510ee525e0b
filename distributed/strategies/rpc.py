"""RPC map-reduce: rank zero deals chunks out to all workers, itself included, and each computes its chunks alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.calls.traffic import Traffic
from distributed.cluster.info import check_timeout
from distributed.functions import pure
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.relay import PartResult, check_fan_out
from distributed.strategies.common.work import Connect, Flat, Tensors, WorkPlan, flatten, unflatten
from distributed.tree_sum import combine


def rpc(
    *,
    plan: WorkPlan,
    timeout: float,
    device_maps: str = "auto",
    fan_out: int | str = "auto",
    max_lost: int | str = "auto",
) -> Connect:
    """Rank zero drives and also computes. The other workers serve until rank zero closes the session. If one of them is
    lost, the others compute its chunks, in the same step and from then on. New processes come in between two steps.
    The result has the same bits.

    The parameters go to each worker once per step. If the reducer only adds, a worker adds its chunks' results as far
    as the order of `distributed.tree_sum` allows. Then fewer results come back, one for an aligned run of chunks.

    Args:
        plan: the work, the number of workers, the partitioner of the chunk numbers, and the reducer.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU if every worker has its own; `none`: through the CPU.
        fan_out: the base of the tree along which parameters and results travel, see `relay`; `auto`: by the number of
            workers; with as many as there are workers rank zero sends to all others itself.
        max_lost: how many workers may be lost, or not answer in time, before the run ends; the others compute their
            chunks. `auto`: all but rank zero.

    Raises:
        ValueError: the partitioner would split chunks, the time limit is not above 0, or the tree
            would be too high.
    """
    check_timeout(timeout)
    dealing.check_partitioner(plan.partitioner)
    dealing.check_device_maps(device_maps)
    if max_lost != "auto" and (isinstance(max_lost, bool) or not isinstance(max_lost, int) or max_lost < 0):
        raise ValueError(f"max_lost={max_lost!r}: must be auto or a whole number from 0; type strategy.max_lost=auto")
    check_fan_out(fan_out, plan.workers)
    how = dealing.How(plan.partitioner, timeout, fan_out, max_lost)
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        count = len(chunks)
        adds = count if plan.only_adds else None
        shared = (flatten(dealing.for_transport(params)), step, adds)
        result = dealing.call_along_tree(_map, shared, adds, chunks, how)
        ordered = dealing.in_order(result) if adds is None else [combine(result.unpacked().items(), count)]
        meter.stop(result.seconds, Traffic(0, result.sent))
        return ordered

    return lambda: dealing.ByCalls(plan, how, device_maps, map_chunks, meter)


@pure
def _map(numbers: list[int], chunks: list[Tensor], flat: Flat, step: int, adds: int | None) -> PartResult:
    params, work = unflatten(flat), dealing.current_work()
    return dealing.compute(numbers, (work.map(params, chunk, step) for chunk in chunks), adds).flat()
