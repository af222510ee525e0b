"""Starts and stops torch's process group (c10d), on the key-value store that RPC uses too."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.engine.info import check_timeout, get_world_info
from distributed.engine.session import stay_on_loopback
from distributed.engine.store import meet

_POLL_SECONDS = 0.05

_store: dist.Store | None = None


def default_backend(device: torch.device | None = None) -> str:
    """`nccl` if every worker of this host has its own GPU and computes on it, else `gloo`."""
    on_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    gpus = torch.cuda.device_count() if on_gpu else 0
    return "nccl" if dist.is_nccl_available() and gpus >= get_world_info().local_world_size else "gloo"


def start_process_group(*, timeout: float, backend: str | None = None, device: torch.device | None = None) -> str:
    """Joins the default process group; returns its backend.

    Args:
        timeout: seconds that an operation may take.
        backend: default `default_backend(device)`.
        device: the device that this rank computes on.

    Raises:
        ConnectionError: a rank did not join within the time limit.
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
    """After an operation has failed: the ranks that do not report within `seconds` that they are alive.

    Every rank that notices the failure must call this, since the call reports that rank.
    """
    info = get_world_info()
    missing = [rank for rank in range(info.world_size) if rank != info.world_rank]
    if len(missing) == 1:
        return missing
    deadline = time.monotonic() + seconds
    try:
        assert _store is not None
        _store.set(f"here/{info.world_rank}", "")
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not _store.check([f"here/{rank}"])]
            time.sleep(_POLL_SECONDS)
        return missing
    except RuntimeError:  # the store ended with rank zero
        return [0]


def stop_process_group() -> None:
    """Leaves the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
