"""RPC map-reduce under a distributed autograd context: workers compute losses, and rank zero starts one backward
pass through all of them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed import autograd
from distributed import chunks as dealing
from distributed.info import check_timeout, get_world_rank
from distributed.partition import PartitionFunction
from distributed.traffic import Traffic
from distributed.work import Connect, Tensors, Work


def rpc_autograd(
    *, work: Work, workers: int, partitioner: PartitionFunction, timeout: float, device_maps: str = "auto"
) -> Connect:
    """As `rpc`, but only losses come back from the forward pass, and gradients from the backward pass.

    Each chunk gets leaf copies of the parameters of its own, so that its gradient can be told from the
    others' and they can be added in chunk order. So parameters and gradients travel once a chunk, and
    every worker holds the graphs of all its chunks until the backward pass.

    Args:
        work: what is computed of a chunk.
        workers: processes in the world.
        partitioner: how the numbers of the chunks are dealt out.
        timeout: seconds that a worker may take for its part.
        device_maps: `auto`: tensors go from GPU to GPU where every worker has one of its own; `none`: by the CPU.

    Raises:
        ValueError: an algorithm whose loss has no graph, a partitioner that would cut chunks in pieces, or a
            time limit that is not above 0.
    """
    check_timeout(timeout)
    dealing.check_partitioner(partitioner)
    dealing.check_device_maps(device_maps)
    if work.loss is None:
        raise ValueError("strategy=rpc_autograd: this algorithm has no loss that a graph leads to; type strategy=rpc")
    meter = dealing.Meter()

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        meter.start()
        plain = dealing.carried(params)
        copies = [{name: p.clone().requires_grad_() for name, p in plain.items()} for _ in chunks]
        with autograd.context() as ctx:
            results = dealing.call(
                _losses, partitioner, chunks, lambda numbers: ([copies[i] for i in numbers], step), timeout
            )
            leaves = [leaf for copy in copies for leaf in copy.values()]
            grads = iter(autograd.grad(ctx, [loss for loss, _, _ in results], leaves, allow_unused=True))
        by_chunk = [{name: _or_zeros(next(grads), leaf) for name, leaf in copy.items()} for copy in copies]
        meter.stop(_backward_traffic(plain, [loss for loss, _, rank in results if rank != get_world_rank()]))
        return [work.result(grads, rest) for grads, (_, rest, _) in zip(by_chunk, results, strict=True)]

    return lambda: dealing.connect(work, partitioner, timeout, device_maps, map_chunks, meter)


def _losses(
    numbers: list[int], chunks: list[Tensor], copies: list[Tensors], step: int
) -> list[tuple[int, tuple[Tensor, Any, int]]]:
    """On a worker: for each of its chunks the number, and the loss, what comes with it, and this worker's rank."""
    compute = dealing.work_here().loss
    assert compute is not None
    return [
        (number, (*compute(copy, chunk, step), get_world_rank()))
        for number, chunk, copy in zip(numbers, chunks, copies, strict=True)
    ]


def _or_zeros(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return leaf.new_zeros(leaf.shape) if gradient is None else gradient


def _backward_traffic(params: Tensors, losses_elsewhere: Sequence[Tensor]) -> Traffic:
    """A gradient of each loss out, and one of every parameter back."""
    size = sum(p.numel() * p.element_size() for p in params.values())
    return Traffic(sum(loss.element_size() for loss in losses_elsewhere), size * len(losses_elsewhere))
