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
    """As `rpc`, but the forward pass returns only losses, and the backward pass returns the gradients.

    Each chunk has its own leaf copies of the parameters. So each chunk's gradient is separate, and the gradients can
    be added in chunk order. Parameters and gradients travel once per chunk, and every worker keeps the graphs of all
    its chunks until the backward pass.

    Args:
        plan: the work, the number of workers, and the partitioner of the chunk numbers.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU if every worker has its own; `none`: through the CPU.

    Raises:
        ValueError: the algorithm's loss has no graph, the partitioner would split chunks, or the time limit is not
            above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(plan.partitioner)
    dealing.check_device_maps(device_maps)
    if plan.work.loss is None:
        raise ValueError("strategy=rpc_autograd: this algorithm has no loss that a graph leads to; type strategy=rpc")
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        plain = dealing.for_transport(params)
        copies = [{name: p.clone().requires_grad_() for name, p in plain.items()} for _ in chunks]
        with autograd.context() as ctx:
            results, seconds = dealing.call(
                _losses, plan.partitioner, chunks, lambda numbers: ([copies[i] for i in numbers], step), timeout
            )
            ranks = [rank for _, _, rank in results]
            grads = _gradients(ctx, [loss for loss, _, _ in results], copies, ranks)
        meter.stop(seconds + _backward_seconds(step, set(ranks), timeout), _backward_traffic(plain, ranks))
        return [plan.work.result(gradient, rest) for gradient, (_, rest, _) in zip(grads, results, strict=True)]

    return lambda: dealing.connect(plan, timeout, device_maps, map_chunks, meter)


def _gradients(ctx: int, losses: Sequence[Tensor], copies: Sequence[Tensors], ranks: Sequence[int]) -> list[Tensors]:
    """The gradient of each loss by its own copy of the parameters.

    This process computes the gradients of its own losses in parallel to the distributed backward pass. Inside that
    pass torch would compute them first, and the other workers would wait.
    """
    here, elsewhere = (
        [i for i, rank in enumerate(ranks) if (rank == get_world_rank()) == own] for own in (True, False)
    )

    def distributed() -> Sequence[Tensor | None]:
        return autograd.grad(ctx, [losses[i] for i in elsewhere], _leaves(copies, elsewhere), allow_unused=True)

    with ThreadPoolExecutor(1) as beside:
        others = beside.submit(distributed) if elsewhere else None
        own_gradients: Sequence[Tensor | None] = ()
        if here:
            own_gradients = torch.autograd.grad([losses[i] for i in here], _leaves(copies, here), allow_unused=True)
        gradients = iter([*own_gradients, *(others.result() if others is not None else ())])
    by_chunk = {i: {name: _or_zeros(next(gradients), p) for name, p in copies[i].items()} for i in [*here, *elsewhere]}
    return [by_chunk[i] for i in range(len(losses))]


def _leaves(copies: Sequence[Tensors], chosen: Sequence[int]) -> list[Tensor]:
    return [leaf for i in chosen for leaf in copies[i].values()]


def _losses(numbers: list[int], chunks: list[Tensor], copies: list[Tensors], step: int) -> dealing.PartResult:
    """Runs on a worker: the loss of each of its chunks, the values beside the loss, and this worker's rank."""
    loss_of = dealing.current_work().loss
    assert loss_of is not None

    def losses() -> Iterator[tuple[Tensor, Any, int]]:
        for chunk, copy in zip(chunks, copies, strict=True):
            loss, rest = loss_of(copy, chunk, step)
            _watch(step, loss, copy)
            yield loss, rest, get_world_rank()

    return dealing.compute(numbers, losses())


# How long the backward pass takes on a worker: torch runs that pass, so hooks measure it.

_window: tuple[int, float, float] = (0, 0.0, 0.0)
"""A step, and the times when its first and its latest gradient were computed on this worker."""


def _watch(step: int, loss: Tensor, params: Tensors) -> None:
    """Records when the backward pass computes the gradients of this loss and of these parameters."""

    def note(gradient: Tensor) -> None:
        global _window
        now = time.perf_counter()
        (watched, began, _) = _window
        _window = (step, began if watched == step else now, now)

    for tensor in (loss, *params.values()):
        tensor.register_hook(note)


def _seconds_of(step: int) -> tuple[int, float]:
    (watched, began, ended) = _window
    return get_world_rank(), ended - began if watched == step else 0.0


def _backward_seconds(step: int, ranks: set[int], timeout: float) -> Counter[int]:
    parts = [(rank, (step,), None) for rank in sorted(ranks)]
    return Counter(dict(remote_sync_call(_seconds_of, partitioner=lambda: parts, timeout=timeout)))


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return leaf.new_zeros(leaf.shape) if gradient is None else gradient


def _backward_traffic(params: Tensors, ranks: Sequence[int]) -> Traffic:
    """The bytes of the backward pass, estimated, since torch does not count them: for every chunk of another worker one
    gradient of the loss goes out, and one gradient of every parameter comes back."""
    size = sum(p.nbytes for p in params.values())
    chunks = Counter(rank for rank in ranks if rank != get_world_rank())
    of_losses = next(iter(params.values())).element_size() * chunks.total()
    return Traffic(of_losses, Counter({rank: size * count for rank, count in chunks.items()}))
