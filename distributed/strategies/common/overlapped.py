"""torch's DistributedDataParallel for a loss that is a function. It reduces each bucket of gradients over the ranks
while the backward pass still computes the next buckets."""

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from distributed.strategies.common.work import Tensors, Work


class Overlapped:
    """A plain loss as a DistributedDataParallel module over the parameters of the loop.

    `chunk` and `step` are for a trial: a parameter on which their loss does not depend gets no gradient, since torch
    would wait for it.
    """

    def __init__(self, params: Tensors, work: Work, bucket_mb: float, chunk: Tensor, step: int) -> None:
        assert work.loss is not None
        self.stats = ReduceStats()
        self._sources = params
        own = {name: nn.Parameter(p.detach().to(work.device)) for name, p in params.items()}
        loss, _ = work.loss(dict(own), chunk, step)
        for parameter, gradient in zip(
            own.values(), torch.autograd.grad(loss, list(own.values()), allow_unused=True), strict=True
        ):
            parameter.requires_grad_(gradient is not None)
        inner = _LossModule(own, work)
        # No `device_ids`: torch would bring the numbers of a chunk to the GPU, and sources read them on the host.
        self._inner, self._ddp = inner, DistributedDataParallel(inner, bucket_cap_mb=bucket_mb)
        self._ddp.register_comm_hook(self.stats, _reduce_bucket)

    def holds(self, params: Tensors) -> bool:
        """Whether this module was made of these very parameters."""
        return all(params.get(name) is source for name, source in self._sources.items())

    def start(self, params: Tensors) -> None:
        """Called before the first chunk of a step: clears the gradients, and takes over the parameters' values."""
        self.stats.bytes = 0
        with torch.no_grad():
            for name, parameter in self._inner.by_name().items():
                parameter.grad = None
                if parameter.data_ptr() != params[name].data_ptr():  # on another device
                    parameter.copy_(params[name])

    def add_gradient(self, chunk: Tensor, step: int, *, last: bool, weight: float = 1.0) -> Any:
        """Adds a chunk's gradient to this rank's sum; returns the values beside the loss.

        With the last chunk of a step, the gradients are summed over the ranks.
        """
        with nullcontext() if last else self._ddp.no_sync():
            loss, rest = self._ddp(chunk, step)
            (loss * weight).backward()
        return rest

    def gradients(self) -> Tensors:
        """The gradients summed over the ranks, by parameter."""
        named = self._inner.by_name().items()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


class ReduceStats:
    """What a step has reduced: bytes of gradients, and the time when the last bucket was ready.

    It is separate from `Overlapped`, since torch's hook keeps it alive, and must not keep the process group alive.
    """

    def __init__(self) -> None:
        self.ready = 0.0
        self.bytes = 0


def _reduce_bucket(stats: ReduceStats, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sums a bucket of gradients over the ranks."""
    values = bucket.buffer()
    stats.bytes += values.nbytes
    stats.ready = time.perf_counter()
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    future: Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


class _LossModule(nn.Module):
    """The loss as a module with the parameters as its own, as DistributedDataParallel needs it."""

    def __init__(self, params: dict[str, nn.Parameter], work: Work) -> None:
        super().__init__()
        self._names = list(params)
        self._params = nn.ParameterList(params.values())
        self._work = work

    def by_name(self) -> dict[str, nn.Parameter]:
        return dict(zip(self._names, self._params, strict=True))

    def forward(self, chunk: Tensor, step: int) -> tuple[Tensor, Any]:
        assert self._work.loss is not None
        return self._work.loss(dict(self.by_name()), chunk, step)
