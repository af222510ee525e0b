"""Attention on a GPU, in Triton, with its first and second derivatives. `triton_ops.py` starts the kernels.

The equations and their names are those of `kernels/attention.c`. The weights of a head are computed by tiles in each
kernel and never stored (Dao et al. 2022, arXiv 2205.14135), so memory grows as n + m. A program has a few rows of one
head and goes over all its columns in order, or the other way round: every sum has one order, and no other program adds
to it. `SECOND` says which derivative a kernel computes.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(x, at, column, count, WIDTH: tl.constexpr):
    """Rows `at` and some columns of a matrix [count, WIDTH], with zeros behind its last ones."""
    inside = (at < count)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + at[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(x, at, column, values, count, WIDTH: tl.constexpr):
    inside = (at < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(x + at[:, None] * WIDTH + column[None, :], values, mask=inside)


@triton.jit
def _masked(s, mask, i, j, n, m, mask_step, MASKED: tl.constexpr):
    """A tile of S with its mask; −∞ behind the last key."""
    if MASKED:
        inside = (i < n)[:, None] & (j < m)[None, :]
        s += tl.load(mask + i.to(tl.int64)[:, None] * mask_step + j[None, :], mask=inside, other=0.0)
    return tl.where((j < m)[None, :], s, float("-inf"))


@triton.jit
def _raised(s, most):
    """The largest score of each row so far, and what to subtract: 0 where every score is −∞."""
    most = tl.maximum(most, tl.max(s, axis=1))
    return most, tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def _tiles(
    q, k, v, mask, u, a, b, c, i, j, n, m, mask_step, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, MASKED: tl.constexpr,
    SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles of S, and of X, T and u cᵀ before their means are taken off; the first derivative needs S and X alone."""
    # BK columns at a time: whole rows of seven matrices do not fit the registers.
    s = tl.zeros((BM, BN), tl.float32)
    x = tl.zeros((BM, BN), tl.float32)
    t = tl.zeros((BM, BN), tl.float32)
    w = tl.zeros((BM, BN), tl.float32)
    for first in range(0, WIDE_D, BK):
        column = first + tl.arange(0, BK)
        qi = _rows(q, i, column, n, D)
        kj = tl.trans(_rows(k, j, column, m, D))
        s = tl.dot(qi, kj, s, input_precision=PRECISION)
        if SECOND:
            t = tl.dot(_rows(a, i, column, n, D), kj, t, input_precision=PRECISION)
            t = tl.dot(qi, tl.trans(_rows(b, j, column, m, D)), t, input_precision=PRECISION)
    for first in range(0, WIDE_E, BK):
        column = first + tl.arange(0, BK)
        ui = _rows(u, i, column, n, E)
        x = tl.dot(ui, tl.trans(_rows(v, j, column, m, E)), x, input_precision=PRECISION)
        if SECOND:
            w = tl.dot(ui, tl.trans(_rows(c, j, column, m, E)), w, input_precision=PRECISION)
    return _masked(s * scale, mask, i, j, n, m, mask_step, MASKED), x, t * scale, w


@triton.jit
def _of_head(q, k, v, u, a, b, c, mask, head, n, m, masks, every, mask_size, D: tl.constexpr, E: tl.constexpr):
    """Where the matrices of a head begin; a, b and c have the shapes of q, k and v."""
    q_at = head * n * D
    k_at = head * m * D
    v_at = head * m * E
    mask += head // every % masks * mask_size
    return q + q_at, k + k_at, v + v_at, u + head * n * E, a + q_at, b + k_at, c + v_at, mask


@triton.jit
def attention(
    q, k, v, mask, o, n, m, masks, every, mask_size, mask_step, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, MASKED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o [heads, n, E]."""
    blocks = tl.cdiv(n, BM)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    d = tl.arange(0, WIDE_D)
    e = tl.arange(0, WIDE_E)
    mask += head // every % masks * mask_size
    qi = _rows(q + head * n * D, i, d, n, D)
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, WIDE_E), tl.float32)
    for first in range(0, m, BN):
        j = first + tl.arange(0, BN)
        kj = _rows(k + head * m * D, j, d, m, D)
        s = tl.dot(qi, tl.trans(kj), input_precision=PRECISION) * scale
        s = _masked(s, mask, i, j, n, m, mask_step, MASKED)
        before = most
        most, shift = _raised(s, most)
        keep = tl.exp(before - shift)
        p = tl.exp(s - shift[:, None])
        total = total * keep + tl.sum(p, axis=1)
        vj = _rows(v + head * m * E, j, e, m, E)
        acc = tl.dot(p, vj, acc * keep[:, None], input_precision=PRECISION)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # 0 where the mask hides a row whole
    _store_rows(o + head * n * E, i, e, acc, n, E)


@triton.jit
def attention_rows(
    q, k, v, mask, u, a, b, c, sums, gq, gu, n, m, masks, every, mask_size, mask_step, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, MASKED: tl.constexpr,
    SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gq, and with `SECOND` gu; and for `attention_columns` the sums [4, heads, n]: the log-sum-exp of S, and the means
    of X, T and Y. Means of parts are put together as those of `norm` are: T ∘ X is a covariance, and would cancel."""
    blocks = tl.cdiv(n, BM)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    d = tl.arange(0, WIDE_D)
    e = tl.arange(0, WIDE_E)
    of_a_sum = (tl.num_programs(0) // blocks).to(tl.int64) * n
    sums += head * n
    q, k, v, u, a, b, c, mask = _of_head(
        q, k, v, u, a, b, c, mask, head, n, m, masks, every, mask_size, D, E
    )  # fmt: skip
    most = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mean_x = tl.zeros((BM,), tl.float32)
    mean_t = tl.zeros((BM,), tl.float32)
    mean_y = tl.zeros((BM,), tl.float32)
    for first in range(0, m, BN):
        s, x, t, w = _tiles(
            q, k, v, mask, u, a, b, c, i, first + tl.arange(0, BN), n, m, mask_step, scale,
            D, E, WIDE_D, WIDE_E, MASKED, SECOND, BM, BN, BK, PRECISION,
        )  # fmt: skip
        before = most
        most, shift = _raised(s, most)
        p = tl.exp(s - shift[:, None])
        here = tl.sum(p, axis=1)
        total = total * tl.exp(before - shift) + here
        p = p / tl.where(here == 0, 1.0, here)[:, None]
        share = here / tl.where(total == 0, 1.0, total)
        of_x = tl.sum(p * x, axis=1)
        more_x = of_x - mean_x
        mean_x += share * more_x
        if SECOND:
            of_t = tl.sum(p * t, axis=1)
            more_t = of_t - mean_t
            mean_t += share * more_t
            of_y = tl.sum(p * ((t - of_t[:, None]) * (x - of_x[:, None]) + w), axis=1)
            mean_y += share * (of_y - mean_y + (1 - share) * more_x * more_t)
    # Of a row that the mask hides whole, exp(S − ∞) are the weights: 0.
    log_sum = tl.where(total == 0, float("inf"), most + tl.log(tl.where(total == 0, 1.0, total)))
    tl.store(sums + i, log_sum, mask=i < n)
    tl.store(sums + of_a_sum + i, mean_x, mask=i < n)
    if SECOND:
        tl.store(sums + 2 * of_a_sum + i, mean_t, mask=i < n)
        tl.store(sums + 3 * of_a_sum + i, mean_y, mask=i < n)
    of_q = tl.zeros((BM, WIDE_D), tl.float32)
    of_u = tl.zeros((BM, WIDE_E), tl.float32)
    for first in range(0, m, BN):
        j = first + tl.arange(0, BN)
        s, x, t, w = _tiles(
            q, k, v, mask, u, a, b, c, i, j, n, m, mask_step, scale,
            D, E, WIDE_D, WIDE_E, MASKED, SECOND, BM, BN, BK, PRECISION,
        )  # fmt: skip
        p = tl.exp(s - log_sum[:, None])
        x = p * (x - mean_x[:, None])
        if SECOND:
            t -= mean_t[:, None]
            y = t * x + p * (w - mean_y[:, None])
            of_q = tl.dot(y, _rows(k, j, d, m, D), of_q, input_precision=PRECISION)
            of_q = tl.dot(x, _rows(b, j, d, m, D), of_q, input_precision=PRECISION)
            of_u = tl.dot(p * t, _rows(v, j, e, m, E), of_u, input_precision=PRECISION)
            of_u = tl.dot(p, _rows(c, j, e, m, E), of_u, input_precision=PRECISION)
        else:
            of_q = tl.dot(x, _rows(k, j, d, m, D), of_q, input_precision=PRECISION)
    _store_rows(gq + head * n * D, i, d, of_q * scale, n, D)
    if SECOND:
        _store_rows(gu + head * n * E, i, e, of_u, n, E)


@triton.jit
def attention_columns(
    q, k, v, mask, u, a, b, c, sums, gk, gv, n, m, masks, every, mask_size, mask_step, scale,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, MASKED: tl.constexpr,
    SECOND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gk and gv, from what `attention_rows` has summed."""
    blocks = tl.cdiv(m, BN)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    j = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    d = tl.arange(0, WIDE_D)
    e = tl.arange(0, WIDE_E)
    of_a_sum = (tl.num_programs(0) // blocks).to(tl.int64) * n
    sums += head * n
    q, k, v, u, a, b, c, mask = _of_head(
        q, k, v, u, a, b, c, mask, head, n, m, masks, every, mask_size, D, E
    )  # fmt: skip
    of_k = tl.zeros((BN, WIDE_D), tl.float32)
    of_v = tl.zeros((BN, WIDE_E), tl.float32)
    for first in range(0, n, BM):
        i = first + tl.arange(0, BM)
        s, x, t, w = _tiles(
            q, k, v, mask, u, a, b, c, i, j, n, m, mask_step, scale,
            D, E, WIDE_D, WIDE_E, MASKED, SECOND, BM, BN, BK, PRECISION,
        )  # fmt: skip
        p = tl.exp(s - tl.load(sums + i, mask=i < n, other=float("inf"))[:, None])
        x = p * (x - tl.load(sums + of_a_sum + i, mask=i < n, other=0.0)[:, None])
        ui = _rows(u, i, e, n, E)
        if SECOND:
            t -= tl.load(sums + 2 * of_a_sum + i, mask=i < n, other=0.0)[:, None]
            y = t * x + p * (w - tl.load(sums + 3 * of_a_sum + i, mask=i < n, other=0.0)[:, None])
            of_k = tl.dot(tl.trans(y), _rows(q, i, d, n, D), of_k, input_precision=PRECISION)
            of_k = tl.dot(tl.trans(x), _rows(a, i, d, n, D), of_k, input_precision=PRECISION)
            of_v = tl.dot(tl.trans(p * t), ui, of_v, input_precision=PRECISION)
        else:
            of_k = tl.dot(tl.trans(x), _rows(q, i, d, n, D), of_k, input_precision=PRECISION)
            of_v = tl.dot(tl.trans(p), ui, of_v, input_precision=PRECISION)
    _store_rows(gk + head * m * D, j, d, of_k * scale, m, D)
    _store_rows(gv + head * m * E, j, e, of_v, m, E)
