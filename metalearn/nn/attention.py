"""A transformer over the samples of a task, which are a set: their order changes nothing.

The first `known` samples of a task, its support set, attend to each other. Every other sample attends to them and to
itself, so its outputs depend on no other query. All tasks share the weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.nn.layers import shared_linear
from metalearn.nn.precision import rounds_products

Params = dict[str, Tensor]

EXPANSION = 4
"""The width of a block's MLP, in widths of the transformer."""


def attention(queries: Tensor, keys: Tensor, values: Tensor, known: int) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, equation 1) over the known samples.

    Args:
        queries, keys, values: [t, h, n, d], for h heads of d numbers.
        known: how many samples, the first of the n, all samples attend to.

    Returns:
        [t, h, n, d]. Time and memory grow as n · known.
    """
    to_known = queries @ keys[:, :, :known].transpose(2, 3)
    to_itself = (queries * keys)[:, :, known:].sum(dim=3, keepdim=True)
    among_known = to_itself.new_full((*queries.shape[:2], known, 1), -math.inf)  # a known sample must not count twice
    scores = torch.cat([to_known, torch.cat([among_known, to_itself], dim=2)], dim=3)
    weights = (scores / math.sqrt(queries.shape[3])).softmax(dim=3)
    return weights[..., :known] @ values[:, :, :known] + weights[..., known:] * values


def transformer(params: Params, x: Tensor, *, known: int, heads: int, layers: int) -> Tensor:
    """Pre-norm blocks (Xiong et al. 2020, arXiv 2002.04745, figure 1b) of attention and an MLP with GELU; a last norm.

    Args:
        params: as `draw_transformer` draws them.
        x: the samples [t, n, width].
        known: as for `attention`.
        heads: heads of the attention; they divide the width.
        layers: the number of blocks.

    Returns:
        [t, n, width].
    """

    def by_head(part: Tensor) -> Tensor:
        return part.view(*part.shape[:2], heads, -1).transpose(1, 2)

    for number in range(layers):
        block = f"block{number}"
        h = shared_linear(_norm(params, f"{block}.norm1", x), params[f"{block}.attention.in"])
        queries, keys, values = map(by_head, h.chunk(3, dim=2))
        mixed = attention(queries, keys, values, known).transpose(1, 2).flatten(2)
        x = x + shared_linear(mixed, params[f"{block}.attention.out"])
        h = _norm(params, f"{block}.norm2", x)
        h = F.gelu(shared_linear(h, params[f"{block}.mlp.in.weight"], params[f"{block}.mlp.in.bias"]))
        x = x + shared_linear(h, params[f"{block}.mlp.out.weight"], params[f"{block}.mlp.out.bias"])
    return _norm(params, "norm", x)


def draw_transformer(width: int, layers: int, generator: Generator) -> Params:
    """Parameters for `transformer`. A product keeps the variance of its inputs; the products that are added to the
    samples are smaller by √(2 · layers), so that the sum of all blocks does so too (as in GPT-2). The attention has no
    biases: that of the keys would change nothing."""
    params: Params = {}

    def draw(name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        params[name] = torch.empty(outputs, inputs).normal_(0, gain / math.sqrt(inputs), generator=generator)

    inner, added = EXPANSION * width, 1 / math.sqrt(2 * max(layers, 1))
    for number in range(layers):
        block = f"block{number}"
        params |= _draw_norm(f"{block}.norm1", width)
        draw(f"{block}.attention.in", 3 * width, width)
        params[f"{block}.attention.in"][width : 2 * width] = params[f"{block}.attention.in"][:width]
        draw(f"{block}.attention.out", width, width, added)
        params |= _draw_norm(f"{block}.norm2", width)
        draw(f"{block}.mlp.in.weight", inner, width)
        params[f"{block}.mlp.in.bias"] = torch.zeros(inner)
        draw(f"{block}.mlp.out.weight", width, inner, added)
        params[f"{block}.mlp.out.bias"] = torch.zeros(width)
    return params | _draw_norm("norm", width)


def _norm(params: Params, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"])


def _draw_norm(name: str, width: int) -> Params:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def products_attention(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, hidden: Tensor | None = None
) -> Tensor:
    """Attention [..., n, e] of `queries` [..., n, e] to `keys` and `values` [..., m, e], and to one more key and value
    that are zero: torch.nn.MultiheadAttention's `add_zero_attn`. Without it the weights sum to 1 whatever m is, and no
    sample could tell how many there are. Leading dimensions are alike; `heads` divide e. Keys that are
    `hidden` [b, m] have no weight; b is the product of the leading dimensions.

    By plain products: for short sequences on a CPU, torch's fused attention is as slow or slower, above all backwards
    in bfloat16, and it has no second derivative.
    """
    width = queries.shape[-1] // heads
    q, k, v = (value.flatten(0, -3).unflatten(2, (heads, width)).transpose(1, 2) for value in (queries, keys, values))
    k, v = (F.pad(value, (0, 0, 0, 1)) for value in (k, v))
    scores = product(q * width**-0.5, k.transpose(2, 3))
    if hidden is not None:
        scores = scores.masked_fill(F.pad(hidden, (0, 1))[:, None, None], -math.inf)
    return product(scores.softmax(dim=3), v).transpose(1, 2).reshape(queries.shape)


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a` @ `b`, whose operands are rounded to bfloat16 with `precision=bf16`; sums are float32 all the same."""
    return (a.bfloat16() @ b.bfloat16()).to(a.dtype) if rounds_products() else a @ b
