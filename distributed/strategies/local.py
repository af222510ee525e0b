"""One process computes every chunk."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.engine.info import check_timeout
from distributed.reduce import add_in_order
from distributed.strategies.common.cost import WorkerCost, as_metrics
from distributed.strategies.common.work import Connect, Plan, Strategy, Tensors, diagnose_chunk, join


def local(*, plan: Plan, timeout: float, device_maps: str = "auto") -> Connect:
    """Computes the chunks one after the other. `timeout` and `device_maps` have no effect here.

    If the reducer only adds, each result is added to the sum at once, so more chunks need no more memory.

    Raises:
        ValueError: the plan has several workers, or the time limit is not above 0.
    """
    check_timeout(timeout)
    if plan.workers != 1:
        raise ValueError(f"workers={plan.workers}: strategy=local is one process; type strategy=rpc, or workers=1")
    work = plan.work
    seconds = [0.0]

    def map_chunks(params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        began = time.perf_counter()
        results: list[Any] = []
        for chunk in chunks:
            results.append(work.map(params, chunk, step))
            if plan.only_adds:
                results = [add_in_order(results)]
        seconds[0] = time.perf_counter() - began
        return results

    def evaluate(params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
        return join([work.evaluate(params, split, chunk) for chunk in chunks])

    def diagnose(params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        return join([diagnose_chunk(work, params, chunk, step, rank=0) for chunk in chunks])

    def cost() -> dict[str, float]:
        return as_metrics(seconds[0], [WorkerCost(seconds[0], 0)])

    return lambda: Strategy(True, map_chunks, evaluate, diagnose, cost, lambda failure=None: None)
