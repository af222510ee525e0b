"""RPC map-reduce: rank zero deals chunks out to all workers, itself included, and adds the results."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distributed.partition import PartitionFunction, TensorDimensionPartitioner, whole
from distributed.reduce import add_in_order
from distributed.remote import remote_sync_call
from distributed.work import Connect, Strategy, Tensors, Work, from_row, join, to_rows
from distributed.world import check_timeout, get_world_rank, start_rpc, stop_rpc

ROUND = 4
"""Chunks that a worker evaluates in one call."""

_work: Work | None = None
"""What this process computes when it is asked; set before RPC starts."""


def _here() -> Work:
    if _work is None:
        raise RuntimeError("this worker was asked to compute before its strategy was made")
    return _work


def _compute(numbers: Tensor, rows: Tensor, params: Tensors, kind: str, last: int | str) -> list[tuple[int, Any]]:
    """On a worker: the results of its chunks, each with its number. `last` is the step of a `map`, the
    split of an `evaluate`."""
    results = []
    for number, row in zip(numbers.reshape(-1).tolist(), rows.reshape(numbers.numel(), -1), strict=True):
        chunk = from_row(row)
        if kind == "map":
            results.append((number, _here().map(params, chunk, int(last))))
        else:
            results.append((number, _here().evaluate(params, str(last), chunk)))
    return results


def _in_order(parts: Sequence[list[tuple[int, Any]]]) -> list[Any]:
    """The workers' answers as one list, by the number of the chunk."""
    return [result for _, result in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])]


def rpc(*, workers: int, partitioner: PartitionFunction, timeout: float) -> Connect:
    """Rank zero drives and computes too; the others serve until it closes the session.

    Args:
        workers: processes in the world.
        partitioner: how the numbers of the chunks are dealt out.
        timeout: seconds that a worker may take for its part.

    Raises:
        ValueError: a partitioner that would cut chunks in pieces, or a time limit that is not above 0.
    """
    check_timeout(timeout)
    if isinstance(partitioner, TensorDimensionPartitioner) and partitioner.dim != 0:
        raise ValueError(f"partitioner.dim={partitioner.dim}: chunks lie along dimension 0; type partitioner.dim=0")

    def call(kind: str, params: Tensors, chunks: Sequence[Tensor], last: int | str) -> list[Any]:
        plain = {name: value.detach() for name, value in params.items()}
        args = (torch.arange(len(chunks)), to_rows(chunks), whole(plain), kind, last)
        try:
            results: list[Any] = remote_sync_call(_compute, args=args, partitioner=partitioner, reducer=_in_order)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; type strategy.timeout=SECONDS to allow more than {timeout:g}") from error
        return results

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> Any:
        return add_in_order(call("map", params, chunks, step))

    def evaluate(params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
        # In rounds, so that the time limit is one on a few chunks, however many tasks there are.
        rounds = range(0, len(chunks), workers * ROUND)
        return join([v for i in rounds for v in call("evaluate", params, chunks[i : i + workers * ROUND], split)])

    def connect(work: Work) -> Strategy:
        global _work
        _work = work
        start_rpc(timeout=timeout)
        return Strategy(get_world_rank() == 0, map_chunks, evaluate, stop_rpc)

    return connect
