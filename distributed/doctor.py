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
REMOTE_OPERATIONS = ("RPC round trip", "remote call", "RRef fetch", "distributed backward")


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


def diagnose(*, timeout: float = 30.0) -> Report | None:
    """Runs every check, with `timeout` seconds for an operation; returns the report on rank zero, None on others."""
    report = None
    backend = start_process_group(timeout=timeout)
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    try:
        names = collectives(device, SMALL)
        local_checks = [measured(name, partial(run_collective, name, device), backend) for name in names]
    finally:
        stop_process_group()
    start_rpc(timeout=timeout)
    try:
        by_worker = gather(local_checks).values()
        if get_world_info().rank == 0:
            checks = [worst(of_all) for of_all in zip(*by_worker, strict=True)]
            checks += [measured(name, partial(remote_operation, name), "RPC") for name in REMOTE_OPERATIONS]
            workers = current().workers
            descriptions = remote_sync_call(describe, partitioner=lambda: [(name, None, None) for name in workers])
            described = dict(zip(workers, descriptions, strict=True))
            report = Report([*checks, hidden_parameters()], described, exposure())
    except BaseException as error:
        stop_rpc(error)
        raise
    stop_rpc()
    return report


def measured(name: str, operation: Callable[[int], bool], backend: str) -> Check:
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


def collectives(device: torch.device, count: int) -> dict[str, tuple[Callable[[], Any], list[Tensor], list[float]]]:
    """The operations of the default process group by name, for `count` values: a call that every rank makes, the
    tensors that it changes on this rank, and their right values. Rank r contributes r + 1."""
    rank, size, *_ = get_world_info()
    leads, every = rank == 0, [r + 1.0 for r in range(size)]
    total = sum(every)
    x = torch.full((count,), every[rank], device=device)
    parts = [torch.empty_like(x) for _ in every]
    part = parts[0]

    def scatter() -> None:
        dist.scatter(part, [torch.full_like(x, value) for value in every] if leads else None, src=0)

    def send_around() -> None:
        if leads:
            dist.send(x, 1)
        dist.recv(part, (rank - 1) % size)
        if not leads:
            dist.send(x, (rank + 1) % size)

    operations: dict[str, tuple[Callable[[], Any], list[Tensor], list[float]]] = {
        "send/recv": (send_around, [part], [every[rank - 1]]),
        "broadcast": (lambda: dist.broadcast(x, src=0), [x], [1.0]),
        "scatter": (scatter, [part], [every[rank]]),
        "gather": (lambda: dist.gather(x, parts if leads else None, dst=0), parts if leads else [], every),
        "reduce": (lambda: dist.reduce(x, dst=0), [x] if leads else [], [total]),
        "all_reduce": (lambda: dist.all_reduce(x), [x], [total]),
        "all_gather": (lambda: dist.all_gather(parts, x), parts, every),
        "reduce_scatter": (lambda: dist.reduce_scatter(part, [x] * size), [part], [total]),
        "all_to_all": (lambda: dist.all_to_all(parts, [x] * size), parts, every),
    }
    if size == 1:
        del operations["send/recv"]  # to another rank
    return operations


def run_collective(name: str, device: torch.device, count: int) -> bool:
    call, results, values = collectives(device, count)[name]
    call()
    return all(bool((result == value).all()) for result, value in zip(results, values, strict=False))


def remote_operation(name: str, count: int) -> bool:
    """Calls the last worker (in a world of one: this one) with `count` values; returns whether the answer was right."""
    last, x = current().workers[-1], torch.ones(count)
    match name:
        case "RPC round trip":
            return torch.equal(rpc.rpc_sync(last, _same, (x,)), x)
        case "remote call":
            (result,) = remote_sync_call(_same, args=(x,), partitioner=last)
            return torch.equal(result, x)
        case "RRef fetch":
            return torch.equal(rpc.remote(last, _ones, (count,)).to_here(), x)
        case _:  # a distributed backward pass: the gradient of Σ w² is 2 w
            weight = nn.Parameter(torch.arange(count, dtype=torch.float32))
            with autograd.context() as ctx:
                (loss,) = remote_sync_call(_sum_of_squares, args=(weight,), partitioner=last)
                (gradient,) = autograd.grad(ctx, loss, weight)
            return gradient is not None and torch.equal(gradient, 2 * weight.detach())


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
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0  # an old driver has cards of no use
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "python": platform.python_version(),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(usable)],
    }  # fmt: skip
