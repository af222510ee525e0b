"""Sums over the ranks of a process group, added in one order. So the bits of a sum do not depend on the ranks.

Every rank has some terms; all terms of a rank come before those of the next. The partial sum goes from rank to rank,
and each rank adds its terms one by one. The last rank then sends the total round the ring. Both go in buckets, so that
all links are busy at once. For B bytes and n ranks that sends 2·B·(n − 1) bytes in all. A ring all-reduce sends as
many, but adds in another order for every element.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 1 << 18
"""Number of elements in one message."""


def ordered_sum(terms: Sequence[Tensor], like: Tensor) -> tuple[Tensor, int]:
    """((t₀ + t₁) + t₂) + … over the terms of all ranks, and the bytes that this rank has sent.

    Args:
        terms: this rank's terms, which do not change; only the first rank must have one.
        like: any tensor of the terms' shape [k] and type, which are the same on every rank.

    Raises:
        RuntimeError: a rank has died, or does not answer within the group's time limit.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return _added(None, terms), 0
    last = size - 1
    shapes = like.split(BUCKET)
    buckets = list(zip(*(term.split(BUCKET) for term in terms), strict=True)) or [()] * len(shapes)
    prefixes = [torch.empty_like(shape) for shape in shapes] if rank else []
    totals = [torch.empty_like(shape) for shape in shapes] if rank != last else []
    arriving = [dist.irecv(prefix, rank - 1) for prefix in prefixes]
    coming_back = [dist.irecv(total, (rank - 1) % size) for total in totals]
    sending, sent = [], 0

    def send(values: Tensor, to: int) -> None:
        nonlocal sent
        sending.append((dist.isend(values, to), values))
        sent += values.nbytes

    for number, bucket in enumerate(buckets):
        prefix = None
        if rank:
            _finish(arriving[number])
            prefix = prefixes[number]
        added = _added(prefix, bucket)
        send(added, (rank + 1) % size)
        if rank == last:
            totals.append(added)
    for total, back in zip(totals, coming_back, strict=False):
        _finish(back)
        if rank + 1 < last:
            send(total, rank + 1)
    for work, _ in sending:
        _finish(work)
    return torch.cat(totals), sent


def _added(prefix: Tensor | None, terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].clone() if prefix is None else prefix
    for term in terms[1:] if prefix is None else terms:
        total += term
    return total


def _finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
