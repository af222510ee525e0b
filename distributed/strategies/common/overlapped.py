"""torch's DistributedDataParallel for a loss that is a function: each bucket of gradients goes round while the
backward pass is still at work on the others."""

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

    `chunk` and `step` are for a trial: parameters that the loss does not depend on then, which torch would wait for,
    have no gradient.
    """

    def __init__(self, params: Tensors, work: Work, bucket_mb: float, chunk: Tensor, step: int) -> None:
        assert work.loss is not None
        self.rounds = Rounds()
        self._sources = params
        own = {name: nn.Parameter(p.detach().to(work.device)) for name, p in params.items()}
        loss, _ = work.loss(dict(own), chunk, step)
        for parameter, gradient in zip(
            own.values(), torch.autograd.grad(loss, list(own.values()), allow_unused=True), strict=True
        ):
            parameter.requires_grad_(gradient is not None)
        inner = _Loss(own, work)
        ids = [work.device] if work.device.type == "cuda" else None
        self._inner, self._ddp = inner, DistributedDataParallel(inner, device_ids=ids, bucket_cap_mb=bucket_mb)
        self._ddp.register_comm_hook(self.rounds, _added_up)

    def holds(self, params: Tensors) -> bool:
        return all(params.get(name) is source for name, source in self._sources.items())

    def start(self, params: Tensors) -> None:
        """Before the first chunk of a step."""
        self.rounds.bytes = 0
        with torch.no_grad():
            for name, parameter in self._inner.by_name().items():
                parameter.grad = None
                if parameter.data_ptr() != params[name].data_ptr():  # on another device
                    parameter.copy_(params[name])

    def add_gradient(self, chunk: Tensor, step: int, *, last: bool, weight: float = 1.0) -> Any:
        """Adds a chunk's gradient to the sum, which goes round with the last one's; what comes with the loss."""
        with nullcontext() if last else self._ddp.no_sync():
            loss, rest = self._ddp(chunk, step)
            (loss * weight).backward()
        return rest

    def gradients(self) -> Tensors:
        named = self._inner.by_name().items()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


class Rounds:
    """What has gone round in a step: bytes of gradients, and when the last of them were ready.

    Apart from `Overlapped`, since torch's hook holds on to it, and would hold on to the process group.
    """

    def __init__(self) -> None:
        self.ready = 0.0
        self.bytes = 0


def _added_up(rounds: Rounds, bucket: dist.GradBucket) -> Future[Tensor]:
    """A bucket of gradients, added over the ranks."""
    values = bucket.buffer()
    rounds.bytes += values.nbytes
    rounds.ready = time.perf_counter()
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    future: Future[list[Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


class _Loss(nn.Module):
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
