"""RPC map-reduce under a distributed autograd context: workers compute losses, and rank zero starts one backward
pass through all of them."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from distributed import autograd
from distributed.engine.info import check_timeout, get_world_rank
from distributed.engine.traffic import Traffic
from distributed.remote import remote_sync_call
from distributed.strategies.common import chunks as dealing
from distributed.strategies.common.work import Connect, Plan, Tensors


def rpc_autograd(*, plan: Plan, timeout: float, device_maps: str = "auto") -> Connect:
    """As `rpc`, but only losses come back from the forward pass, and gradients from the backward pass.

    Each chunk gets leaf copies of the parameters of its own, so that its gradient can be as_metrics from the
    others' and they can be added in chunk order. So parameters and gradients travel once a chunk, and
    every worker holds the graphs of all its chunks until the backward pass.

    Args:
        plan: what is computed, by how many workers, and how the numbers of the chunks are dealt out.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU where every worker has one of its own; `none`: by the CPU.

    Raises:
        ValueError: an algorithm whose loss has no graph, a partitioner that would cut chunks in pieces, or a
            time limit that is not above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(plan.partitioner)
    dealing.check_device_maps(device_maps)
    if plan.work.loss is None:
        raise ValueError("strategy=rpc_autograd: this algorithm has no loss that a graph leads to; type strategy=rpc")
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        plain = dealing.carried(params)
        copies = [{name: p.clone().requires_grad_() for name, p in plain.items()} for _ in chunks]
        with autograd.context() as ctx:
            results, seconds = dealing.call(
                _losses, plan.partitioner, chunks, lambda numbers: ([copies[i] for i in numbers], step), timeout
            )
            ranks = [rank for _, _, rank in results]
            grads = _gradients(ctx, [loss for loss, _, _ in results], copies, ranks)
        meter.stop(seconds + _backward_seconds(step, set(ranks), timeout), _backward_traffic(plain, ranks))
        return [plan.work.result(own, rest) for own, (_, rest, _) in zip(grads, results, strict=True)]

    return lambda: dealing.connect(plan, timeout, device_maps, map_chunks, meter)


def _gradients(ctx: int, losses: Sequence[Tensor], copies: Sequence[Tensors], ranks: Sequence[int]) -> list[Tensors]:
    """Of each loss by its own copy of the parameters.

    Those of this process's own losses are computed beside the distributed backward pass: within it torch would
    come to them first, and let the other workers wait.
    """
    here, elsewhere = (
        [i for i, rank in enumerate(ranks) if (rank == get_world_rank()) == own] for own in (True, False)
    )

    def distributed() -> Sequence[Tensor | None]:
        return autograd.grad(ctx, [losses[i] for i in elsewhere], _leaves(copies, elsewhere), allow_unused=True)

    with ThreadPoolExecutor(1) as beside:
        others = beside.submit(distributed) if elsewhere else None
        own: Sequence[Tensor | None] = ()
        if here:
            own = torch.autograd.grad([losses[i] for i in here], _leaves(copies, here), allow_unused=True)
        found = iter([*own, *(others.result() if others is not None else ())])
    by_chunk = {i: {name: _or_zeros(next(found), p) for name, p in copies[i].items()} for i in [*here, *elsewhere]}
    return [by_chunk[i] for i in range(len(losses))]


def _leaves(copies: Sequence[Tensors], chosen: Sequence[int]) -> list[Tensor]:
    return [leaf for i in chosen for leaf in copies[i].values()]


def _losses(numbers: list[int], chunks: list[Tensor], copies: list[Tensors], step: int) -> dealing.Done:
    """On a worker: the loss of each of its chunks, what comes with it, and this worker's rank."""
    loss_of = dealing.work_here().loss
    assert loss_of is not None

    def losses() -> Iterator[tuple[Tensor, Any, int]]:
        for chunk, copy in zip(chunks, copies, strict=True):
            loss, rest = loss_of(copy, chunk, step)
            _watch(step, loss, copy)
            yield loss, rest, get_world_rank()

    return dealing.compute(numbers, losses())


# How long the backward pass takes: it is torch that runs it on a worker, so hooks look on.

_window: tuple[int, float, float] = (0, 0.0, 0.0)
"""A step, and when its first and its latest gradient were computed here."""


def _watch(step: int, loss: Tensor, params: Tensors) -> None:
    def note(gradient: Tensor) -> None:
        global _window
        now = time.perf_counter()
        (known, began, _) = _window
        _window = (step, began if known == step else now, now)

    for tensor in (loss, *params.values()):
        tensor.register_hook(note)


def _seconds_of(step: int) -> tuple[int, float]:
    (known, began, ended) = _window
    return get_world_rank(), ended - began if known == step else 0.0


def _backward_seconds(step: int, ranks: set[int], timeout: float) -> Counter[int]:
    parts = [(rank, (step,), None) for rank in sorted(ranks)]
    return Counter(dict(remote_sync_call(_seconds_of, partitioner=lambda: parts, timeout=timeout)))


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return leaf.new_zeros(leaf.shape) if gradient is None else gradient


def _backward_traffic(params: Tensors, ranks: Sequence[int]) -> Traffic:
    """Reckoned, since torch does not tell: a gradient of each loss out, and one of every parameter back, for every
    chunk that is not rank zero's own."""
    size = sum(p.nbytes for p in params.values())
    chunks = Counter(rank for rank in ranks if rank != get_world_rank())
    of_losses = next(iter(params.values())).element_size() * chunks.total()
    return Traffic(of_losses, Counter({rank: size * count for rank, count in chunks.items()}))
