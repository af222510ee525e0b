"""Convolution with separate kernels for every task, differentiable any number of times.

The product y = x ∗ w is linear in x and in w, so its two gradients are again such products. The three
`autograd.Function`s below are closed under differentiation: the backward pass of each one calls only the
others. torch's own double backward builds convolutions of odd shapes instead, which run slowly.

Images lie with their channels last, [t, n, h, w, c]; kernels are [t, o, i, kh, kw].
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.native import GEOMETRY, AnyKernels, compiled_for
from metalearn.nn.precision import rounds_products

FEW_CHANNELS = 16
"""If the inputs have fewer channels, their windows are gathered first, so that the products fill vectors."""


class Geometry(NamedTuple):
    """A convolution: height and width of the kernels, the stride, and the zeros that pad every side."""

    height: int
    width: int
    stride: int
    padding: int

    def out(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the result."""
        return (
            (height + 2 * self.padding - self.height) // self.stride + 1,
            (width + 2 * self.padding - self.width) // self.stride + 1,
        )


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

    def shapes() -> str:  # no text is made on the way of every call
        return f"images [tasks, samples, height, width, channels] {list(x.shape)} and kernels {list(weight.shape)}"

    # Compiled kernels would read beyond the memory of images and kernels that do not fit.
    if x.dim() != 5 or weight.dim() != 5 or not x.numel() or not weight.numel():
        raise ValueError(f"{shapes()}: must both have five dimensions, none of them 0")
    if (x.shape[0], x.shape[-1], x.dtype, x.device) != (weight.shape[0], weight.shape[2], weight.dtype, weight.device):
        raise ValueError(
            f"{shapes()} ({x.dtype}, {x.device}; {weight.dtype}, {weight.device}): kernels [tasks, outputs, channels, "
            "height, width] must have as many tasks and channels, the same type and the same device"
        )
    if stride < 1 or padding < 0:
        raise ValueError(f"stride={stride}, padding={padding}: must be at least 1 and 0")
    geometry = Geometry(weight.shape[3], weight.shape[4], stride, padding)
    if min(geometry.out(*x.shape[2:4])) < 1:
        raise ValueError(
            f"images of {x.shape[2]}×{x.shape[3]} pixels are smaller than kernels of {weight.shape[3]}×"
            f"{weight.shape[4]}; type a larger dataset.image_size"
        )
    if torch.compiler.is_exporting():  # one operation that every runtime has
        return torch.stack([
            F.conv2d(images.permute(0, 3, 1, 2), kernels, stride=stride, padding=padding).permute(0, 2, 3, 1)
            for images, kernels in zip(x, weight, strict=True)
        ])  # fmt: skip
    if x.shape[-1] < FEW_CHANNELS and geometry != (1, 1, 1, 0):
        x = _windows(F.pad(x, (0, 0) + (padding,) * 4), geometry).flatten(4)
        weight = weight.permute(0, 1, 3, 4, 2).flatten(2)[..., None, None]
        geometry = Geometry(1, 1, 1, 0)
    result: Tensor = _Product.apply(x, weight, geometry)
    return result


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
            return _times(_rows(x, g), _matrices(weight)).view(*x.shape[:2], *g.out(*x.shape[2:4]), -1)
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
            return _input_gradient(gy, weight, shape, g)
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
            kernels = _times(_rows(x, g).transpose(1, 2), gy.flatten(1, 3))
            return kernels.view(x.shape[0], g.height, g.width, x.shape[-1], outputs).permute(0, 4, 3, 1, 2)
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


# By torch's operations, on any device: windows are gathered as rows; each task is one matrix product


def _windows(padded: Tensor, g: Geometry) -> Tensor:
    """Every window of padded images: [t, n, h, w, c] → [t, n, h', w', kh, kw, c], a view."""
    return padded.unfold(2, g.height, g.stride).unfold(3, g.width, g.stride).permute(0, 1, 2, 3, 5, 6, 4)


def _input_gradient(gy: Tensor, weight: Tensor, shape: tuple[int, ...], g: Geometry) -> Tensor:
    """The derivative of ⟨gy, x ∗ w⟩ by x, for x of `shape`."""
    t, n, height, width, inputs = shape
    out_height, out_width = gy.shape[2:4]
    rows = _times(gy.flatten(1, 3), _matrices(weight).transpose(1, 2))
    taps = rows.view(t, n, out_height, out_width, g.height, g.width, inputs)
    padded = gy.new_zeros(t, n, height + 2 * g.padding, width + 2 * g.padding, inputs)
    for i in range(g.height):
        for j in range(g.width):
            below, right = i + g.stride * out_height, j + g.stride * out_width
            padded[:, :, i : below : g.stride, j : right : g.stride] += taps[:, :, :, :, i, j]
    return padded[:, :, g.padding : g.padding + height, g.padding : g.padding + width].contiguous()


def _rows(x: Tensor, g: Geometry) -> Tensor:
    """Windows as rows: [t, n h' w', kh kw i]."""
    padded = F.pad(x, (0, 0) + (g.padding,) * 4) if g.padding else x
    return _windows(padded, g).flatten(4, 6).flatten(1, 3)


def _matrices(weight: Tensor) -> Tensor:
    """Kernels as matrices [t, kh kw i, o]."""
    return rows_of_kernels(weight)[0].flatten(1, 3).expand(weight.shape[0], -1, -1)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The products of two stacks of matrices."""
    if rounds_products():
        return torch.bmm(a.bfloat16(), b.bfloat16()).to(a.dtype)
    return torch.bmm(a, b)


# The order of images and kernels in memory


def channels_last(x: Tensor) -> Tensor:
    """Images [t, n, c, h, w] from a data source → [t, n, h, w, c] for the layers."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def laid_out(parameter: Tensor) -> Tensor:
    """The same values; the memory order of a convolution's kernels [o, i, kh, kw] becomes [kh, kw, i, o].

    Elementwise operations keep that order, so that no kernel is rearranged at every use. Derivatives have the usual
    order.
    """
    if parameter.dim() != 4:
        return parameter
    result: Tensor = _LaidOut.apply(parameter)
    return result


def rows_of_kernels(weight: Tensor) -> tuple[Tensor, int]:
    """Kernels [t, o, i, kh, kw] as dense [t or 1, kh, kw, i, o], and the distance from one task's kernels to the next
    task's: 0 if all tasks share one set (an expanded tensor)."""
    return dense(weight.permute(0, 3, 4, 2, 1))


def dense(parameter: Tensor) -> tuple[Tensor, int]:
    """[t, …] dense, and the distance from one task's part to the next task's. If all tasks share one part (an expanded
    tensor), the result is [1, …], and the distance is 0."""
    if parameter.stride(0) == 0 and parameter.shape[0] > 1:
        return parameter[:1].contiguous(), 0
    return parameter.contiguous(), parameter.shape[1:].numel()


class _LaidOut(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
