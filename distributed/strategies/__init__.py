"""How chunks of tasks travel, one way a file; `auto` picks by the number of workers."""

from distributed.partition import PartitionFunction
from distributed.strategies import local, rpc
from distributed.work import Connect


def auto(*, workers: int, partitioner: PartitionFunction, timeout: float) -> Connect:
    """`local` for one worker, else `rpc`."""
    chosen = local.local if workers == 1 else rpc.rpc
    return chosen(workers=workers, partitioner=partitioner, timeout=timeout)
