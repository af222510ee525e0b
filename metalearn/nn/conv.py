"""Convolution with a kernel of its own for every task, differentiable any number of times.

The product y = x ∗ w is linear in x and in w, so its two gradients are again such products. The three
`autograd.Function`s below are closed under differentiation: each one's backward pass calls only the
others. torch's own double backward builds convolutions of odd shapes instead, which run slowly.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class _Geometry(NamedTuple):
    stride: int
    padding: int
    groups: int


def conv2d(x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Cross-correlates each task's images with its kernels.

    Args:
        x: [n, t × i, h, w].
        weight: [t, o, i, kh, kw].

    Returns:
        [n, t × o, h', w'].
    """
    geometry = _Geometry(stride, padding, weight.shape[0])
    result: Tensor = _Product.apply(x, weight.flatten(0, 1), geometry)
    return result


def _gradient(gy: Tensor, x: Tensor, weight: Tensor, g: _Geometry, *, of_input: bool) -> Tensor:
    """One of the two first derivatives; of the other operand only its shape is read."""
    gx, gw, _ = torch.ops.aten.convolution_backward(
        gy, x, weight, None, [g.stride] * 2, [g.padding] * 2, [1, 1], False, [0, 0], g.groups,
        [of_input, not of_input, False],
    )  # fmt: skip
    result: Tensor = gx if of_input else gw
    return result


class _Product(Function):
    """(x, w) → y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, g: _Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = g
        return torch.conv2d(x, weight, None, g.stride, g.padding, 1, g.groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = grads
        x, weight = ctx.saved_tensors
        gx = _InputGradient.apply(gy, weight, x.shape, ctx.geometry) if ctx.needs_input_grad[0] else None
        gw = _WeightGradient.apply(gy, x, weight.shape, ctx.geometry) if ctx.needs_input_grad[1] else None
        return gx, gw, None


class _InputGradient(Function):
    """(gy, w) → the derivative of ⟨gy, x ∗ w⟩ by x."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, weight: Tensor, shape: torch.Size, g: _Geometry) -> Tensor:
        ctx.save_for_backward(gy, weight)
        ctx.geometry = g
        return _gradient(gy, gy.new_empty(shape), weight, g, of_input=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = grads
        gy, weight = ctx.saved_tensors
        ggy = _Product.apply(v, weight, ctx.geometry) if ctx.needs_input_grad[0] else None
        gw = _WeightGradient.apply(gy, v, weight.shape, ctx.geometry) if ctx.needs_input_grad[1] else None
        return ggy, gw, None, None


class _WeightGradient(Function):
    """(gy, x) → the derivative of ⟨gy, x ∗ w⟩ by w."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, shape: torch.Size, g: _Geometry) -> Tensor:
        ctx.save_for_backward(gy, x)
        ctx.geometry = g
        return _gradient(gy, x, gy.new_empty(shape), g, of_input=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (u,) = grads
        gy, x = ctx.saved_tensors
        ggy = _Product.apply(x, u, ctx.geometry) if ctx.needs_input_grad[0] else None
        gx = _InputGradient.apply(gy, u, x.shape, ctx.geometry) if ctx.needs_input_grad[1] else None
        return ggy, gx, None, None
