"""Convolution by torch's operations, on any device: windows are gathered as rows; each task is one matrix product.

Images are [t, n, h, w, c], kernels [t, o, i, kh, kw].
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.nn.layout import rows_of_kernels
from metalearn.nn.precision import rounds_products


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


def windows(padded: Tensor, g: Geometry) -> Tensor:
    """Every window of padded images: [t, n, h, w, c] → [t, n, h', w', kh, kw, c], a view."""
    return padded.unfold(2, g.height, g.stride).unfold(3, g.width, g.stride).permute(0, 1, 2, 3, 5, 6, 4)


def product(x: Tensor, weight: Tensor, g: Geometry) -> Tensor:
    """y = x ∗ w."""
    return _times(_rows(x, g), _matrices(weight)).view(*x.shape[:2], *g.out(*x.shape[2:4]), -1)


def input_gradient(gy: Tensor, weight: Tensor, shape: tuple[int, ...], g: Geometry) -> Tensor:
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


def weight_gradient(gy: Tensor, x: Tensor, g: Geometry) -> Tensor:
    """The derivative of ⟨gy, x ∗ w⟩ by w."""
    kernels = _times(_rows(x, g).transpose(1, 2), gy.flatten(1, 3))
    return kernels.view(x.shape[0], g.height, g.width, x.shape[-1], gy.shape[-1]).permute(0, 4, 3, 1, 2)


def _rows(x: Tensor, g: Geometry) -> Tensor:
    """Windows as rows: [t, n h' w', kh kw i]."""
    padded = F.pad(x, (0, 0) + (g.padding,) * 4) if g.padding else x
    return windows(padded, g).flatten(4, 6).flatten(1, 3)


def _matrices(weight: Tensor) -> Tensor:
    """Kernels as matrices [t, kh kw i, o]."""
    return rows_of_kernels(weight)[0].flatten(1, 3).expand(weight.shape[0], -1, -1)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The products of two stacks of matrices."""
    if rounds_products():
        return torch.bmm(a.bfloat16(), b.bfloat16()).to(a.dtype)
    return torch.bmm(a, b)
