"""The names of `torchopt.distributed.api`: remote calls, partitioners and reducers."""

from distributed.parallel import parallelize, parallelize_async, parallelize_sync
from distributed.partition import (
    Partitioner,
    PartitionFunction,
    TensorDimensionPartitioner,
    batch_partitioner,
    dim_partitioner,
    exclusive_batch_partitioner,
)
from distributed.reduce import mean_reducer, sum_reducer
from distributed.remote import UNSET_RPC_TIMEOUT, remote_async_call, remote_sync_call

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "PartitionFunction",
    "Partitioner",
    "TensorDimensionPartitioner",
    "batch_partitioner",
    "dim_partitioner",
    "exclusive_batch_partitioner",
    "mean_reducer",
    "parallelize",
    "parallelize_async",
    "parallelize_sync",
    "remote_async_call",
    "remote_sync_call",
    "sum_reducer",
]
