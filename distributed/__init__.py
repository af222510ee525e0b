"""Moves work between processes: RPC map-reduce with the names of `torchopt.distributed`.

In a program written for `torchopt.distributed`, change one import to `import distributed as todist`. If the program
cannot be edited, type `python -m distributed.as_torchopt program.py`.
"""

from contextlib import suppress

import torch.distributed as dist

# Where torch has no RPC, these names are missing; `strategies.local` and `strategies.ddp` need none of them.
with suppress(ImportError):
    from distributed import api, autograd, world
    from distributed.api import parallelize, parallelize_async, parallelize_sync, remote_async_call, remote_sync_call
    from distributed.calls import rpc
    from distributed.calls.worker import pure
    from distributed.objects import RemoteObject, module_clone, remote_object
    from distributed.partition import (
        Partitioner,
        PartitionFunction,
        TensorDimensionPartitioner,
        batch_partitioner,
        dim_partitioner,
        exclusive_batch_partitioner,
        whole,
    )
    from distributed.reduce import mean_reducer, stack_reducer, sum_reducer, weighted_mean_reducer
    from distributed.world import (
        WorldInfo,
        auto_init_rpc,
        barrier,
        get_local_rank,
        get_local_world_size,
        get_rank,
        get_worker_id,
        get_world_info,
        get_world_rank,
        get_world_size,
        is_available,
        not_on_rank,
        on_rank,
        rank_all,
        rank_non_zero_only,
        rank_zero_only,
    )

__all__ = [
    "PartitionFunction", "Partitioner", "RemoteObject", "TensorDimensionPartitioner", "WorldInfo", "api",
    "auto_init_rpc", "autograd", "barrier", "batch_partitioner", "dim_partitioner", "dist",
    "exclusive_batch_partitioner", "get_local_rank", "get_local_world_size", "get_rank", "get_worker_id",
    "get_world_info", "get_world_rank", "get_world_size", "is_available", "mean_reducer", "module_clone",
    "not_on_rank", "on_rank", "parallelize", "parallelize_async", "parallelize_sync", "pure", "rank_all",
    "rank_non_zero_only", "rank_zero_only", "remote_async_call", "remote_object", "remote_sync_call", "rpc",
    "stack_reducer", "sum_reducer", "weighted_mean_reducer", "whole", "world",
]  # fmt: skip
