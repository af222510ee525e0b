"""What a step has cost: where each worker's seconds went, and the bytes that it sent."""

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """One worker's part of a step: seconds in which it computed, and bytes that it sent."""

    compute: float
    sent: float


def as_metrics(seconds: float, shares: Sequence[Share]) -> dict[str, float]:
    """Figures by name, worker by worker, for a step that took so many seconds on rank zero.

    Every worker's seconds add up to the step's: those in which it computed; those in which it was done, and the
    slowest was not (waiting); and what is left when the slowest has computed (communication: packing, sending,
    adding).
    """
    slowest = max(share.compute for share in shares)
    figures = {}
    for rank, share in enumerate(shares):
        figures[f"worker{rank}/compute_seconds"] = share.compute
        figures[f"worker{rank}/waiting_seconds"] = slowest - share.compute
        figures[f"worker{rank}/communication_seconds"] = max(0.0, seconds - slowest)
        figures[f"worker{rank}/bytes_sent"] = share.sent
    return figures
