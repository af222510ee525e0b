"""Sums over the ranks of a process group in the order of `distributed.reduce`, by two collectives.

Every rank owns a slice of the flat buffers. It gets all partial sums of its slice (`all_to_all`), adds them, and
shares the result (`gather_rows`). For B bytes, n ranks and one partial sum on each, a rank sends 2·B·(n − 1)/n bytes,
as in a ring all-reduce; but a ring adds in another order for every element.

NCCL has both collectives. There is no single send or receive, so none can wait for another.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.reduce import Subtree, combine

_ALIGN = 16
"""A slice has a multiple of 16 elements. So slices of all types can lie side by side as bytes."""


def sum_over_ranks(
    partials: Mapping[Subtree, Sequence[Tensor]],
    like: Sequence[Tensor],
    subtrees: Sequence[Sequence[Subtree]],
    count: int,
    beside: Tensor,
) -> tuple[list[Tensor], Tensor]:
    """The sum of `count` terms of which every rank has some, and a row of every rank.

    Args:
        partials: of each of this rank's subtrees, the sum of its terms as flat buffers, one [k] for each type.
        like: buffers of the same sizes and types, also on a rank without terms.
        subtrees: of every rank, its subtrees.
        count: the number of terms on all ranks.
        beside: this rank's row [r], which travels with the sum.

    Returns:
        The buffers of the sum, and the rows [ranks, r].

    Raises:
        RuntimeError: a rank has died, or does not answer within the group's time limit.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        sums = [combine(zip(partials, buffers, strict=True), count) for buffers in zip(*partials.values(), strict=True)]
        return sums, beside[None]
    lengths = [_slice_length(buffer.numel(), size) for buffer in like]
    width = sum(length * buffer.itemsize for length, buffer in zip(lengths, like, strict=True))
    rows = [_by_rank(partials[subtree], lengths, size) for subtree in subtrees[rank]]
    outgoing = torch.stack(rows, dim=1) if rows else _bytes_like(like[0], size, 0, width)
    counts = [len(theirs) for theirs in subtrees]
    incoming = _bytes_like(like[0], sum(counts), width)
    dist.all_to_all_single(incoming, outgoing.view(-1, width), counts, [len(rows)] * size)
    everyones = [subtree for theirs in subtrees for subtree in theirs]
    totals = [combine(zip(everyones, part, strict=True), count) for part in _typed(incoming, lengths, like)]
    own_slice = torch.cat([part.view(torch.uint8) for part in (*totals, beside)])
    gathered = gather_rows(own_slice)
    slices = _typed(gathered[:, :width].contiguous(), lengths, like)
    sums = [values.reshape(-1)[: buffer.numel()] for values, buffer in zip(slices, like, strict=True)]
    return sums, gathered[:, width:].contiguous().view(beside.dtype)


def bytes_sent(like: Sequence[Tensor], own_terms: int) -> int:
    """The bytes of buffers that a rank with `own_terms` partial sums sends in `sum_over_ranks`."""
    size = dist.get_world_size()
    width = sum(_slice_length(buffer.numel(), size) * buffer.itemsize for buffer in like)
    return (size - 1) * (own_terms + 1) * width


def gather_rows(row: Tensor) -> Tensor:
    """The rows [ranks, r] of all ranks; `row` [r] is this rank's.

    gloo's `all_gather` goes round a ring, and waits twice a link's latency at each rank; its `all_to_all` sends to all
    ranks at once.
    """
    size = dist.get_world_size()
    rows = row.new_empty(size, *row.shape)
    if dist.get_backend() == "gloo":
        dist.all_to_all_single(rows, row.expand(size, -1).contiguous())
    else:
        dist.all_gather(list(rows), row)
    return rows


def _slice_length(elements: int, size: int) -> int:
    per_rank = -(-elements // size)
    return -(-per_rank // _ALIGN) * _ALIGN


def _by_rank(buffers: Sequence[Tensor], lengths: Sequence[int], size: int) -> Tensor:
    """The buffers as bytes [ranks, width]: row i has rank i's slices. The last ones are filled up with 0."""
    slices = []
    for buffer, length in zip(buffers, lengths, strict=True):
        padded = torch.nn.functional.pad(buffer, (0, length * size - buffer.numel()))
        slices.append(padded.view(size, length).view(torch.uint8))
    return torch.cat(slices, dim=1)


def _typed(rows: Tensor, lengths: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """From bytes [r, width] the values [r, length] of every type."""
    sizes = [length * buffer.itemsize for length, buffer in zip(lengths, like, strict=True)]
    return [part.view(buffer.dtype) for part, buffer in zip(rows.split(sizes, dim=1), like, strict=True)]


def _bytes_like(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=like.device)
