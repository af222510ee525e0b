"""Torch's scaled dot-product attention, with first and second derivatives that keep no weights of whole heads.

Torch's fused kernels have no second derivative, and its plain way keeps about eight matrices [n, m] of every head for
it. Here the inputs alone are kept, and each derivative computes the weights again, some rows at a time, as Dao et al.
2022 (arXiv 2205.14135) do for the first one. So the memory grows as n + m. kernels/attention.c has the equations.

`second_order_attention()` puts it in the place of torch's function in networks that anybody wrote.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.func import vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from metalearn.nn.native import Kernels, compiled_for

BLOCK_NUMBERS = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Weights that torch's operations compute at once, by device."""


class Mask(NamedTuple):
    """What is added to the scores: `added` [masks, n or 1, m] or None; head h of all heads has mask
    (h // every) % masks."""

    added: Tensor | None
    every: int = 1


_wanted: ContextVar[bool] = ContextVar("second_order_attention", default=False)
torchs_attention = F.scaled_dot_product_attention
_lock = threading.Lock()
_users = 0
"""Contexts of all threads that are open now."""
_plainly = ExitStack()
"""Torch's plain way, which is open while a context is: torch has one choice for all threads."""


@contextmanager
def plain_attention() -> Iterator[None]:
    """Within it, torch's own attention goes its plain way, in all threads; after the last, the way that it went before
    the first."""
    global _users
    with _lock:
        if not _users:
            _plainly.enter_context(sdpa_kernel(SDPBackend.MATH))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _plainly.close()
                F.scaled_dot_product_attention = torchs_attention


@contextmanager
def second_order_attention() -> Iterator[None]:
    """Within it, `F.scaled_dot_product_attention` has fast second derivatives, for this thread. What cannot be computed
    so (dropout, other types than float32 and float64, grouped heads) goes torch's plain way, and so does who has
    imported the function by its name."""
    # Torch's own layers call it by its module. A mode of torch does not reach it, where it lies in another function
    # that the mode has taken over.
    with plain_attention():
        F.scaled_dot_product_attention = _chosen
        token = _wanted.set(True)
        try:
            yield
        finally:
            _wanted.reset(token)


def _chosen(*args: Any, **kwargs: Any) -> Tensor:
    return (attention if _wanted.get() else torchs_attention)(*args, **kwargs)


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
    o: Tensor = _Attention.apply(q, k, v, *mask, scale)
    return o.view(*lead, *o.shape[-2:])


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether these can be computed here. What nobody can compute, torch's own function refuses."""
    kinds = {(part.dtype, part.device) for part in (query, key, value)}
    shapes = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.dim() > 2
    if len(kinds) > 1 or query.dtype not in (torch.float32, torch.float64) or query.device.type not in BLOCK_NUMBERS:
        return False
    if not shapes or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return False
    if mask is not None:
        rows = mask.shape[-2] if mask.dim() > 1 else 1
        same = mask.dtype in (torch.bool, query.dtype) and mask.device == query.device
        if not same or not 1 <= mask.dim() <= query.dim() or rows not in (1, query.shape[-2]):
            return False
    return all(part.numel() for part in (query, key, value))


def _mask_of(mask: Tensor | None, query: Tensor, shape: tuple[int, ...]) -> Mask:
    if mask is None:
        return Mask(None)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    own, lead = (1,) * (len(shape) - mask.dim()) + mask.shape, shape[:-2]
    differs = [place for place, size in enumerate(own[:-2]) if size > 1]
    first, last = (differs[0], differs[-1] + 1) if differs else (0, 0)
    added = mask.expand(*own[:first], *lead[first:last], *own[max(last, first) : -1], shape[-1])
    return Mask(added.reshape(-1, own[-2], shape[-1]).contiguous(), math.prod(lead[last:]) if differs else 1)


def _folded(function: Any, info: Any, in_dims: Any, *inputs: Any) -> Any:
    """A function under `torch.vmap`: the mapped dimension joins the heads."""
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
    results = function.apply(*parts, added, every, scale, *others)
    if isinstance(results, Tensor):
        return results.unflatten(0, (info.batch_size, -1)), 0
    return tuple(part.unflatten(0, (info.batch_size, -1)) for part in results), (0,) * len(results)


def _folds(function: Any) -> Any:
    function.vmap = staticmethod(functools.partial(_folded, function))
    return function


@_folds
class _Attention(Function):
    """(q, k, v, mask) → o. The heads are the first dimension of q, k and v, which are dense."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, every: int, scale: float) -> Tensor:
        return _computed("attention", Mask(added, every), scale, q, k, v)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.settings = inputs[4:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors
        if ctx.needs_input_grad[3]:  # a mask that learns has a gradient as large as the weights
            return (*vjp(lambda *inputs: _plain(*inputs, *ctx.settings), *saved)[1](grads[0]), None, None)
        return (*_Backward.apply(*saved, *ctx.settings, grads[0].contiguous()), None, None, None)


@_folds
class _Backward(Function):
    """(q, k, v, mask, gradient of o) → the gradients of q, k and v."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, every: int, scale: float, u: Tensor
    ) -> tuple[Tensor, ...]:
        return _computed("attention_backward", Mask(added, every), scale, q, k, v, u)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], inputs[6])
        ctx.settings = inputs[4:6]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, added, u = ctx.saved_tensors
        if ctx.needs_input_grad[3]:
            back = vjp(lambda *inputs: _plain_backward(*inputs, *ctx.settings), q, k, v, added, u)[1]
            *of_inputs, of_u = back(grads)
            return (*of_inputs, None, None, of_u)
        cotangents = (grad.contiguous() for grad in grads)
        *of_inputs, of_u = _Second.apply(q, k, v, added, *ctx.settings, u, *cotangents)
        return (*of_inputs, None, None, None, of_u)


@_folds
class _Second(Function):
    """The backward pass of `_Backward`: from the cotangents of its results to those of q, k, v and the gradient of
    o."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, every: int, scale: float, *others: Tensor
    ) -> tuple[Tensor, ...]:
        return _computed("attention_second", Mask(added, every), scale, q, k, v, *others)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *inputs[6:])
        ctx.settings = inputs[4:6]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Third and higher derivatives, by the definition: they need not be fast."""

        q, k, v, added, *others = ctx.saved_tensors

        def second(
            q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, u: Tensor, *cotangents: Tensor
        ) -> tuple[Tensor, ...]:
            back = vjp(lambda q, k, v, u: _plain_backward(q, k, v, added, u, *ctx.settings), q, k, v, u)[1]
            return tuple(back(cotangents))

        if ctx.needs_input_grad[3]:
            (of_q, of_k, of_v, of_added, *of_others) = vjp(second, *ctx.saved_tensors)[1](grads)
            return (of_q, of_k, of_v, of_added, None, None, *of_others)
        back = vjp(lambda q, k, v, *others: second(q, k, v, added, *others), q, k, v, *others)[1]
        (of_q, of_k, of_v, *of_others) = back(grads)
        return (of_q, of_k, of_v, None, None, None, *of_others)


# The definition


def _plain(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, every: int, scale: float) -> Tensor:
    scores = scale * (q @ k.transpose(1, 2))
    mask = _of_heads(Mask(added, every), slice(0, len(q)), slice(0, q.shape[1]))
    return _softmax(scores, mask) @ v


def _plain_backward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, u: Tensor, every: int, scale: float
) -> tuple[Tensor, ...]:
    return tuple(vjp(lambda q, k, v: _plain(q, k, v, added, every, scale), q, k, v)[1](u))


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


# By the kernels, or by torch's operations


def _computed(
    name: str, mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """The results of a function of attention.c."""
    kernels = compiled_for(q)
    if not isinstance(kernels, Kernels):
        return _BY_TORCH[name](mask, scale, q, k, v, *others)
    # With zeros, so that the last dimension is a multiple of the lanes.
    more = (-part.shape[-1] % kernels.lanes for part in (q, k, v, *others))
    filled = (F.pad(part, (0, n)) if n else part.contiguous() for part, n in zip((q, k, v, *others), more, strict=True))
    given = dict(zip("qkvuabc", filled, strict=False))
    if name == "attention":
        results, cut = {"o": q.new_empty(*q.shape[:2], given["v"].shape[2])}, [v]
    else:
        cut = [q, k, v, v][: 3 if name == "attention_backward" else 4]
        results = {f"g{part}": torch.zeros_like(given[part]) for part in "qkvu"[: len(cut)]}
    kernels.attention(name, mask.every, scale, mask=mask.added, **given, **results)
    return tuple(part[..., : like.shape[2]].contiguous() for part, like in zip(results.values(), cut, strict=True))


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


def _forward_by_torch(mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    o = q.new_empty(*q.shape[:2], v.shape[2])
    for h, r in _blocks(q, k):
        o[h, r] = _weights(mask, scale, q, k, h, r) @ v[h]
    return (o,)


def _backward_by_torch(mask: Mask, scale: float, q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    gq, gk, gv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for h, r in _blocks(q, k):
        p = _weights(mask, scale, q, k, h, r)
        slope = _centred(u[h, r] @ v[h].transpose(1, 2), p).mul_(p).mul_(scale)
        gq[h, r] = slope @ k[h]
        gk[h].baddbmm_(slope.transpose(1, 2), q[h, r])
        gv[h].baddbmm_(p.transpose(1, 2), u[h, r])
    return gq, gk, gv


def _second_by_torch(
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


_BY_TORCH: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "attention": _forward_by_torch,
    "attention_backward": _backward_by_torch,
    "attention_second": _second_by_torch,
}
