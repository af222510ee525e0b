"""Moves work between processes: RPC map-reduce with the names of `torchopt.distributed`.

In a program written for `torchopt.distributed`, change one import to `import distributed as todist`. If the program
cannot be edited, type `python -m distributed.as_torchopt program.py`.

Names are imported when they are first used: what needs no RPC, such as `strategies.local` and `strategies.ddp`, works
where torch was built without it.
"""

import importlib
from typing import Any

_HOMES = {
    "api": """as_completed parallelize parallelize_async parallelize_sync remote_async_call remote_sync_call""",
    "functions": "async_execution pure",
    "objects": "RemoteObject module_clone remote_object",
    "partition": """DynamicPartitioner PartitionFunction Partitioner TensorDimensionPartitioner batch_partitioner
        dim_partitioner dynamic_partitioner exclusive_batch_partitioner whole""",
    "reduce": "add_in_order mean_reducer stack_reducer sum_reducer weighted_mean_reducer",
    "world": """WorldInfo auto_init_rpc barrier get_local_rank get_local_world_size get_rank get_worker_id
        get_world_info get_world_rank get_world_size is_available not_on_rank on_rank rank_all rank_non_zero_only
        rank_zero_only""",
}
"""The public names, by the module that has them."""

_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, "api", "autograd", "dist", "rpc", "world"])


def __getattr__(name: str) -> Any:
    if name in ("dist", "rpc"):  # torch's own, as in the original
        value = importlib.import_module("torch.distributed" if name == "dist" else "torch.distributed.rpc")
    elif name in ("api", "autograd", "world"):
        value = importlib.import_module(f"distributed.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(f"distributed.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'distributed' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
