"""One process computes every chunk."""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from distributed.cluster.info import check_timeout
from distributed.strategies.common.cost import WorkerCost, as_metrics
from distributed.strategies.common.work import Connect, StrategyFunctions, Tensors, WorkPlan, diagnose_chunk, join
from distributed.tree_sum import partials_of_terms


def local(*, plan: WorkPlan, timeout: float, device_maps: str = "auto") -> Connect:
    """Computes the chunks one after the other. `timeout` and `device_maps` have no effect here.

    If the reducer only adds, results are added as soon as the tree of additions allows it. So the results of n chunks
    need the memory of log₂(n) + 1.

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
        computed = ((number, work.map(params, chunk, step)) for number, chunk in enumerate(chunks))
        if plan.only_adds:
            results = list(partials_of_terms(computed, len(chunks)).values())  # of all chunks, so a single sum
        else:
            results = [result for _, result in computed]
        seconds[0] = time.perf_counter() - began
        return results

    def evaluate(params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
        return join([work.evaluate(params, split, chunk) for chunk in chunks])

    def diagnose(params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        return join([diagnose_chunk(work, params, chunk, step, rank=0) for chunk in chunks])

    def cost() -> dict[str, float]:
        return as_metrics(seconds[0], [WorkerCost(seconds[0], 0)])

    return lambda: StrategyFunctions(True, map_chunks, evaluate, diagnose, cost, lambda failure=None: None)
