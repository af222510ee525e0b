"""RPC map-reduce: rank zero deals chunks out to all workers, itself included, and adds the results."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.partition import PartitionFunction, TensorDimensionPartitioner, whole
from distributed.reduce import add_in_order
from distributed.remote import remote_sync_call
from distributed.work import Connect, Strategy, Tensors, Work, from_row, join, to_rows
from distributed.world import check_timeout, get_world_rank, start_rpc, stop_rpc

_work: Work | None = None
"""What this process computes when it is asked; set before RPC starts."""


def _here() -> Work:
    if _work is None:
        raise RuntimeError("this worker was asked to compute before its strategy was made")
    return _work


def _map(numbers: Tensor, rows: Tensor, params: Tensors, step: int) -> list[tuple[int, Any]]:
    """On a worker: the results of its chunks, each with its number."""
    return [
        (int(number), _here().map(params, from_row(row), step))
        for number, row in zip(numbers.reshape(-1), rows.reshape(numbers.numel(), -1), strict=True)
    ]


def _evaluate(numbers: Tensor, rows: Tensor, params: Tensors, split: str) -> list[tuple[int, Tensors]]:
    """On a worker: the values of its chunks, each with its number."""
    return [
        (int(number), _here().evaluate(params, split, from_row(row)))
        for number, row in zip(numbers.reshape(-1), rows.reshape(numbers.numel(), -1), strict=True)
    ]


def _in_order(parts: Sequence[list[tuple[int, Any]]]) -> list[Any]:
    """The workers' answers as one list, by the number of the chunk."""
    return [result for _, result in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]


def rpc(*, workers: int, partitioner: PartitionFunction, timeout: float) -> Connect:
    """Rank zero drives and computes too; the others serve until it closes the session.

    Args:
        workers: processes in the world; here any number will do.
        partitioner: how the numbers of the chunks are dealt out.
        timeout: seconds that a worker may take for its part.

    Raises:
        ValueError: a partitioner that would cut chunks in pieces, or a time limit that is not above 0.
    """
    check_timeout(timeout)
    if isinstance(partitioner, TensorDimensionPartitioner) and partitioner.dim != 0:
        raise ValueError(f"partitioner.dim={partitioner.dim}: chunks lie along dimension 0; type partitioner.dim=0")

    def call(func: Callable[..., Any], params: Tensors, chunks: Sequence[Tensor], last: int | str) -> list[Any]:
        plain = {name: value.detach() for name, value in params.items()}
        args = (torch.arange(len(chunks)), to_rows(chunks), whole(plain), last)
        results: list[Any] = remote_sync_call(func, args=args, partitioner=partitioner, reducer=_in_order)
        return results

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> Any:
        return add_in_order(call(_map, params, chunks, step))

    def evaluate(params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
        return join(call(_evaluate, params, chunks, split))

    def connect(work: Work) -> Strategy:
        global _work
        _work = work
        start_rpc(timeout=timeout)
        return Strategy(get_world_rank() == 0, map_chunks, evaluate, stop_rpc)

    return connect
