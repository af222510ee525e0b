"""Copies modules, so that a copy can be sent to other workers and keeps its graph."""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

M = TypeVar("M")

_MODES = {
    "reference": "reference", "ref": "reference",
    "clone": "clone", "copy": "clone",
    "deepcopy": "deepcopy", "deepclone": "deepcopy",
}  # fmt: skip


def module_clone(
    module: M, *, by: str = "reference", detach_buffers: bool = False, device: torch.device | str | int | None = None
) -> M:
    """A copy of a module, or of any nesting of tensors. Tensors that are shared inside it stay shared.

    Args:
        module: what to copy.
        by: `reference` shares the tensors with the original; `clone` (or `copy`) gives plain tensors whose
            graph leads to the originals, and these can be sent by RPC; `deepcopy` gives new parameters without a
            graph.
        detach_buffers: with `reference`: buffers become copies without a graph.
        device: the device of the copy's tensors; default that of the original's.

    Raises:
        ValueError: `by` is none of these.
        TypeError: `module` is neither a module nor tensors.
    """
    if by not in _MODES:
        raise ValueError(f"by={by!r}: must be reference, clone (or copy) or deepcopy")
    mode = _MODES[by]

    def place(tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"module={tensor!r}: must be a module, or tensors in any nesting")
        to = tensor.device if device is None else torch.device(device)
        if mode != "deepcopy":
            return (tensor.clone() if mode == "clone" else tensor).to(to)
        own = tensor.detach().clone().to(to)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(own, requires_grad=tensor.requires_grad)
        return own.requires_grad_(tensor.requires_grad)

    if not isinstance(module, nn.Module):
        tree: M = pytree.tree_map(place, module)
        return tree
    tensors = {id(p): place(p) for p in module.parameters()}
    for buffer in module.buffers():
        placed = place(buffer)
        tensors[id(buffer)] = placed.detach().clone() if mode == "reference" and detach_buffers else placed
    return copy.deepcopy(module, memo=tensors)
