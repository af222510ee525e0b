"""All ranks step together, over torch's process groups (c10d): gloo on CPUs, NCCL on GPUs.

Each rank computes a run of consecutive chunks and knows the parameters itself; only the sum of the gradients
travels. Where a gradient is taken inside the loss, as meta-learners do, which DistributedDataParallel cannot
serve, the chunks' results are added by `ordered_sum`, to the same bits as in one process. A plain loss goes through
torch's DistributedDataParallel, whose all-reduce overlaps the backward pass and adds in an order of its own.
"""

import gc
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from distributed.engine.groups import missing_ranks, start_process_group, stop_process_group
from distributed.engine.info import check_timeout
from distributed.engine.listening import announcement, everyone_in_group
from distributed.engine.sockets import tcp_bytes_sent
from distributed.partition import TensorDimensionPartitioner
from distributed.reduce import add_in_order
from distributed.strategies.common.cost import Share, as_metrics
from distributed.strategies.common.ordered_sum import ordered_sum
from distributed.strategies.common.overlapped import Overlapped
from distributed.strategies.common.work import Connect, Plan, Strategy, Tensors, Work, diagnosed, join

_LAST_WORD_SECONDS = 1.0

log = logging.getLogger(__name__)


def ddp(*, plan: Plan, timeout: float, overlap: bool = True, bucket_mb: float = 25.0) -> Connect:
    """Every rank drives; rank zero alone writes.

    Args:
        plan: what is computed, by how many workers.
        timeout: seconds that a rank may take to come to a sum.
        overlap: send a plain loss through DistributedDataParallel; if false it is added like all others, to the same
            bits as in one process.
        bucket_mb: size of DistributedDataParallel's buckets, in MiB.

    Raises:
        ValueError: a partitioner or a reducer that has no place here, or a time limit that is not above 0.
    """
    check_timeout(timeout)
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or bucket_mb <= 0:
        raise ValueError(f"bucket_mb={bucket_mb!r}: must be a size above 0; type bucket_mb=25")
    partitioner = plan.partitioner
    if not isinstance(partitioner, TensorDimensionPartitioner) or partitioner.exclusive or partitioner.dim:
        raise ValueError("strategy=ddp: every rank takes a run of consecutive chunks; type partitioner=batch")
    if not plan.only_adds:
        raise ValueError("strategy=ddp: no rank sees the gradients of single chunks; type reducer=mean or reducer=sum")
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap={overlap!r}: must be true or false; type overlap=true")
    work = plan.work
    overlapped = overlap and work.plain and work.loss is not None
    return lambda: _Ranks(work, timeout, bucket_mb if overlapped else None).strategy()


class _Ranks:
    """One rank's part of the session."""

    def __init__(self, work: Work, timeout: float, bucket_mb: float | None) -> None:
        self._work, self._timeout, self._bucket_mb = work, timeout, bucket_mb
        backend = start_process_group(timeout=timeout, device=work.device)
        self._backend, self._tcp_bytes = backend, tcp_bytes_sent()
        self._device = work.device if backend == "nccl" else torch.device("cpu")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._module: Overlapped | None = None
        self._answer = self._agreed = False
        self._cost: dict[str, float] = {}
        listening = everyone_in_group()
        if self._rank == 0:
            log.info("%s over %d ranks; %s", backend, self._size, announcement(listening))

    def strategy(self) -> Strategy:
        return Strategy(
            True,
            self.map,
            self.evaluate,
            self.diagnose,
            lambda: self._cost,
            self.close,
            agree=self.agree,
            share=self.share,
        )

    def map(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> list[Any]:
        """One result: the sum over all chunks."""
        began = time.perf_counter()
        own = _runs(chunks, self._size)[self._rank]
        with self._telling():
            compute = self._in_order if self._bucket_mb is None else self._overlapped
            total, shares = compute(params, own, chunks, step)
        self._cost = as_metrics(time.perf_counter() - began, shares)
        return [total]

    def _exchange(self, share: Share, values: Sequence[float] = ()) -> tuple[list[Share], list[list[float]]]:
        """Tells all ranks this one's share of the step, whether it has been asked to stop, and some values more;
        everyone's shares and values."""
        row = [*share._replace(sent=self._sent_since_asked(share.sent)), float(self._answer), *values]
        own = torch.tensor(row, dtype=torch.float64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(gathered, own)
        rows = torch.stack(gathered).tolist()
        self._agreed = bool(rows[0][2])
        return [Share(*row[:2]) for row in rows], [row[3:] for row in rows]

    def _sent_since_asked(self, reckoned: float) -> float:
        """Bytes that this rank has sent since this was last asked, by the kernel's count; else as reckoned."""
        if self._backend != "gloo":
            return reckoned
        now, before = tcp_bytes_sent(), self._tcp_bytes
        self._tcp_bytes = now
        return reckoned if now is None or before is None else now - before

    def _in_order(
        self, params: Tensors, own: Sequence[Tensor], chunks: Sequence[Tensor], step: int
    ) -> tuple[Any, list[Share]]:
        began = time.perf_counter()
        # A rank without a chunk of its own needs one all the same, to know what a result looks like.
        results = [self._work.map(params, chunk, step) for chunk in own or chunks[:1]]
        seconds = time.perf_counter() - began
        leaves, form = pytree.tree_flatten(results[0])
        all_leaves = [pytree.tree_leaves(result) for result in results]
        by_type = {dtype: _places(leaves, dtype) for dtype in sorted({_type(leaf) for leaf in leaves}, key=str)}
        sums: list[Any] = list(leaves)
        sent = 0
        for dtype, places in by_type.items():
            flat = [self._flat([values[i] for i in places], dtype) for values in all_leaves]
            added, bytes_sent = ordered_sum(flat if own else [], flat[0])
            sent += bytes_sent
            parts = added.split([_count(leaves[i]) for i in places])
            for i, part in zip(places, parts, strict=True):
                sums[i] = _like(leaves[i], part)
        shares, _ = self._exchange(Share(seconds if own else 0.0, sent))
        return pytree.tree_unflatten(sums, form), shares

    def _flat(self, leaves: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.cat([torch.as_tensor(leaf, dtype=dtype).reshape(-1) for leaf in leaves]).to(self._device)

    def _overlapped(
        self, params: Tensors, own: Sequence[Tensor], chunks: Sequence[Tensor], step: int
    ) -> tuple[Any, list[Share]]:
        assert self._bucket_mb is not None
        if self._module is None or not self._module.holds(params):
            self._module = Overlapped(params, self._work, self._bucket_mb, chunks[0], step)
        module = self._module
        began = time.perf_counter()
        module.start(params)
        rests = [module.add_gradient(chunk, step, last=chunk is own[-1]) for chunk in own]
        if not own:
            rests = [_nothing(module.add_gradient(chunks[0], step, last=True, weight=0.0))]
        seconds = module.rounds.ready - began
        grads = {name: grad.to(params[name].device) for name, grad in module.gradients().items()}
        leaves, form = pytree.tree_flatten(add_in_order(rests))
        sent = 2 * (self._size - 1) / self._size * module.rounds.bytes  # what a ring sends
        shares, rows = self._exchange(Share(seconds, sent), [float(leaf) for leaf in leaves])
        sums = [_number_like(leaf, sum(column)) for leaf, column in zip(leaves, zip(*rows, strict=True), strict=True)]
        return self._work.result(grads, pytree.tree_unflatten(sums, form)), shares

    def evaluate(self, params: Tensors, split: str, chunks: Sequence[Tensor]) -> Tensors:
        """By rank zero's parameters; each rank computes its part, and all know all values."""
        with self._telling():
            params = self._of_rank_zero(params)
            return self._gathered(chunks, lambda chunk: self._work.evaluate(params, split, chunk))

    def diagnose(self, params: Tensors, chunks: Sequence[Tensor], step: int) -> Tensors:
        """Each rank looks at what it has computed, and all know all findings."""
        with self._telling():
            return self._gathered(chunks, lambda chunk: diagnosed(self._work, params, chunk, step, self._rank))

    def _gathered(self, chunks: Sequence[Tensor], compute: Callable[[Tensor], Tensors]) -> Tensors:
        """Values of every sample, of which each rank computes its part."""
        own = _runs(chunks, self._size)[self._rank]
        values = join([compute(chunk) for chunk in own or chunks[:1]])
        before = sum(map(len, (c for run in _runs(chunks, self._size)[: self._rank] for c in run)))
        samples, count = sum(map(len, chunks)), sum(map(len, own))
        everyones = {}
        for name, value in values.items():
            table = value.new_zeros(samples, *value.shape[1:]).to(self._device)
            table[before : before + count] = value[:count].to(self._device)
            dist.all_reduce(table)  # all but one rank's are zero
            everyones[name] = table.cpu()
        return everyones

    def _of_rank_zero(self, params: Tensors) -> Tensors:
        copies = {name: value.detach().clone().to(self._device) for name, value in params.items()}
        for copy in copies.values():
            dist.broadcast(copy, 0)
        return {name: copies[name].to(value.device) for name, value in params.items()}

    def agree(self, answer: bool) -> bool:
        """Rank zero's answer, as of the step before: it goes round with the sums."""
        self._answer = answer
        return self._agreed

    def share(self, value: bytes) -> bytes:
        """Rank zero's value."""
        with self._telling():
            size = torch.tensor([len(value)], device=self._device)
            dist.broadcast(size, 0)
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if self._rank == 0 else None
            content = torch.empty(int(size), dtype=torch.uint8) if data is None else data
            content = content.to(self._device)
            dist.broadcast(content, 0)
            return content.cpu().numpy().tobytes()

    def close(self, failure: BaseException | None = None) -> None:
        self._module = None
        gc.collect()  # DistributedDataParallel refers to itself, and holds the group, whose threads must end with it
        stop_process_group()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Names who is missing, which c10d's message about a socket does not."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _is_about_connections(error):
                raise
            names = " and ".join(f"worker{rank}" for rank in missing_ranks(_LAST_WORD_SECONDS)) or "a worker"
            reason = re.sub(r"\[/[^]]*\] *", "", str(error).splitlines()[0]).partition(". This is typically")[0]
            if "timed out" in reason.lower():
                raise TimeoutError(
                    f"{names} did not answer within {self._timeout:g} s: {reason}; type strategy.timeout=SECONDS to "
                    f"allow more than {self._timeout:g}"
                ) from error
            raise ConnectionError(f"{names} does not answer: {reason}") from error


def _number_like(leaf: Any, value: float) -> Any:
    return leaf.new_tensor(value) if isinstance(leaf, Tensor) else type(leaf)(value)


def _nothing(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf * 0, values)


def _runs(chunks: Sequence[Tensor], ranks: int) -> list[Sequence[Tensor]]:
    """Each rank's chunks: consecutive, as evenly as can be, the first ranks with one more."""
    each, more = divmod(len(chunks), ranks)
    ends = [each * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return [chunks[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _type(leaf: Any) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, Tensor) else torch.float64 if isinstance(leaf, float) else torch.int64


def _places(leaves: Sequence[Any], dtype: torch.dtype) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if _type(leaf) == dtype]


def _count(leaf: Any) -> int:
    return leaf.numel() if isinstance(leaf, Tensor) else 1


def _like(leaf: Any, values: Tensor) -> Any:
    """`values` [k] in the form of `leaf`. Tensors are copies, aligned as any others."""
    if isinstance(leaf, Tensor):
        return values.view(leaf.shape).to(leaf.device, copy=True)
    return type(leaf)(values.item())


def _is_about_connections(error: RuntimeError) -> bool:
    return any(sign in str(error).lower() for sign in ("connection", "timed out", "timeout", "gloo", "nccl", "socket"))
