"""Convolution with separate kernels for every task, differentiable any number of times.

The product y = x ∗ w is linear in x and in w, so its two gradients are again such products. The three
`autograd.Function`s below are closed under differentiation: the backward pass of each one calls only the
others. torch's own double backward builds convolutions of odd shapes instead, which run slowly.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metalearn.nn import columns
from metalearn.nn.columns import Geometry
from metalearn.nn.layout import rows_of_kernels
from metalearn.nn.native import GEOMETRY, AnyKernels, compiled_for
from metalearn.nn.precision import rounds_products

FEW_CHANNELS = 16
"""If the inputs have fewer channels, their windows are gathered first, so that the products fill vectors."""


def conv2d(x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Cross-correlates each task's images with its kernels.

    Args:
        x: [t, n, h, w, i].
        weight: [t, o, i, kh, kw]; may be expanded over the tasks.

    Returns:
        [t, n, h', w', o].

    Raises:
        ValueError: images and kernels do not fit each other.
    """
    _check(x, weight, stride, padding)
    if torch.compiler.is_exporting():  # one operation that every runtime has
        return torch.stack([
            F.conv2d(images.permute(0, 3, 1, 2), kernels, stride=stride, padding=padding).permute(0, 2, 3, 1)
            for images, kernels in zip(x, weight, strict=True)
        ])  # fmt: skip
    geometry = Geometry(weight.shape[3], weight.shape[4], stride, padding)
    if x.shape[-1] < FEW_CHANNELS and geometry != (1, 1, 1, 0):
        x = columns.windows(F.pad(x, (0, 0) + (padding,) * 4), geometry).flatten(4)
        weight = weight.permute(0, 1, 3, 4, 2).flatten(2)[..., None, None]
        geometry = Geometry(1, 1, 1, 0)
    result: Tensor = _Product.apply(x, weight, geometry)
    return result


def _check(x: Tensor, weight: Tensor, stride: int, padding: int) -> None:
    """Raises ValueError if images and kernels do not fit: compiled kernels would read beyond their memory."""

    def shapes() -> str:
        return f"images [tasks, samples, height, width, channels] {list(x.shape)} and kernels {list(weight.shape)}"

    if x.dim() != 5 or weight.dim() != 5 or not x.numel() or not weight.numel():
        raise ValueError(f"{shapes()}: must both have five dimensions, none of them 0")
    if (x.shape[0], x.shape[-1], x.dtype, x.device) != (weight.shape[0], weight.shape[2], weight.dtype, weight.device):
        raise ValueError(
            f"{shapes()} ({x.dtype}, {x.device}; {weight.dtype}, {weight.device}): kernels [tasks, outputs, channels, "
            "height, width] must have as many tasks and channels, the same type and the same device"
        )
    if stride < 1 or padding < 0:
        raise ValueError(f"stride={stride}, padding={padding}: must be at least 1 and 0")
    if min(Geometry(weight.shape[3], weight.shape[4], stride, padding).out(*x.shape[2:4])) < 1:
        raise ValueError(
            f"images of {x.shape[2]}×{x.shape[3]} pixels are smaller than kernels of {weight.shape[3]}×"
            f"{weight.shape[4]}; type a larger dataset.image_size"
        )


@lru_cache(maxsize=1024)
def _numbers(x: tuple[int, ...], outputs: int, g: Geometry) -> Any:
    """The geometry in the form that convolution.c takes, for images of shape `x`."""
    tasks, samples, height, width, inputs = x
    return GEOMETRY(tasks, samples, height, width, inputs, *g.out(height, width), outputs, *g)


def _native(x: Tensor, inputs: int, outputs: int, *, over_inputs: bool = False) -> "AnyKernels | None":
    """The compiled kernels, or None if they cannot compute it: they round no products, and the outputs must fill their
    vectors, with `over_inputs` the inputs, too."""
    kernels = None if rounds_products() else compiled_for(x)
    if kernels is None or outputs % kernels.lanes or (over_inputs and inputs % kernels.lanes):
        return None
    return kernels


class _Product(Function):
    """(x, w) → y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = g
        outputs = weight.shape[1]
        native = _native(x, x.shape[-1], outputs)
        if native is None:
            return columns.product(x, weight, g)
        x, (rows, step) = x.contiguous(), rows_of_kernels(weight)
        y = x.new_empty(*x.shape[:2], *g.out(*x.shape[2:4]), outputs)
        native.product(_numbers(x.shape, outputs, g), x, rows, step, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = grads
        x, weight = ctx.saved_tensors
        gx = _InputGradient.apply(gy, weight, x.shape, ctx.geometry) if ctx.needs_input_grad[0] else None
        gw = _WeightGradient.apply(gy, x, ctx.geometry) if ctx.needs_input_grad[1] else None
        return gx, gw, None


class _InputGradient(Function):
    """(gy, w) → the derivative of ⟨gy, x ∗ w⟩ by x."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, weight: Tensor, shape: tuple[int, ...], g: Geometry) -> Tensor:
        ctx.save_for_backward(gy, weight)
        ctx.geometry = g
        native = _native(gy, shape[-1], gy.shape[-1], over_inputs=True)
        if native is None:
            return columns.input_gradient(gy, weight, shape, g)
        gy, (rows, step) = gy.contiguous(), rows_of_kernels(weight)
        gx = gy.new_empty(shape)
        native.input_gradient(_numbers(shape, gy.shape[-1], g), gy, rows, step, gx)
        return gx

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (v,) = grads
        gy, weight = ctx.saved_tensors
        ggy = _Product.apply(v, weight, ctx.geometry) if ctx.needs_input_grad[0] else None
        gw = _WeightGradient.apply(gy, v, ctx.geometry) if ctx.needs_input_grad[1] else None
        return ggy, gw, None, None


class _WeightGradient(Function):
    """(gy, x) → the derivative of ⟨gy, x ∗ w⟩ by w."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, g: Geometry) -> Tensor:
        ctx.save_for_backward(gy, x)
        ctx.geometry = g
        outputs = gy.shape[-1]
        native = _native(gy, x.shape[-1], outputs)
        if native is None:
            return columns.weight_gradient(gy, x, g)
        gy, x = gy.contiguous(), x.contiguous()
        gw = gy.new_empty(x.shape[0], g.height, g.width, x.shape[-1], outputs)
        native.weight_gradient(_numbers(x.shape, outputs, g), gy, x, gw)
        return gw.permute(0, 4, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (u,) = grads
        gy, x = ctx.saved_tensors
        ggy = _Product.apply(x, u, ctx.geometry) if ctx.needs_input_grad[0] else None
        gx = _InputGradient.apply(gy, u, x.shape, ctx.geometry) if ctx.needs_input_grad[1] else None
        return ggy, gx, None
