"""How chunks of tasks travel, one way a file; `auto` picks by the number of workers."""

from distributed.partition import PartitionFunction
from distributed.strategies import local, rpc
from distributed.work import Connect, Work


def auto(
    *, work: Work, workers: int, partitioner: PartitionFunction, timeout: float, device_maps: str = "auto"
) -> Connect:
    """`local` for one worker, else `rpc`."""
    chosen = local.local if workers == 1 else rpc.rpc
    return chosen(work=work, workers=workers, partitioner=partitioner, timeout=timeout, device_maps=device_maps)
