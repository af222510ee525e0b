"""RPC map-reduce: rank zero deals chunks out to all workers, itself included, and each computes its chunks alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.engine.info import check_timeout
from distributed.partition import whole
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.work import Connect, Plan, Tensors


def rpc(*, plan: Plan, timeout: float, device_maps: str = "auto") -> Connect:
    """Rank zero drives and also computes. The other workers serve until rank zero closes the session.

    The parameters go to each worker once per step.

    Args:
        plan: the work, the number of workers, and the partitioner of the chunk numbers.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU if every worker has its own; `none`: through the CPU.

    Raises:
        ValueError: the partitioner would split chunks, or the time limit is not above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(plan.partitioner)
    dealing.check_device_maps(device_maps)
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        shared = (whole(dealing.for_transport(params)), step)
        results, seconds = dealing.call(_map, plan.partitioner, chunks, lambda numbers: shared, timeout)
        meter.stop(seconds)
        return results

    return lambda: dealing.connect(plan, timeout, device_maps, map_chunks, meter)


def _map(numbers: list[int], chunks: list[Tensor], params: Tensors, step: int) -> dealing.PartResult:
    return dealing.compute(numbers, (dealing.current_work().map(params, chunk, step) for chunk in chunks))
