"""Flat buffers: all tensors and numbers of a nested value in one tensor for each type, so that few tensors travel."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Slot:
    """The place of a leaf: its buffer, its first element there, its shape; of a number its class, else None."""

    buffer: int
    start: int
    shape: tuple[int, ...]
    number: type | None


class Flat(NamedTuple):
    """A nested value in which a `Slot` stands for each leaf, and one buffer [k] for each type and device."""

    buffers: list[Tensor]
    form: Any


def flatten(value: Any) -> Flat:
    """Copies the leaves of a value to flat buffers. Numbers become int64 or float64. A graph is left behind."""
    pieces: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: list[int] = []

    def slot(leaf: Any) -> Slot:
        tensor = _as_tensor(leaf)
        kind = (tensor.dtype, tensor.device)
        if kind not in pieces:
            pieces[kind] = []
            sizes.append(0)
        buffer = list(pieces).index(kind)
        start = sizes[buffer]
        pieces[kind].append(tensor.reshape(-1))
        sizes[buffer] += tensor.numel()
        return Slot(buffer, start, tuple(tensor.shape), None if isinstance(leaf, Tensor) else type(leaf))

    form = pytree.tree_map(slot, value)
    return Flat([torch.cat(tensors) for tensors in pieces.values()], form)


def unflatten(flat: Flat) -> Any:
    """The value. Its tensors are copies, so they are aligned as any other tensor, and kernels give the same bits."""

    def leaf(slot: Slot) -> Any:
        size = torch.Size(slot.shape).numel()
        values = flat.buffers[slot.buffer][slot.start : slot.start + size]
        return values.clone().view(slot.shape) if slot.number is None else slot.number(values.item())

    return pytree.tree_map(leaf, flat.form)


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)
