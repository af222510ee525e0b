"""The cost of a step: how each worker spent its seconds, and the bytes that it sent."""

from collections.abc import Sequence
from typing import NamedTuple


class WorkerCost(NamedTuple):
    """One worker's cost of a step: seconds of compute, and bytes sent."""

    compute: float
    sent: float


def as_metrics(seconds: float, costs: Sequence[WorkerCost]) -> dict[str, float]:
    """Metrics by name, worker by worker, of a step that took `seconds` on rank zero.

    Every worker's seconds add up to the step's. Compute: the worker computed. Waiting: it was done, but the slowest
    worker was not. Communication, that is, packing, sending and adding: the rest of the step.
    """
    slowest = max(cost.compute for cost in costs)
    metrics = {}
    for rank, cost in enumerate(costs):
        metrics[f"worker{rank}/compute_seconds"] = cost.compute
        metrics[f"worker{rank}/waiting_seconds"] = slowest - cost.compute
        metrics[f"worker{rank}/communication_seconds"] = max(0.0, seconds - slowest)
        metrics[f"worker{rank}/bytes_sent"] = cost.sent
    return metrics
