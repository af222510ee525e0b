"""RPC map-reduce: rank zero deals chunks out to all workers, itself included; each computes its chunks whole."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed import chunks as dealing
from distributed.info import check_timeout
from distributed.partition import PartitionFunction, whole
from distributed.work import Connect, Tensors, Work


def rpc(
    *, work: Work, workers: int, partitioner: PartitionFunction, timeout: float, device_maps: str = "auto"
) -> Connect:
    """Rank zero drives and computes too; the others serve until it closes the session.

    The parameters go to each worker once a step.

    Args:
        work: what is computed of a chunk.
        workers: processes in the world.
        partitioner: how the numbers of the chunks are dealt out.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU where every worker has one of its own; `none`: by the CPU.

    Raises:
        ValueError: a partitioner that would cut chunks in pieces, or a time limit that is not above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(partitioner)
    dealing.check_device_maps(device_maps)
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        shared = (whole(dealing.carried(params)), step)
        results = dealing.call(_map, partitioner, chunks, lambda numbers: shared, timeout)
        meter.stop()
        return results

    return lambda: dealing.connect(work, partitioner, timeout, device_maps, map_chunks, meter)


def _map(numbers: list[int], chunks: list[Tensor], params: Tensors, step: int) -> list[tuple[int, Any]]:
    """On a worker: the results of its chunks, each with its number."""
    work = dealing.work_here()
    return [(number, work.map(params, chunk, step)) for number, chunk in zip(numbers, chunks, strict=True)]
