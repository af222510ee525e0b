"""A causal transformer over symbols, some of whose matrices may change while it reads.

Vaswani et al. 2017 (arXiv 1706.03762), section 3.1, with norms before each part, RMS norms (Zhang and Sennrich 2019),
rotary positions (Su et al. 2021, arXiv 2104.09864) and no biases. With a `window`, a symbol attends to that many,
itself among them (Beltagy et al. 2020, section 3.1).

A matrix [n, m] is shared by all documents, or has one value for each, [t, n, m].
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.errors import Invalid, counts
from metalearn.nn.attention import attention
from metalearn.types import Model, Params, Past, Reader

Part = tuple[int, str]  # the number of a block, and `attention` or `mlp`
DEVIATION = 0.5  # of the numbers of a symbol at the start


def decoder(
    *, vocabulary: int, width: int = 64, layers: int = 2, heads: int = 4, hidden: int = 256, window: int | None = 32
) -> Model:
    """A network that gives each symbol of a document a score for the next one. Raises ValueError for a number below 1,
    or heads that do not divide the width into even parts."""
    counts(vocabulary=vocabulary, width=width, layers=layers, heads=heads, hidden=hidden, window=window or 1)
    if width % (2 * heads):
        raise Invalid("width", width, f"must be a multiple of 2 · heads={2 * heads}", f"type KEY={2 * heads * 8}")
    parts: list[Part] = list(product(range(layers), ("attention", "mlp")))

    def init(generator: Generator) -> Params:
        def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.empty(rows, columns).normal_(0, scale / math.sqrt(rows), generator=generator)

        params = {"embed": torch.empty(vocabulary, width).normal_(0, DEVIATION, generator=generator)}
        deep = 1 / math.sqrt(2 * layers)  # what the blocks add keeps the size of a symbol's numbers (GPT-2)
        for i in range(layers):
            params |= {
                f"{i}.attention.norm": torch.ones(width), f"{i}.attention.in": matrix(width, 3 * width),
                f"{i}.attention.out": matrix(width, width, deep), f"{i}.mlp.norm": torch.ones(width),
                f"{i}.mlp.up": matrix(width, hidden), f"{i}.mlp.down": matrix(hidden, width, deep),
            }  # fmt: skip
        return params | {"norm": torch.ones(width), "head": matrix(width, vocabulary, 0.5)}

    def through(parts: Sequence[Part], params: Params, h: Tensor, past: Past, start: int) -> tuple[Tensor, Past]:
        """The numbers [t, n, width] after some parts, for symbols from place `start` on, and the new past."""
        kept = {}
        for i, kind in parts:
            name = f"{i}.{kind}"
            x = _normed(h, params[f"{name}.norm"])
            if kind == "mlp":
                h = h + F.gelu(x @ params[f"{name}.up"]) @ params[f"{name}.down"]
                continue
            split = (x @ params[f"{name}.in"]).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = _rotated(split[0], start), _rotated(split[1], start), split[2]
            if i in past:
                k, v = (torch.cat(pair, dim=2) for pair in zip(past[i], (k, v), strict=True))
            most = k.shape[2] if window is None else min(window - 1, k.shape[2])  # what later symbols may attend to
            kept[i] = (k[:, :, k.shape[2] - most :], v[:, :, v.shape[2] - most :])
            h = h + _attended(q, k, v, window).transpose(1, 2).flatten(2) @ params[f"{name}.out"]
        return h, kept

    def first_of_tail(blocks: int) -> int:
        if not 1 <= blocks <= layers:
            raise Invalid("blocks", blocks, f"must be from 1 to {layers}, the layers of the model", "type KEY=1")
        return parts.index((layers - blocks, "mlp"))

    def embedded(params: Params, x: Tensor) -> Tensor:
        table = params["embed"]
        symbols = x[..., 0].long()
        if table.dim() == 2:
            return table[symbols]
        return table.gather(1, symbols.unsqueeze(2).expand(-1, -1, width))

    def outputs(params: Params, h: Tensor) -> Tensor:
        return _normed(h, params["norm"]) @ params["head"]

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return outputs(params, through(parts, params, embedded(params, x), {}, 0)[0])

    def body(params: Params, x: Tensor, past: Past, start: int, blocks: int) -> tuple[Tensor, Past]:
        return through(parts[: first_of_tail(blocks)], params, embedded(params, x), past, start)

    def tail(params: Params, h: Tensor, past: Past, start: int, blocks: int) -> tuple[Tensor, Past]:
        h, past = through(parts[first_of_tail(blocks) :], params, h, past, start)
        return outputs(params, h), past

    def learns(blocks: int) -> tuple[str, ...]:
        first_of_tail(blocks)
        return tuple(f"{i}.mlp.{part}" for i in range(layers - blocks, layers) for part in ("up", "down"))

    reach = None if window is None else layers * (window - 1) + 1
    activations = layers * (8 * width + 2 * hidden) + 3 * vocabulary
    return Model(
        init, apply, transductive=False, activations=activations, reader=Reader(learns, body, tail, reach),
        headless="its last layer gives scores of symbols",
    )  # fmt: skip


def _normed(x: Tensor, gain: Tensor) -> Tensor:
    root = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
    return x * root * (gain if gain.dim() == 1 else gain.unsqueeze(1))


def _rotated(x: Tensor, start: int) -> Tensor:
    """Queries or keys [t, heads, n, d] turned by their places, from `start` on."""
    half = x.shape[-1] // 2
    places = torch.arange(start, start + x.shape[2], dtype=x.dtype, device=x.device)
    # Base 100, not 10,000: within a window of tens of symbols slower turns tell no places apart.
    angles = places[:, None] * 100.0 ** -(torch.arange(half, dtype=x.dtype, device=x.device) / half)
    (a, b), cos, sin = x.split(half, dim=-1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _attended(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of queries [t, heads, n, d] to keys [t, heads, m, d], of which the last belongs to the last query."""
    n, m = q.shape[2], k.shape[2]
    if window is None or n != m or n <= window:
        ahead = torch.arange(m, device=q.device) - torch.arange(m - n, m, device=q.device)[:, None]
        return attention(q, k, v, (ahead <= 0) & (ahead > -(window or m)))
    # Blocks of `window` queries, which see their own block and the one before: n · window pairs, not n².
    q, k, v = (F.pad(part, (0, 0, 0, -n % window)).unflatten(2, (-1, window)) for part in (q, k, v))
    k, v = (torch.cat([F.pad(part, (0, 0, 0, 0, 1, 0))[:, :, :-1], part], dim=3) for part in (k, v))
    place = torch.arange(2 * window, device=q.device)
    ahead = place - torch.arange(window, 2 * window, device=q.device)[:, None]
    seen = ((ahead <= 0) & (ahead > -window)).expand(q.shape[2], -1, -1).clone()
    seen[0] &= place >= window  # nothing is before the first block
    return attention(q, k, v, seen).flatten(2, 3)[:, :, :n]
