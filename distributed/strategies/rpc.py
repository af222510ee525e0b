"""RPC map-reduce: rank zero deals chunks out to all workers, itself included; each computes its chunks whole."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.engine.info import check_timeout
from distributed.partition import whole
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.work import Connect, Plan, Tensors


def rpc(*, plan: Plan, timeout: float, device_maps: str = "auto") -> Connect:
    """Rank zero drives and computes too; the others serve until it closes the session.

    The parameters go to each worker once a step.

    Args:
        plan: what is computed, by how many workers, and how the numbers of the chunks are dealt out.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU where every worker has one of its own; `none`: by the CPU.

    Raises:
        ValueError: a partitioner that would cut chunks in pieces, or a time limit that is not above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(plan.partitioner)
    dealing.check_device_maps(device_maps)
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        shared = (whole(dealing.carried(params)), step)
        results, seconds = dealing.call(_map, plan.partitioner, chunks, lambda numbers: shared, timeout)
        meter.stop(seconds)
        return results

    return lambda: dealing.connect(plan, timeout, device_maps, map_chunks, meter)


def _map(numbers: list[int], chunks: list[Tensor], params: Tensors, step: int) -> dealing.Done:
    return dealing.compute(numbers, (dealing.work_here().map(params, chunk, step) for chunk in chunks))
