"""All ranks step together, over torch's process groups (c10d): gloo on CPUs, NCCL on GPUs.

Each rank has the parameters and computes a run of consecutive chunks. Only the sum of the gradients travels. If the
loss itself takes a gradient, as in meta-learning, torch's DistributedDataParallel cannot be used. Then `sum_over_ranks`
adds the chunks' results, to the same bits as in one process. A plain loss uses DistributedDataParallel: its all-reduce
overlaps the backward pass, and adds in another order. Steps that stay on the GPUs share one collective, which a CUDA
graph can hold (`SharesOfRanks`).
"""

import gc
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from distributed.info import check_timeout, name_of_rank
from distributed.launch.isolation import exposure
from distributed.launch.process_group import (
    dismiss_others,
    end_when_dismissed,
    missing_ranks,
    start_process_group,
    stop_process_group,
)
from distributed.partition import TensorDimensionPartitioner
from distributed.reduce import Subtree, Tensors, combine, mean_of_sums, partials, subtrees_of, tree_sum
from distributed.strategies.common.work import (
    ROUND,
    ChunkStrategy,
    Connect,
    Evaluator,
    Flat,
    Work,
    WorkerCost,
    WorkPlan,
    advised,
    as_metrics,
    diagnose_chunk,
    even_runs,
    flatten,
    join,
    to_cpu,
    unflatten,
)

T = TypeVar("T")

_LAST_WORD_SECONDS = 1.0
_POLL_SECONDS = 0.0002
_ALIGN = 16  # a slice has a multiple of 16 elements. So slices of all types can lie side by side as bytes.

log = logging.getLogger(__name__)


def ddp(*, plan: WorkPlan, timeout: float, overlap: bool = True, bucket_mb: float = 25.0) -> Connect:
    """Every rank drives; only rank zero writes. conf/strategy/ddp.yaml explains the keys. Raises ValueError if the
    partitioner or the reducer does not fit this strategy, or a key has a value that is not allowed."""
    check_timeout(timeout)
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or bucket_mb <= 0:
        raise ValueError(f"bucket_mb={bucket_mb!r}: must be a size above 0; type strategy.bucket_mb=25")
    if not fits(plan._replace(reduce=mean_of_sums)):
        raise ValueError("strategy=ddp: every rank takes a run of consecutive chunks; type partitioner=batch")
    if not fits(plan):
        raise ValueError("strategy=ddp: no rank sees the gradients of single chunks; type reducer=mean or reducer=sum")
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap={overlap!r}: must be true or false; type strategy.overlap=true")
    work = plan.work
    overlapped = overlap and work.plain and work.loss is not None
    return lambda: _Rank(work, timeout, bucket_mb if overlapped else None)


def fits(plan: WorkPlan) -> bool:
    """Whether ranks can take runs of consecutive chunks, and add up their gradients."""
    partitioner = plan.partitioner
    is_batch = isinstance(partitioner, TensorDimensionPartitioner) and not partitioner.exclusive and not partitioner.dim
    return is_batch and plan.only_adds


class _Rank(ChunkStrategy):
    """This rank in the process group, from the start of the group to its end."""

    def __init__(self, work: Work, timeout: float, bucket_mb: float | None) -> None:
        self._work, self._timeout, self._bucket_mb = work, timeout, bucket_mb
        backend = start_process_group(timeout=timeout, device=work.device)
        self._device = work.device if backend == "nccl" else torch.device("cpu")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._module: Overlapped | None = None
        self._form: Flat | None = None
        if bucket_mb is None:
            self.shares = SharesOfRanks(work.device, timeout, self._naming_missing_ranks)
        end_when_dismissed()
        if self._rank == 0:
            log.info("%s over %d ranks; %s", backend, self._size, exposure())

    def map(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        """Returns a single result: the sum over all chunks."""
        began = time.perf_counter()
        with self._naming_missing_ranks():
            compute = self._by_tree if self._bucket_mb is None else self._overlapped
            total, costs = compute(params, chunks, step)
        self._cost = as_metrics(time.perf_counter() - began, costs)
        return [total]

    def _by_tree(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> tuple[Any, list[WorkerCost]]:
        """The sum over all chunks in the order of `distributed.reduce`, and every rank's cost."""
        began = time.perf_counter()
        runs = even_runs(range(len(chunks)), self._size)
        results = ((number, self._work.map(params, chunks[number], step)) for number in runs[self._rank])
        sums = partials(results, len(chunks))
        flat = {subtree: flatten(value) for subtree, value in sums.items()}
        # A rank without chunks computes one in its first step, to know the form of a result.
        self._form = like = next(iter(flat.values()), self._form) or flatten(self._work.map(params, chunks[0], step))
        seconds = time.perf_counter() - began
        buffers = {subtree: [part.to(self._device) for part in value.buffers] for subtree, value in flat.items()}
        templates = [buffer.to(self._device) for buffer in like.buffers]
        subtrees = [subtrees_of(run, len(chunks)) for run in runs]
        cost = WorkerCost(seconds if sums else 0.0, bytes_sent(templates, len(sums)))
        row = torch.tensor(cost, dtype=torch.float64, device=self._device)
        added, rows = sum_over_ranks(buffers, templates, subtrees, len(chunks), row)
        total = Flat([value.to(buffer.device) for value, buffer in zip(added, like.buffers, strict=True)], like.form)
        return unflatten(total), [WorkerCost(*row) for row in rows.tolist()]

    def _overlapped(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> tuple[Any, list[WorkerCost]]:
        """As `_by_tree`, but DistributedDataParallel adds the gradients."""
        assert self._bucket_mb is not None
        if self._module is None or self._module.sources is not params:  # the loop changes its parameters in place
            self._module = Overlapped(params, self._work, self._bucket_mb, chunks[0], step)
        began, module = time.perf_counter(), self._module
        own_chunks = even_runs(chunks, self._size)[self._rank]
        weight = 1.0 if own_chunks else 0.0  # a rank without chunks computes one for nothing: all ranks must join
        gradients, rests = module.gradients(params, own_chunks or chunks[:1], step, weight)
        leaves, form = pytree.tree_flatten(tree_sum(rests))
        sent = 2 * (self._size - 1) / self._size * module.stats.bytes  # as a ring all-reduce sends
        values = [module.stats.ready - began, sent, *(float(leaf) * weight for leaf in leaves)]
        rows = gather_rows(torch.tensor(values, dtype=torch.float64, device=self._device)).tolist()
        sums = [
            leaf.new_tensor(sum(column)) if isinstance(leaf, Tensor) else type(leaf)(sum(column))
            for leaf, column in zip(leaves, zip(*(row[2:] for row in rows), strict=True), strict=True)
        ]
        grads = {name: grad.to(params[name].device) for name, grad in gradients.items()}
        return self._work.result(grads, pytree.tree_unflatten(sums, form)), [WorkerCost(*row[:2]) for row in rows]

    def evaluator(self, params: Tensors, split: str) -> Evaluator:
        """By rank zero's parameters. Each rank computes its part; all ranks get all values."""
        copies = {name: value.detach().clone().to(self._device) for name, value in params.items()}
        with self._naming_missing_ranks():
            for copy in copies.values():
                dist.broadcast(copy, 0)
        sent = {name: copies[name].to(value.device) for name, value in params.items()}
        evaluate = self._work.evaluate
        return ROUND * self._size, lambda group: self._gathered(group, lambda chunk: evaluate(sent, split, chunk))

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        """Every sample's faults. Each rank diagnoses its own chunks; all ranks get all faults."""
        return join(self._gathered(chunks, lambda c: diagnose_chunk(self._work, params, c, step, self._rank)))

    def _gathered(self, chunks: Sequence[Tensor], compute: Callable[[Tensor], Tensors]) -> list[Tensors]:
        """The values of every chunk, on every rank. Each rank computes those of its own chunks."""
        values = [compute(chunk) for chunk in even_runs(chunks, self._size)[self._rank]]
        everyones: list[Any] = [None] * self._size
        with self._naming_missing_ranks():
            dist.all_gather_object(everyones, to_cpu(flatten(values)))
        return [value for flat in everyones for value in unflatten(flat)]

    def dismiss(self) -> None:
        dismiss_others()

    def share(self, value: Any) -> Any:
        """Rank zero's value."""
        with self._naming_missing_ranks():
            values = [value]
            dist.broadcast_object_list(values, 0, device=self._device)
            return values[0]

    def close(self, failure: BaseException | None = None) -> None:
        self._module = None
        gc.collect()  # DistributedDataParallel refers to itself and to the group; the group's threads must end here
        stop_process_group()

    @contextmanager
    def _naming_missing_ranks(self) -> Iterator[None]:
        """Raises errors that name the missing ranks. c10d's own message names only a socket."""
        try:
            yield
        except RuntimeError as error:
            signs = ("connection", "timed out", "timeout", "gloo", "nccl", "socket")
            if not isinstance(error, dist.DistError) and not any(sign in str(error).lower() for sign in signs):
                raise
            names = " and ".join(name_of_rank(rank) for rank in missing_ranks(_LAST_WORD_SECONDS)) or "a worker"
            reason = re.sub(r"\[/[^]]*\] *", "", str(error).splitlines()[0]).partition(". This is typically")[0]
            if "timed out" in reason.lower():
                late = TimeoutError(f"{names} did not answer within {self._timeout:g} s: {reason}")
                raise advised(late, self._timeout) from error
            raise ConnectionError(f"{names} does not answer: {reason}") from error


class Overlapped:
    """torch's DistributedDataParallel for a plain loss, which is a function, over the parameters of the loop. It
    reduces each bucket of gradients over the ranks while the backward pass still computes the next buckets.

    `chunk` and `step` are for a trial: a parameter on which their loss does not depend gets no gradient, since torch
    would wait for it.
    """

    def __init__(self, params: Tensors, work: Work, bucket_mb: float, chunk: Tensor, step: int) -> None:
        assert work.loss is not None
        # What a step has reduced: bytes of gradients, and the time when the last bucket was ready. Apart from this
        # object, since torch's hook keeps it alive, and must not keep the process group alive.
        self.stats = SimpleNamespace(bytes=0, ready=0.0)
        self.sources = params
        self._named: Tensors = {name: nn.Parameter(p.detach().to(work.device)) for name, p in params.items()}
        parameters = list(self._named.values())
        loss, _ = work.loss(self._named, chunk, step)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)
        module = _LossModule(parameters, partial(work.loss, self._named))
        # No `device_ids`: torch would bring the numbers of a chunk to the GPU, and sources read them on the host.
        self._ddp = DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
        self._ddp.register_comm_hook(self.stats, _reduce_bucket)

    def gradients(
        self, params: Tensors, chunks: Sequence[Tensor], step: int, weight: float
    ) -> tuple[Tensors, list[Any]]:
        """The gradients, by parameter, summed over the chunks of all ranks, this rank's times `weight`; and the values
        beside the loss of these chunks."""
        self.stats.bytes = 0
        rests = []
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.grad = None
                if parameter.data_ptr() != params[name].data_ptr():  # on another device
                    parameter.copy_(params[name])
        for chunk in chunks:
            with nullcontext() if chunk is chunks[-1] else self._ddp.no_sync():  # ranks sum up with the last one
                loss, rest = self._ddp(chunk, step)
                (loss * weight).backward()
            rests.append(rest)
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._named.items()}, rests


def _reduce_bucket(stats: SimpleNamespace, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums a bucket of gradients over the ranks."""
    values = bucket.buffer()
    stats.bytes += values.nbytes
    stats.ready = time.perf_counter()
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    future: Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


class _LossModule(nn.Module):
    """A loss as a module with its parameters, as DistributedDataParallel needs it."""

    def __init__(self, parameters: Sequence[Tensor], loss: Callable[[Tensor, int], tuple[Tensor, Any]]) -> None:
        super().__init__()
        self._parameters_of_loss, self._loss = nn.ParameterList(parameters), loss

    def forward(self, chunk: Tensor, step: int) -> tuple[Tensor, Any]:
        return self._loss(chunk, step)


# Sums over the ranks in the order of `distributed.reduce`: by two collectives, or by one
#
# Every rank owns a slice of the flat buffers. It gets all partial sums of its slice (`all_to_all`), adds them, and
# shares the result (`gather_rows`). For B bytes, n ranks and one partial sum on each, a rank sends 2·B·(n − 1)/n bytes,
# as in a ring all-reduce; but a ring adds in another order for every element.
#
# NCCL has both collectives. There is no single send or receive, so none can wait for another.


def sum_over_ranks(
    parts: Mapping[Subtree, list[Tensor]], like: Sequence[Tensor], subtrees: Sequence[Sequence[Subtree]], count: int,
    beside: Tensor,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """The sum of `count` terms of which every rank has some, and a row of every rank.

    Args:
        parts: of each of this rank's subtrees, the sum of its terms as flat buffers, one [k] for each type.
        like: buffers of the same sizes and types, also on a rank without terms.
        subtrees: of every rank, its subtrees.
        count: the number of terms on all ranks.
        beside: this rank's row [r], which travels with the sum.

    Returns the buffers of the sum, and the rows [ranks, r]. Raises RuntimeError if a rank has died, or does not answer
    within the group's time limit.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return combine(parts.items(), count), beside[None]
    width = sum(_slice_bytes(like, size))
    rows = [_by_rank(parts[subtree], size) for subtree in subtrees[rank]]
    outgoing = torch.stack(rows, dim=1) if rows else like[0].new_empty(size, 0, width, dtype=torch.uint8)
    counts = [len(theirs) for theirs in subtrees]
    incoming = like[0].new_empty(sum(counts), width, dtype=torch.uint8)
    dist.all_to_all_single(incoming, outgoing.view(-1, width), counts, [len(rows)] * size)
    everyones = [subtree for theirs in subtrees for subtree in theirs]
    totals = [combine(zip(everyones, part, strict=True), count) for part in _typed(incoming, like, size)]
    own_slice = torch.cat([part.view(torch.uint8) for part in (*totals, beside)])
    gathered = gather_rows(own_slice)
    slices = _typed(gathered[:, :width].contiguous(), like, size)
    sums = [values.reshape(-1)[: buffer.numel()] for values, buffer in zip(slices, like, strict=True)]
    return sums, gathered[:, width:].contiguous().view(beside.dtype)


def bytes_sent(like: Sequence[Tensor], own_terms: int) -> int:
    """The bytes of buffers that a rank with `own_terms` partial sums sends in `sum_over_ranks`."""
    size = dist.get_world_size()
    return (size - 1) * (own_terms + 1) * sum(_slice_bytes(like, size))


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


def _slice_length(elements: int, ranks: int) -> int:
    per_rank = -(-elements // ranks)
    return -(-per_rank // _ALIGN) * _ALIGN


def _slice_bytes(like: Sequence[Tensor], ranks: int) -> list[int]:
    """Of each buffer the bytes that a rank owns."""
    return [_slice_length(buffer.numel(), ranks) * buffer.itemsize for buffer in like]


def _by_rank(buffers: Sequence[Tensor], ranks: int) -> Tensor:
    """The buffers as bytes [ranks, width]: row i has rank i's slices. The last ones are filled up with 0."""
    slices = []
    for buffer in buffers:
        length = _slice_length(buffer.numel(), ranks)
        padded = torch.nn.functional.pad(buffer, (0, length * ranks - buffer.numel()))
        slices.append(padded.view(ranks, length).view(torch.uint8))
    return torch.cat(slices, dim=1)


def _typed(rows: Tensor, like: Sequence[Tensor], ranks: int) -> list[Tensor]:
    """From bytes [r, width] the values [r, length] of every type."""
    parts = rows.split(_slice_bytes(like, ranks), dim=1)
    return [part.view(buffer.dtype) for part, buffer in zip(parts, like, strict=True)]


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
        sums = partials(zip(runs[self._rank], terms, strict=False), count)  # without chunks: no terms
        flat = {subtree: flatten(value) for subtree, value in sums.items()}
        like = next(iter(flat.values()), None) or flatten(terms[0])
        rows = [_by_rank(flat[subtree].buffers, 1) for subtree in subtrees[self._rank]]
        most, width = max(map(len, subtrees)), sum(_slice_bytes(like.buffers, 1))
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
        totals = [
            combine([(subtree, values[row]) for subtree, row in everyones], count)[: buffer.numel()]
            for values, buffer in zip(_typed(gathered.view(-1, width), like.buffers, 1), like.buffers, strict=True)
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
