"""Attention: with fast second derivatives for networks of any kind, and a transformer over the samples of a task.

Torch's fused kernels for scaled dot-product attention have no second derivative, and its plain way keeps about eight
matrices [n, m] of every head for it. Here the inputs alone are kept, and each derivative computes the weights again,
some rows at a time, as Dao et al. 2022 (arXiv 2205.14135) do for the first one. So the memory grows as n + m.
`second_order_attention()` puts it in the place of torch's function.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.autograd import Function
from torch.func import vjp

from metalearn.nn.backends import kernels_for, torch_ops
from metalearn.nn.backends.torch_ops import Mask, attention_written_out
from metalearn.nn.layers import shared_linear
from metalearn.nn.surroundings import rounds_products

Params = dict[str, Tensor]

_replaced: ContextVar[dict[str, Any] | None] = ContextVar("second_order_attention", default=None)
torchs_attention = F.scaled_dot_product_attention
TORCHS: dict[str, Any] = {
    "scaled_dot_product_attention": torchs_attention, "hardsigmoid": F.hardsigmoid, "linear": F.linear,
    "embedding": F.embedding,
}  # fmt: skip
"""Torch's functions that `second_order_attention` can replace, as they were."""

_lock = threading.Lock()
_users = 0  # contexts of all threads that are open now
# Torch has one choice of its ways for all threads, which the first context to leave must not take from the others. So
# it may be put back in another thread, which torch's own `sdpa_kernel` does not allow from 2.15 on.
_before: list[bool] = []


def _choose(ways: Sequence[bool]) -> list[bool]:
    """Allows torch flash, memory-efficient, cuDNN's and plain attention, and whole layers at once, or not; returns what
    it was before. These layers have no derivative, and torch chooses them under vmap, where nothing requires one."""
    names = ("flash", "mem_efficient", "cudnn", "math")
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names]
    before.append(torch.backends.mha.get_fastpath_enabled())
    for name, way in zip(names, ways[:-1], strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(way)
    torch.backends.mha.set_fastpath_enabled(ways[-1])
    return before


@contextmanager
def plain_attention() -> Iterator[None]:
    """Within it, torch's own attention goes its plain way, in all threads; after the last, the way that it went before
    the first."""
    global _users
    with _lock:
        if not _users:
            _before[:] = _choose([False, False, False, True, False])
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _choose(_before)
                for name, function in TORCHS.items():
                    setattr(F, name, function)


@contextmanager
def second_order_attention(**others: Any) -> Iterator[None]:
    """Within it, `F.scaled_dot_product_attention` has fast second derivatives, for this thread, and `F.hardsigmoid`,
    which has none, gets them. What cannot be computed so (dropout, other types than float32 and float64, grouped heads)
    goes torch's plain way, and so do calls of the functions that were imported by their names. `others` take the place
    of `F.linear` and `F.embedding`."""
    # Not a mode of torch: it does not reach the function where it lies in another one that the mode has taken over.
    # Torch's own layers call it by its module, where it is replaced while any thread is in here; `_dispatched` sends
    # the calls of other threads on to torch's.
    with plain_attention():
        for name in TORCHS:
            setattr(F, name, partial(_dispatched, name))
        token = _replaced.set({"scaled_dot_product_attention": attention, "hardsigmoid": _hardsigmoid, **others})
        try:
            yield
        finally:
            _replaced.reset(token)


def _dispatched(name: str, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = (_replaced.get() or {}).get(name, TORCHS[name])(*args, **kwargs)
    return result


def _hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    return F.relu6(x + 3) / 6


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Torch's function of this name, with its arguments: softmax(scale · Q Kᵀ + mask) V, by rows.

    Args:
        query, key, value: [..., n, d], [..., m, d], [..., m, e].
        attn_mask: truth values, true where a query reads a key, or numbers that are added; it broadcasts to
            [..., n, m]. A row that is hidden whole gives 0.

    Returns:
        [..., n, e].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    fits = _fits(query, key, value, attn_mask) and scale > 0 and not (is_causal and attn_mask is not None)
    if not fits or dropout_p or enable_gqa or torch.compiler.is_exporting():
        return torchs_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    lead = query.shape[:-2]
    mask = _mask_of(attn_mask, query, (*lead, query.shape[-2], key.shape[-2]))
    q, k, v = (part.flatten(0, -3).contiguous() for part in (query, key, value))
    (o,) = _Attention.apply(q, k, v, *mask, scale)
    result: Tensor = o.view(*lead, *o.shape[-2:])
    return result


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether these can be computed here."""
    # No errors here: what does not fit goes to torch's own function, which refuses what cannot be computed at all.
    parts = query, key, value
    if len({(part.dtype, part.device) for part in parts}) > 1 or query.dtype not in (torch.float32, torch.float64):
        return False
    if query.device.type not in torch_ops.BLOCK_NUMBERS or query.dim() < 3 or not all(part.numel() for part in parts):
        return False
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return False
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return False
    if mask is None:
        return True
    same, rows = mask.dtype in (torch.bool, query.dtype), mask.shape[-2] if mask.dim() > 1 else 1
    return same and mask.device == query.device and 1 <= mask.dim() <= query.dim() and rows in (1, query.shape[-2])


def _mask_of(mask: Tensor | None, query: Tensor, shape: tuple[int, ...]) -> Mask:
    if mask is None:
        return Mask(None)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    sizes, lead = (1,) * (len(shape) - mask.dim()) + mask.shape, shape[:-2]
    differs = [place for place, size in enumerate(sizes[:-2]) if size > 1]
    first, last = (differs[0], differs[-1] + 1) if differs else (0, 0)
    added = mask.expand(*sizes[:first], *lead[first:last], *sizes[max(last, first) : -1], shape[-1])
    return Mask(added.reshape(-1, sizes[-2], shape[-1]).contiguous(), math.prod(lead[last:]) if differs else 1)


class _OfHeads(Function):
    """The function `name` of attention.c: of q, k, v, the mask, its settings and other tensors. The heads are the first
    dimension of all but the mask; these are dense. Under `torch.vmap`, the mapped dimension joins the heads."""

    name: str

    @classmethod
    def forward(
        cls, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, every: int, scale: float, *others: Tensor
    ) -> tuple[Tensor, ...]:
        return _computed(cls.name, Mask(added, every), scale, q, k, v, *others)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *inputs[6:])
        ctx.settings = inputs[4:6]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *inputs: Any) -> Any:
        added, every, scale = inputs[3:6]

        def folded(part: Tensor, dim: int | None) -> Tensor:
            whole = part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            return whole.flatten(0, 1).contiguous()

        parts = [folded(part, dim) for part, dim in zip(inputs[:3], in_dims[:3], strict=True)]
        others = [folded(part, dim) for part, dim in zip(inputs[6:], in_dims[6:], strict=True)]
        if added is not None and in_dims[3] is not None:
            added = added.movedim(in_dims[3], 0)
            times = len(parts[0]) // info.batch_size // (every * added.shape[1])
            added = added.unsqueeze(1).expand(-1, times, -1, -1, -1).flatten(0, 2).contiguous()
        results = cls.apply(*parts, added, every, scale, *others)
        return tuple(part.unflatten(0, (info.batch_size, -1)) for part in results), (0,) * len(results)


class _Attention(_OfHeads):
    """(q, k, v, mask) → o."""

    name = "attention"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.needs_input_grad[3]:  # a mask that learns has a gradient as large as the weights
            return _by_definition(lambda *inputs: (attention_written_out(*inputs, *ctx.settings),), ctx, grads)
        return (*_Backward.apply(*ctx.saved_tensors, *ctx.settings, grads[0].contiguous()), None, None, None)


class _Backward(_OfHeads):
    """(q, k, v, mask, gradient of o) → the gradients of q, k and v."""

    name = "attention_backward"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.needs_input_grad[3]:
            return _by_definition(lambda *inputs: _written_out_backward(*inputs, *ctx.settings), ctx, grads)
        *inputs, u = ctx.saved_tensors
        *of_inputs, of_u = _Second.apply(*inputs, *ctx.settings, u, *(grad.contiguous() for grad in grads))
        return (*of_inputs, None, None, None, of_u)


class _Second(_OfHeads):
    """The backward pass of `_Backward`: from the cotangents of its results to those of q, k, v and the gradient of
    o."""

    name = "attention_second"

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def second(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, u: Tensor, *cotangents: Tensor) -> Any:
            back = vjp(lambda q, k, v, u: _written_out_backward(q, k, v, added, u, *ctx.settings), q, k, v, u)[1]
            return back(cotangents)

        return _by_definition(second, ctx, grads)  # third and higher derivatives need not be fast


def _by_definition(function: Any, ctx: Any, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs of a function of q, k, v, the mask and others, whose results have the gradients
    `grads`."""
    q, k, v, added, *others = ctx.saved_tensors
    learns = ctx.needs_input_grad[3]

    def of(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Any:
        return function(q, k, v, *(rest if learns else (added, *rest)))

    of_q, of_k, of_v, *of_rest = vjp(of, q, k, v, *([added] if learns else []), *others)[1](grads)
    of_mask = of_rest.pop(0) if learns else None
    return (of_q, of_k, of_v, of_mask, None, None, *of_rest)


def _written_out_backward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, u: Tensor, every: int, scale: float
) -> tuple[Tensor, ...]:
    return tuple(vjp(lambda q, k, v: attention_written_out(q, k, v, added, every, scale), q, k, v)[1](u))


def _computed(
    name: str, mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """The results of a function of attention.c, or of its counterparts."""
    kernels = kernels_for(q)
    if kernels is None or max(q.shape[2], v.shape[2]) > kernels.widest_head:
        return torch_ops.ATTENTION[name](mask, scale, q, k, v, *others)
    # With zeros, so that the last dimension is a multiple of the lanes.
    more = (-part.shape[-1] % kernels.lanes for part in (q, k, v, *others))
    filled = (F.pad(part, (0, n)) if n else part.contiguous() for part, n in zip((q, k, v, *others), more, strict=True))
    operands = dict(zip("qkvuabc", filled, strict=False))
    if name == "attention":
        results, cut = {"o": q.new_empty(*q.shape[:2], operands["v"].shape[2])}, [v]
    else:
        cut = [q, k, v, v][: 3 if name == "attention_backward" else 4]
        results = {f"g{part}": torch.zeros_like(operands[part]) for part in "qkvu"[: len(cut)]}
    kernels.attention(name, mask.every, scale, mask=mask.added, **operands, **results)
    return tuple(part[..., : like.shape[2]].contiguous() for part, like in zip(results.values(), cut, strict=True))


# A transformer over the samples of a task, which are a set: their order changes nothing. The first `context_size`
# samples, the support set, attend to each other; every other sample attends to them and to itself.

EXPANSION = 4  # the width of a block's MLP, in widths of the transformer


def set_attention(queries: Tensor, keys: Tensor, values: Tensor, context_size: int) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762, equation 1) to the first `context_size`
    samples: [t, h, n, d], for h heads of d numbers. Time and memory grow as n · context_size."""
    to_context = queries @ keys[:, :, :context_size].transpose(2, 3)
    to_itself = (queries * keys)[:, :, context_size:].sum(dim=3, keepdim=True)
    context_mask = to_itself.new_full((*queries.shape[:2], context_size, 1), -math.inf)  # a context sample counts once
    scores = torch.cat([to_context, torch.cat([context_mask, to_itself], dim=2)], dim=3)
    weights = (scores / math.sqrt(queries.shape[3])).softmax(dim=3)
    return weights[..., :context_size] @ values[:, :, :context_size] + weights[..., context_size:] * values


def transformer(params: Params, x: Tensor, *, context_size: int, heads: int, layers: int) -> Tensor:
    """Pre-norm blocks (Xiong et al. 2020, arXiv 2002.04745, figure 1b) of attention and an MLP with GELU; a last norm.
    Samples `x` [t, n, width] become [t, n, width]; `heads` divide the width. `params` are those of `draw_transformer`,
    `context_size` is that of `set_attention`."""
    for number in range(layers):
        block = f"block{number}"
        h = shared_linear(norm(params, f"{block}.norm1", x), params[f"{block}.attention.in"])
        queries, keys, values = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in h.chunk(3, dim=2))
        mixed = set_attention(queries, keys, values, context_size).transpose(1, 2).flatten(2)
        x = x + shared_linear(mixed, params[f"{block}.attention.out"])
        h = norm(params, f"{block}.norm2", x)
        h = F.gelu(shared_linear(h, params[f"{block}.mlp.in.weight"], params[f"{block}.mlp.in.bias"]))
        x = x + shared_linear(h, params[f"{block}.mlp.out.weight"], params[f"{block}.mlp.out.bias"])
    return norm(params, "norm", x)


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


def norm(params: Params, name: str, x: Tensor) -> Tensor:
    """Layer norm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params[f"{name}.bias"])


def _draw_norm(name: str, width: int) -> Params:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def products_attention(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, hidden: Tensor | None = None
) -> Tensor:
    """Attention [..., n, e] of `queries` [..., n, e] to `keys` and `values` [..., m, e], and to one more key and value
    that are zero: torch.nn.MultiheadAttention's `add_zero_attn`. Without it the weights sum to 1 whatever m is, and no
    sample could tell how many there are. Leading dimensions are alike; `heads` divide e. Keys that are
    `hidden` [b, m] have no weight; b is the product of the leading dimensions."""
    # By plain products: for short sequences on a CPU, torch's fused attention is as slow or slower, above all backwards
    # in bfloat16, and it has no second derivative.
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
