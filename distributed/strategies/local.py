"""One process, which computes every chunk itself."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.partition import PartitionFunction
from distributed.reduce import add_in_order
from distributed.work import Connect, Strategy, Tensors, Work, join
from distributed.world import check_timeout


def local(*, workers: int, partitioner: PartitionFunction, timeout: float) -> Connect:
    """Computes the chunks one after the other; `partitioner` and `timeout` have nothing to do here.

    Raises:
        ValueError: several workers are asked for, or a time limit that is not above 0.
    """
    check_timeout(timeout)
    if workers != 1:
        raise ValueError(f"workers={workers}: strategy=local is one process; type strategy=rpc, or workers=1")

    def connect(work: Work) -> Strategy:
        def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> Any:
            return add_in_order([work.map(params, chunk, step) for chunk in chunks])

        def evaluate(params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
            return join([work.evaluate(params, split, chunk) for chunk in chunks])

        return Strategy(True, map_chunks, evaluate, lambda failure=None: None)

    return connect
