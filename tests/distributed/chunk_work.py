"""The `Work` of the strategies' tests: a small network, in float64, on inputs computed from the samples' indices."""

import torch
from torch import Tensor

from distributed.strategies.common.work import Work

PARAMS = {
    "weight": torch.linspace(-1, 1, 5000, dtype=torch.float64).view(100, 50),
    "out": torch.linspace(0, 1, 50, dtype=torch.float64),
    "unused": torch.ones(3, dtype=torch.float64),
}


def losses_of(params: dict[str, Tensor], indices: Tensor, step: int) -> Tensor:
    x = torch.sin(indices[:, None].double() + torch.arange(100) * step)
    hidden = torch.tanh(x @ params["weight"])
    return (hidden * hidden.sum(dim=1, keepdim=True) @ params["out"]).square()


def loss(params: dict[str, Tensor], indices: Tensor, step: int) -> tuple[Tensor, tuple[Tensor, int]]:
    value = losses_of(params, indices, step).sum()
    return value, (value.detach(), len(indices))


def result(grads: dict[str, Tensor], rest: tuple[Tensor, int]) -> tuple[dict[str, Tensor], Tensor, int]:
    return (grads, *rest)


def map_chunk(params: dict[str, Tensor], indices: Tensor, step: int) -> tuple[dict[str, Tensor], Tensor, int]:
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    value, rest = loss(leaves, indices, step)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)]
    return result(dict(zip(leaves, filled, strict=True)), rest)


def evaluate(params: dict[str, Tensor], split: str, indices: Tensor) -> dict[str, Tensor]:
    return {"loss": losses_of(params, indices, len(split))}


def diagnose(params: dict[str, Tensor], indices: Tensor, step: int) -> dict[str, Tensor]:
    return {"fault": torch.where(indices == 5, step, 0)}


WORK = Work(map=map_chunk, evaluate=evaluate, diagnose=diagnose, loss=loss, result=result, device=torch.device("cpu"))
