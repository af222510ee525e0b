"""One process computes every chunk."""

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from distributed.info import check_timeout
from distributed.reduce import Tensors, partials, tree_sum
from distributed.strategies.common.work import (
    ChunkStrategy,
    Connect,
    Evaluator,
    WorkerCost,
    WorkPlan,
    as_metrics,
    diagnose_chunk,
    join,
)

T = TypeVar("T")


def local(*, plan: WorkPlan, timeout: float) -> Connect:
    """Computes the chunks one after the other. `timeout` has no effect here.

    If the reducer only adds, results are added as soon as the tree of additions allows it. So the results of n chunks
    need the memory of log₂(n) + 1. Raises ValueError if the plan has several workers, or the time limit is not above 0.
    """
    check_timeout(timeout)
    if plan.workers != 1:
        raise ValueError(f"workers={plan.workers}: strategy=local is one process; type strategy=rpc, or workers=1")
    return lambda: _Local(plan)


class Alone:
    """One process takes the whole of a step that stays on its device; for the methods see `metalearn.types.Shares`."""

    ranks, through_host = 1, False

    def run(self, count: int) -> range:
        return range(count)

    def add(self, terms: Sequence[T], count: int) -> T:
        return tree_sum(terms)

    def agree(self, text: str) -> list[str]:
        return [text]

    def started(self) -> None:
        """Nothing holds this process's device up."""

    def wait(self) -> None:
        """To read a figure waits for the device."""


class _Local(ChunkStrategy):
    shares = Alone()

    def __init__(self, plan: WorkPlan) -> None:
        self._work, self._only_adds = plan.work, plan.only_adds
        self._seconds = 0.0  # also of steps that stay on a device

    def map(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        began = time.perf_counter()
        computed = ((number, self._work.map(params, chunk, step)) for number, chunk in enumerate(chunks))
        # Of all chunks a single sum, or the result of each.
        results = partials(computed, len(chunks)) if self._only_adds else dict(computed)
        self._seconds = time.perf_counter() - began
        return list(results.values())

    def cost(self) -> dict[str, float]:
        return as_metrics(self._seconds, [WorkerCost(self._seconds, 0)])

    def evaluator(self, params: Tensors, split: str) -> Evaluator:
        return 1, lambda one: [self._work.evaluate(params, split, *one)]

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        return join([diagnose_chunk(self._work, params, chunk, step, rank=0) for chunk in chunks])
