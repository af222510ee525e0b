"""torch's process groups (c10d), on the same store as everything else."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.engine.info import check_timeout, get_world_info
from distributed.engine.session import stay_on_loopback
from distributed.engine.store import meet

_LOOK_SECONDS = 0.05

_store: dist.Store | None = None


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
    global _store
    check_timeout(timeout)
    stay_on_loopback()
    info = get_world_info()
    patience = timedelta(seconds=timeout)
    store = meet(info.world_rank, info.world_size, patience)
    _store = store
    chosen = backend or default_backend(device)
    if chosen == "nccl":
        torch.cuda.set_device(info.local_rank)
    dist.init_process_group(chosen, store=store, rank=info.world_rank, world_size=info.world_size, timeout=patience)
    return chosen


def missing_ranks(seconds: float) -> list[int]:
    """After an operation has failed: who does not say within so many seconds that it is still there. Whoever else
    has noticed the failure must ask this too."""
    info = get_world_info()
    others = [rank for rank in range(info.world_size) if rank != info.world_rank]
    if len(others) == 1:
        return others
    deadline = time.monotonic() + seconds
    try:
        assert _store is not None
        _store.set(f"here/{info.world_rank}", "")
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if not _store.check([f"here/{rank}"])]
            time.sleep(_LOOK_SECONDS)
        return others
    except RuntimeError:  # the store has gone with rank zero
        return [0]


def stop_process_group() -> None:
    """Leaves the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
