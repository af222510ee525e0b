"""Checks the world that it runs in: every operation against a known answer, with its latency and bandwidth.

Every rank calls `diagnose`; rank zero gets the report.
"""

import os
import platform
import socket
import statistics
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import autograd
from distributed.api import remote_sync_call
from distributed.calls import rpc
from distributed.calls.session import current, gather, start_rpc, stop_rpc
from distributed.info import get_world_info
from distributed.launch.isolation import exposure
from distributed.launch.process_group import start_process_group, stop_process_group

SMALL, LARGE = 1, 1 << 20  # numbers of float32 values in the messages that measure latency and bandwidth
REPEATS = 10


class Check(NamedTuple):
    """One operation: whether its answer was right (None: the backend does not have it), seconds for a small message,
    bytes per second for a large one, and a note."""

    name: str
    ok: bool | None
    latency: float | None = None
    bandwidth: float | None = None
    note: str = ""


class Report(NamedTuple):
    """The checks of all operations, a description of each worker, and who can connect to them."""

    checks: list[Check]
    workers: dict[str, dict[str, Any]]
    listening: str

    @property
    def ok(self) -> bool:
        return all(check.ok is not False for check in self.checks)


Operation = Callable[[int], bool]  # runs once with the given number of values; returns whether the answer was right


def diagnose(*, timeout: float = 30.0) -> Report | None:
    """Runs every check, with `timeout` seconds for an operation; returns the report on rank zero, None on others."""
    backend = start_process_group(timeout=timeout)
    try:
        device = torch.device("cuda" if backend == "nccl" else "cpu")
        local_checks = [measured(name, operation, backend) for name, operation in collectives(device).items()]
    finally:
        stop_process_group()
    start_rpc(timeout=timeout)
    failure: BaseException | None = None
    try:
        by_worker = list(gather(local_checks).values())
        if get_world_info().rank != 0:
            return None
        checks = [worst(of_all) for of_all in zip(*by_worker, strict=True)]
        checks += [measured(name, operation, "RPC") for name, operation in remote_operations().items()]
        checks.append(hidden_parameters())
        names = current().workers
        descriptions = remote_sync_call(describe, partitioner=lambda: [(name, None, None) for name in names])
        return Report(checks, dict(zip(names, descriptions, strict=True)), exposure())
    except BaseException as error:
        failure = error
        raise
    finally:
        stop_rpc(failure)


def measured(name: str, operation: Operation, backend: str) -> Check:
    """Checks an operation and measures it, with a small and a large message."""
    try:
        right = operation(SMALL) and operation(LARGE)
        seconds = [timeit.repeat(partial(operation, size), number=1, repeat=REPEATS) for size in (SMALL, LARGE)]
        latency, transfer = map(statistics.median_high, seconds)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        if isinstance(error, NotImplementedError) or "not support" in first or "not implemented" in first:
            return Check(name, None, note=f"{backend} does not have it")
        return Check(name, False, note=f"{type(error).__name__}: {first}")
    return Check(name, right, latency, 4 * LARGE / transfer, "" if right else "wrong answer")


def worst(of_all: Sequence[Check]) -> Check:
    """One check for all workers: wrong if it is wrong on any worker, and as slow as on the slowest."""
    wrong = [check for check in of_all if check.ok is False]
    return max(wrong[:1] or of_all, key=lambda check: check.latency or 0.0)


def collectives(device: torch.device) -> dict[str, Operation]:
    """The operations of the default process group by name, each run by every rank. Rank r contributes r + 1. A world of
    one has no other rank to send to."""
    info = get_world_info()
    rank, size = info.world_rank, info.world_size
    total = size * (size + 1) / 2

    def contribution(count: int, of_rank: int = rank) -> Tensor:
        return torch.full((count,), of_rank + 1.0, device=device)

    def slots(count: int) -> list[Tensor]:
        return [torch.empty(count, device=device) for _ in range(size)]

    def holds(tensor: Tensor, value: float) -> bool:
        return bool((tensor == value).all())

    def each_of_its_rank(tensors: Sequence[Tensor]) -> bool:
        return all(holds(tensor, of_rank + 1) for of_rank, tensor in enumerate(tensors))

    def send_recv(count: int) -> bool:
        """Around the ring, rank zero first."""
        x = torch.empty(count, device=device)
        if rank == 0:
            dist.send(contribution(count), 1)
            dist.recv(x, size - 1)
        else:
            dist.recv(x, rank - 1)
            dist.send(contribution(count), (rank + 1) % size)
        return holds(x, (rank - 1) % size + 1)

    def broadcast(count: int) -> bool:
        x = contribution(count)
        dist.broadcast(x, src=0)
        return holds(x, 1)

    def scatter(count: int) -> bool:
        x = torch.empty(count, device=device)
        dist.scatter(x, [contribution(count, r) for r in range(size)] if rank == 0 else None, src=0)
        return holds(x, rank + 1)

    def gather(count: int) -> bool:
        parts = slots(count) if rank == 0 else None
        dist.gather(contribution(count), parts, dst=0)
        return parts is None or each_of_its_rank(parts)

    def reduce(count: int) -> bool:
        x = contribution(count)
        dist.reduce(x, dst=0)
        return rank != 0 or holds(x, total)

    def all_reduce(count: int) -> bool:
        x = contribution(count)
        dist.all_reduce(x)
        return holds(x, total)

    def all_gather(count: int) -> bool:
        parts = slots(count)
        dist.all_gather(parts, contribution(count))
        return each_of_its_rank(parts)

    def reduce_scatter(count: int) -> bool:
        x = torch.empty(count, device=device)
        dist.reduce_scatter(x, [contribution(count) for _ in range(size)])
        return holds(x, total)

    def all_to_all(count: int) -> bool:
        parts = slots(count)
        dist.all_to_all(parts, [contribution(count) for _ in range(size)])
        return each_of_its_rank(parts)

    everywhere = (broadcast, scatter, gather, reduce, all_reduce, all_gather, reduce_scatter, all_to_all)
    first: dict[str, Operation] = {"send/recv": send_recv} if size > 1 else {}
    return first | {operation.__name__: operation for operation in everywhere}


def remote_operations() -> dict[str, Operation]:
    """Operations by remote calls, from rank zero to the last worker (in a world of one: to itself)."""
    last = current().workers[-1]

    def round_trip(count: int) -> bool:
        return bool((rpc.rpc_sync(last, _same, (torch.ones(count),)) == 1).all())

    def remote_call(count: int) -> bool:
        (result,) = remote_sync_call(_same, args=(torch.ones(count),), partitioner=last)
        return bool((result == 1).all())

    def rref_fetch(count: int) -> bool:
        reference = rpc.remote(last, _ones, (count,))
        return bool((reference.to_here() == 1).all())

    def backward(count: int) -> bool:
        """The gradient of Σ w² is 2 w."""
        weight = nn.Parameter(torch.arange(count, dtype=torch.float32))
        with autograd.context() as ctx:
            (loss,) = remote_sync_call(_sum_of_squares, args=(weight,), partitioner=last)
            (gradient,) = autograd.grad(ctx, loss, weight)
        return gradient is not None and torch.equal(gradient, 2 * weight.detach())

    return {
        "RPC round trip": round_trip, "remote call": remote_call, "RRef fetch": rref_fetch,
        "distributed backward": backward,
    }  # fmt: skip


def hidden_parameters() -> Check:
    """Shows a limit of torch that no layer above it can remove: parameters inside an `rpc.RRef` lose their graph."""
    name = "parameters in rpc.RRef"
    workers = current().workers
    if len(workers) == 1:
        return Check(name, None, note="needs two workers")
    net = nn.Linear(2, 1)
    with autograd.context() as ctx:
        losses = remote_sync_call(_loss_of_reference, args=(rpc.RRef(net),), partitioner=workers[-1])
        lost = not losses[0].requires_grad or autograd.grad(ctx, losses, net.weight, allow_unused=True) == (None,)
    advice = "send the module itself, or rpc.RRef(module_clone(net, by='clone'))"
    return Check(name, True, note=f"torch detaches them: {advice}" if lost else "keep their graph in this torch")


def _ones(count: int) -> Tensor:
    return torch.ones(count)


def _same(x: Tensor) -> Tensor:
    return x


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum()


def _loss_of_reference(reference: Any) -> Tensor:
    loss: Tensor = reference.to_here()(torch.ones(1, 2)).sum()
    return loss


def describe() -> dict[str, Any]:
    """This worker: its host, process, versions, threads, cores and GPUs."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else [],  # an old driver has cards that nothing can use
    }
