"""Starts and stops torch's process group (c10d), on the key-value store that RPC uses too."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.info import GOODBYE_SECONDS, check_timeout, get_world_info, stay_on_loopback
from distributed.launch.meeting import admits_mixed, ended_after, meet, within
from distributed.launch.processes import FOLLOWS, LAUNCHER

with contextlib.suppress(ImportError, AttributeError):  # of a torch without RPC
    # Now, before there is a group, which default arguments of its functions would keep for ever.
    import torch.distributed.nn.functional

_POLL_SECONDS = 0.05
_DISMISSAL_SECONDS = 0.2  # between two looks for a dismissal

_store: dist.Store | None = None
# The thread that waits for a dismissal, and the event that ends it.
_obeying: tuple[threading.Thread, threading.Event] | None = None


def start_process_group(*, timeout: float, backend: str | None = None, device: torch.device | None = None) -> str:
    """Joins the default process group; returns its backend. Raises ConnectionError if a rank did not join in time, and
    RuntimeError if there is a group already.

    Args:
        timeout: seconds that an operation may take.
        backend: default `nccl` if every worker of this host has its own GPU and computes on it, else `gloo`.
        device: the device that this rank computes on; default a GPU.
    """
    global _store
    check_timeout(timeout)
    stay_on_loopback()
    info = get_world_info()
    patience = timedelta(seconds=timeout)
    store = _store = meet(patience)
    if backend is None:
        on_gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
        gpus = torch.cuda.device_count() if on_gpu else 0
        backend = "nccl" if dist.is_nccl_available() and gpus >= info.local_world_size else "gloo"
    rank, size = info.world_rank, info.world_size
    if backend == "nccl":
        torch.cuda.set_device(info.local_rank)
        # An operation that takes too long then raises in the thread that called it, which names the missing ranks;
        # else torch's watchdog ends the process by a signal.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        card = torch.cuda.get_device_properties(info.local_rank)
        check_own_cards(store, rank, size, str(card.uuid), card.name, patience)
    with ended_after(timeout + GOODBYE_SECONDS):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
        if backend == "nccl":
            try:
                dist.all_reduce(torch.zeros(1, device="cuda"))  # only now it opens its connections
            except dist.DistBackendError as error:
                raise ValueError(
                    f"strategy=ddp: NCCL cannot start: {str(error).splitlines()[0]}; type strategy=rpc, which needs no "
                    "NCCL, or set NCCL_DEBUG=WARN, and it says more"
                ) from error
    return backend


def check_own_cards(store: dist.Store, rank: int, size: int, card: str, model: str, patience: timedelta) -> None:
    """Raises ValueError on every rank where two ranks, of one host or of two containers, have the same GPU `card`: NCCL
    would wait for ever, or end in an error that does not say so. Also where they have GPUs of several models, and
    `launch.mixed` does not admit that: these round otherwise."""
    store.set(f"card/{rank}", f"{card} {model}")
    keys = [f"card/{other}" for other in range(size)]
    store.wait(keys, patience)
    ranks, models = dict[str, list[int]](), dict[str, int]()
    for other, key in enumerate(keys):
        its_card, _, its_model = store.get(key).decode().partition(" ")
        ranks.setdefault(its_card, []).append(other)
        models.setdefault(its_model, other)
    if len(models) > 1 and not admits_mixed():
        pairs = ", ".join(f"rank {other} an {name}" for name, other in models.items())
        raise ValueError(
            f"strategy=ddp: the ranks have GPUs of several models: {pairs}; choose equal ones by CUDA_VISIBLE_DEVICES, "
            "or type launch.mixed=true, which promises no bits"
        )
    for shared, those in ranks.items():
        if len(those) > 1:
            names = " and ".join(f"rank {number}" for number in those)
            raise ValueError(
                f"strategy=ddp: {names} have the same GPU, {shared}, and NCCL needs one for each rank; type "
                "strategy=rpc, fewer workers, or give each container a GPU of its own: docker run --gpus device=0"
            )


def missing_ranks(seconds: float) -> list[int]:
    """After an operation has failed: the ranks that do not report within `seconds` that they are alive. Every rank that
    notices the failure must call this, since the call reports that rank."""
    info = get_world_info()
    missing = [rank for rank in range(info.world_size) if rank != info.world_rank]
    if len(missing) == 1:  # of two ranks it can only be the other one
        return missing
    store = _store
    assert store is not None

    def report_and_look() -> list[int]:
        store.set(f"here/{info.world_rank}", "")
        return _await_keys(store, "here", missing, seconds)

    try:
        return within(2 * seconds, report_and_look)
    except (RuntimeError, TimeoutError):  # the store ended with rank zero, or waits for it
        return [0]


def _await_keys(store: dist.Store, name: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Waits for the keys `name`/rank; returns the ranks whose keys have not come within `seconds`."""
    deadline = time.monotonic() + seconds
    missing = list(ranks)
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not store.check([f"{name}/{rank}"])]
        time.sleep(_POLL_SECONDS)
    return missing


def end_when_dismissed() -> None:
    """On ranks other than zero: until `stop_process_group`, a dismissal by rank zero ends this process soon."""
    global _obeying
    store, rank, ended = _store, get_world_info().world_rank, threading.Event()
    assert store is not None

    def obey_dismissal() -> None:
        with contextlib.suppress(RuntimeError):  # the store ended with rank zero
            while not ended.wait(_DISMISSAL_SECONDS):
                if store.check(["dismissed"]):
                    store.set(f"gone/{rank}", "")
                    # os._exit drops buffered output. The main thread may be in an operation that nothing else ends.
                    sys.stdout.flush()
                    sys.stderr.flush()
                    # A fork may not end with 0: torch's agent would take it for one that has returned nothing yet.
                    os._exit(FOLLOWS if LAUNCHER in os.environ else 0)

    if rank > 0:
        thread = threading.Thread(target=obey_dismissal, daemon=True)
        _obeying = thread, ended
        thread.start()


@atexit.register  # Python must not end while a thread of its own is inside torch
def _end_obeying() -> None:
    global _obeying
    if _obeying is not None:
        (thread, ended), _obeying = _obeying, None
        ended.set()
        thread.join(GOODBYE_SECONDS)


def dismiss_others() -> None:
    """On rank zero, which has noted the run's end: ends the processes of all other ranks, wherever they are, if they
    have called `end_when_dismissed`."""
    assert _store is not None
    if LAUNCHER in os.environ:
        # Our agent answers the first end by SIGTERM to this process, which has nothing left to save, and waits 30 s.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _store.set("dismissed", "")
    _await_keys(_store, "gone", range(1, get_world_info().world_size), GOODBYE_SECONDS)


def stop_process_group() -> None:
    """Leaves the default process group, if there is one."""
    _end_obeying()
    if dist.is_initialized():
        dist.destroy_process_group()
