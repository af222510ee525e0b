"""Sums over the ranks of a process group in the order of `distributed.reduce`: by two collectives, or by one that a
CUDA graph can hold.

Every rank owns a slice of the flat buffers. It gets all partial sums of its slice (`all_to_all`), adds them, and
shares the result (`gather_rows`). For B bytes, n ranks and one partial sum on each, a rank sends 2·B·(n − 1)/n bytes,
as in a ring all-reduce; but a ring adds in another order for every element.

NCCL has both collectives. There is no single send or receive, so none can wait for another.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.reduce import Subtree, combine, partials_of_terms, subtrees_of
from distributed.strategies.common.work import Flat, even_runs, flatten, unflatten

T = TypeVar("T")

_POLL_SECONDS = 0.0002
_ALIGN = 16  # a slice has a multiple of 16 elements. So slices of all types can lie side by side as bytes.


def sum_over_ranks(
    partials: Mapping[Subtree, Sequence[Tensor]], like: Sequence[Tensor], subtrees: Sequence[Sequence[Subtree]],
    count: int, beside: Tensor,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """The sum of `count` terms of which every rank has some, and a row of every rank.

    Args:
        partials: of each of this rank's subtrees, the sum of its terms as flat buffers, one [k] for each type.
        like: buffers of the same sizes and types, also on a rank without terms.
        subtrees: of every rank, its subtrees.
        count: the number of terms on all ranks.
        beside: this rank's row [r], which travels with the sum.

    Returns the buffers of the sum, and the rows [ranks, r]. Raises RuntimeError if a rank has died, or does not answer
    within the group's time limit.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        sums = [combine(zip(partials, buffers, strict=True), count) for buffers in zip(*partials.values(), strict=True)]
        return sums, beside[None]
    lengths = [_slice_length(buffer.numel(), size) for buffer in like]
    width = sum(length * buffer.itemsize for length, buffer in zip(lengths, like, strict=True))
    rows = [_by_rank(partials[subtree], lengths, size) for subtree in subtrees[rank]]
    outgoing = torch.stack(rows, dim=1) if rows else like[0].new_empty(size, 0, width, dtype=torch.uint8)
    counts = [len(theirs) for theirs in subtrees]
    incoming = like[0].new_empty(sum(counts), width, dtype=torch.uint8)
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


class SharesOfRanks:
    """The ranks share a step that stays on their devices; for the methods see `metalearn.types.Shares`.

    Every rank computes a run of chunks, and gets the partial sums of all by one all-gather of a buffer whose size
    follows from the number of chunks alone. For B bytes and n ranks, each receives (n − 1)·B for every partial sum of a
    rank: more than by `sum_over_ranks`, but at one collective's latency, and under NCCL the host waits for nothing.

    This rank's results lie on `device`, a step of all ranks may take `timeout` seconds, and in a context of `naming` an
    error of a collective names the missing ranks.
    """

    def __init__(
        self, device: torch.device, timeout: float, naming: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.ranks = dist.get_world_size()
        self._rank, self._timeout, self._naming = dist.get_rank(), timeout, naming
        self._nccl = dist.get_backend() == "nccl"
        self.through_host = device.type == "cuda" and not self._nccl
        self._started: deque[torch.cuda.Event] = deque()

    def run(self, count: int) -> range:
        return even_runs(range(count), self.ranks)[self._rank] or range(1)  # type: ignore[return-value]  # of a range

    def add(self, terms: Sequence[T], count: int) -> T:
        runs = even_runs(range(count), self.ranks)
        subtrees = [subtrees_of(run, count) for run in runs]
        sums = partials_of_terms(zip(runs[self._rank], terms, strict=False), count)  # without chunks: no terms
        flat = {subtree: flatten(value) for subtree, value in sums.items()}
        like = next(iter(flat.values()), None) or flatten(terms[0])
        lengths = [_slice_length(buffer.numel(), 1) for buffer in like.buffers]
        rows = [_by_rank(flat[subtree].buffers, lengths, 1) for subtree in subtrees[self._rank]]
        most = max(map(len, subtrees))
        width = sum(length * buffer.itemsize for length, buffer in zip(lengths, like.buffers, strict=True))
        rows.append(torch.zeros(most - len(rows), width, dtype=torch.uint8, device=like.buffers[0].device))
        outgoing = torch.cat(rows)
        with self._naming():
            if self._nccl:
                gathered = outgoing.new_empty(self.ranks, *outgoing.shape)
                # Not `wait`: by TORCH_NCCL_BLOCKING_WAIT that holds up the host, which no recording of a graph allows.
                work = dist.all_gather_into_tensor(gathered, outgoing, async_op=True)
                assert work is not None
                work.synchronize()
            else:
                gathered = gather_rows(outgoing.cpu().flatten()).to(outgoing.device)
        everyones = [
            (subtree, rank * most + place)
            for rank, theirs in enumerate(subtrees)
            for place, subtree in enumerate(theirs)
        ]
        typed = _typed(gathered.view(-1, width), lengths, like.buffers)
        totals = [
            combine([(subtree, values[row]) for subtree, row in everyones], count)[: buffer.numel()]
            for values, buffer in zip(typed, like.buffers, strict=True)
        ]
        total: T = unflatten(Flat(totals, like.form))
        return total

    def agree(self, text: str) -> list[str]:
        texts: list[Any] = [None] * self.ranks
        with self._naming():
            dist.all_gather_object(texts, text)
        return texts

    def started(self) -> None:
        if self._nccl:
            event = torch.cuda.Event()
            event.record()
            self._started.append(event)

    def wait(self) -> None:
        # torch's watchdog does not see operations in a graph, so a lost rank would hold this one up for ever.
        with self._naming():
            while self._started:
                deadline = time.monotonic() + self._timeout
                while not self._started[0].query():
                    if time.monotonic() > deadline:
                        assert dist.group.WORLD is not None
                        dist.group.WORLD.abort()  # else no operation of this process's device would ever end
                        raise RuntimeError("a step timed out")
                    time.sleep(_POLL_SECONDS)
                self._started.popleft()
