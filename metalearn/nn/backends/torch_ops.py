"""The layers by torch's operations, on any device and in any type: what the other back ends compute, written out.

Windows of images are gathered as rows, so that the convolution of a task is one matrix product.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.nn.surroundings import rounds_products

# Convolutions: images [t, n, h, w, c], kernels [t, o, i, kh, kw]


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


def product(x: Tensor, weight: Tensor, g: Geometry) -> Tensor:
    """x ∗ w."""
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


def windows(x: Tensor, g: Geometry) -> Tensor:
    """Every window of images with their padding: [t, n, h, w, c] → [t, n, h', w', kh, kw, c]."""
    padded = F.pad(x, (0, 0) + (g.padding,) * 4) if g.padding else x
    return padded.unfold(2, g.height, g.stride).unfold(3, g.width, g.stride).permute(0, 1, 2, 3, 5, 6, 4)


def _rows(x: Tensor, g: Geometry) -> Tensor:
    """Windows as rows: [t, n h' w', kh kw i]."""
    return windows(x, g).flatten(4, 6).flatten(1, 3)


def _matrices(weight: Tensor) -> Tensor:
    """Kernels as matrices [t, kh kw i, o]."""
    return dense(weight.permute(0, 3, 4, 2, 1))[0].flatten(1, 3).expand(weight.shape[0], -1, -1)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """The products of two stacks of matrices."""
    if rounds_products():
        return torch.bmm(a.bfloat16(), b.bfloat16()).to(a.dtype)
    return torch.bmm(a, b)


def dense(parameter: Tensor) -> tuple[Tensor, int]:
    """[t, …] dense, and the distance from one task's part to the next task's. If all tasks share one part (an expanded
    tensor), the result is [1, …], and the distance is 0."""
    if parameter.stride(0) == 0 and parameter.shape[0] > 1:
        return parameter[:1].contiguous(), 0
    return parameter.contiguous(), parameter.shape[1:].numel()


# Norms


def norm(x: Tensor, weight: Tensor, bias: Tensor, slope: float, measured: int, epsilon: float) -> Tensor:
    """Batch norm with a leaky ReLU behind it, by its definition: differentiable any number of times. Its statistics are
    those of the first `measured` samples."""
    variance, mean = torch.var_mean(x[:, :measured], dim=(1, 2, 3), correction=0, keepdim=True)
    scale = weight[:, None, None, None] * torch.rsqrt(variance + epsilon)
    z = (x - mean) * scale + bias[:, None, None, None]
    return z if slope == 1 else F.leaky_relu(z, slope)


# Sums of tasks


def sum_rows(x: Tensor) -> Tensor:
    """The sum of rows [r, …], in pairs: neighbours first, then pairs of pairs."""
    while len(x) > 1:
        x = in_pairs(x)
    return x[0]


def in_pairs(values: Tensor) -> Tensor:
    """The sums of neighbours; of an odd number, the last one as it is."""
    even = len(values) // 2 * 2
    pairs = values[0:even:2] + values[1:even:2]
    return pairs if even == len(values) else torch.cat([pairs, values[even:]])


# Attention: the heads are the first dimension of q, k and v, which are dense; kernels/attention.c has the equations

BLOCK_NUMBERS = {"cpu": 1 << 16, "cuda": 1 << 26}  # weights that are computed at once, by device


class Mask(NamedTuple):
    """What is added to the scores: `added` [masks, n or 1, m] or None; head h of all heads has mask
    (h // every) % masks."""

    added: Tensor | None
    every: int = 1


def attention_written_out(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, every: int, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ + mask) V, differentiable any number of times; it keeps the weights of all heads."""
    mask = _of_heads(Mask(added, every), slice(0, len(q)), slice(0, q.shape[1]))
    return _softmax(scale * (q @ k.transpose(1, 2)), mask) @ v


def _of_heads(mask: Mask, heads: slice, rows: slice) -> Tensor | None:
    if mask.added is None:
        return None
    places = torch.arange(heads.start, heads.stop, device=mask.added.device) // mask.every % len(mask.added)
    return mask.added[places, rows if mask.added.shape[1] > 1 else slice(None)]


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores.softmax(dim=2)
    hidden = (mask == -math.inf).all(dim=2, keepdim=True)
    return torch.where(hidden, 0.0, torch.where(hidden, 0.0, scores + mask).softmax(dim=2))


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and rows whose weights are computed at once."""
    heads, rows, room = len(q), q.shape[1], BLOCK_NUMBERS[q.device.type]
    some = max(1, min(rows, room // k.shape[1]))
    several = max(1, room // (some * k.shape[1]))
    for head in range(0, heads, several):
        for row in range(0, rows, some):
            yield slice(head, min(head + several, heads)), slice(row, min(row + some, rows))


def _weights(mask: Mask, scale: float, q: Tensor, k: Tensor, h: slice, r: slice) -> Tensor:
    return _softmax(scale * (q[h, r] @ k[h].transpose(1, 2)), _of_heads(mask, h, r))


def _centred(x: Tensor, p: Tensor) -> Tensor:
    """In place: x less its mean under the weights."""
    return x.sub_(torch.linalg.vecdot(x, p).unsqueeze(2))


def attention(mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    o = q.new_empty(*q.shape[:2], v.shape[2])
    for h, r in _blocks(q, k):
        o[h, r] = _weights(mask, scale, q, k, h, r) @ v[h]
    return (o,)


def attention_backward(mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    gq, gk, gv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for h, r in _blocks(q, k):
        p = _weights(mask, scale, q, k, h, r)
        slope = _centred(u[h, r] @ v[h].transpose(1, 2), p).mul_(p).mul_(scale)
        gq[h, r] = slope @ k[h]
        gk[h].baddbmm_(slope.transpose(1, 2), q[h, r])
        gv[h].baddbmm_(p.transpose(1, 2), u[h, r])
    return gq, gk, gv


def attention_second(
    mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, u: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, ...]:
    gq, gk, gv, gu = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.empty_like(u)
    for h, r in _blocks(q, k):
        p = _weights(mask, scale, q, k, h, r)
        x = _centred(u[h, r] @ v[h].transpose(1, 2), p)
        t = (a[h, r] @ k[h].transpose(1, 2)).baddbmm_(q[h, r], b[h].transpose(1, 2)).mul_(scale)
        t = _centred(t, p)
        y = _centred((t * x).baddbmm_(u[h, r], c[h].transpose(1, 2)), p).mul_(p).mul_(scale)
        x, t = x.mul_(p).mul_(scale), t.mul_(p)
        gq[h, r] = (y @ k[h]).baddbmm_(x, b[h])
        gk[h].baddbmm_(y.transpose(1, 2), q[h, r]).baddbmm_(x.transpose(1, 2), a[h, r])
        gv[h].baddbmm_(t.transpose(1, 2), u[h, r])
        gu[h, r] = (t @ v[h]).baddbmm_(p, c[h])
    return gq, gk, gv, gu


ATTENTION: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    function.__name__: function for function in (attention, attention_backward, attention_second)
}
