"""torch's process groups (c10d), on the same store as everything else."""

from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.info import check_timeout, get_world_info
from distributed.session import stay_on_loopback
from distributed.store import meet


def default_backend(device: torch.device | None = None) -> str:
    """`nccl` where every worker of this host has a GPU of its own and computes on it, else `gloo`."""
    on_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    gpus = torch.cuda.device_count() if on_gpu else 0
    return "nccl" if dist.is_nccl_available() and gpus >= get_world_info().local_world_size else "gloo"


def start_process_group(*, timeout: float, backend: str | None = None, device: torch.device | None = None) -> str:
    """Joins the default process group; returns its backend.

    Args:
        timeout: seconds that an operation may take.
        backend: default `default_backend(device)`.
        device: what this rank computes on.

    Raises:
        ConnectionError: someone did not come within the time limit.
        RuntimeError: there is a group already.
    """
    check_timeout(timeout)
    stay_on_loopback()
    info = get_world_info()
    patience = timedelta(seconds=timeout)
    store = meet(info.world_rank, info.world_size, patience)
    chosen = backend or default_backend(device)
    if chosen == "nccl":
        torch.cuda.set_device(info.local_rank)
    dist.init_process_group(chosen, store=store, rank=info.world_rank, world_size=info.world_size, timeout=patience)
    return chosen


def stop_process_group() -> None:
    """Leaves the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
