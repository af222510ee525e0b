"""Batch norm with a leaky ReLU behind it, and its first and second derivatives, in Triton.

The formulas are those of `kernels/norm.c`, whose names these kernels have. A program computes `BC` channels of one
task, `BR` rows at once; where all rows are one block (`ONE`), it reads every number once.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(x, from_, r, c, rows, C: tl.constexpr):
    """Rows `from_` + r and channels c of x, and which of them there are."""
    row = from_ + r
    inside = (row < rows)[:, None] & (c < C)[None, :]
    return row[:, None] * C + c[None, :], inside


@triton.jit
def _steep(z, slope):
    """1 where z > 0, else the slope."""
    return tl.where(z > 0, 1.0, slope)


@triton.jit
def norm(
    x, scale, shift, mean, rstd, y, x_step, scale_step, stat_step, y_step, rows, measured, epsilon, slope,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.arange(0, BR)
    some = c < C
    x += task * x_step
    y += task * y_step
    at, inside = _tile(x, 0, r, c, rows, C)
    value = tl.load(x + at, mask=inside, other=0.0)
    sums = tl.zeros((BR, BC), tl.float32)
    for from_ in range(0, measured, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            value = tl.load(x + at, mask=inside, other=0.0)
        sums += tl.where((from_ + r < measured)[:, None], value, 0.0)
    center = tl.sum(sums, axis=0) / measured
    squares = tl.zeros((BR, BC), tl.float32)
    for from_ in range(0, measured, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            value = tl.load(x + at, mask=inside, other=0.0)
        away = tl.where((from_ + r < measured)[:, None], value - center[None, :], 0.0)
        squares += away * away
    root = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / measured + epsilon)
    tl.store(mean + task * stat_step + c, center, mask=some)
    tl.store(rstd + task * stat_step + c, root, mask=some)
    slant = tl.load(scale + task * scale_step + c, mask=some, other=0.0) * root
    beta = tl.load(shift + task * scale_step + c, mask=some, other=0.0)
    for from_ in range(0, rows, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            value = tl.load(x + at, mask=inside, other=0.0)
        z = (value - center[None, :]) * slant[None, :] + beta[None, :]
        tl.store(y + at, z * _steep(z, slope), mask=inside)


@triton.jit
def norm_backward(
    gy, x, scale, shift, mean, rstd, moved, gx, g_scale, g_shift, gy_step, x_step, scale_step, stat_step, moved_step,
    gx_step, g_step, rows, measured, slope,
    C: tl.constexpr, ADD: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """With `ADD`, `moved` is added to gx, and what lies at g_scale to the gradient of γ."""
    task = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.arange(0, BR)
    some = c < C
    x += task * x_step
    gy += task * gy_step
    gx += task * gx_step
    moved += task * moved_step
    center = tl.load(mean + task * stat_step + c, mask=some, other=0.0)
    root = tl.load(rstd + task * stat_step + c, mask=some, other=0.0)
    slant = tl.load(scale + task * scale_step + c, mask=some, other=0.0) * root
    beta = tl.load(shift + task * scale_step + c, mask=some, other=0.0)
    at, inside = _tile(x, 0, r, c, rows, C)
    away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
    g = tl.load(gy + at, mask=inside, other=0.0) * _steep(away * slant[None, :] + beta[None, :], slope)
    sums = tl.zeros((BR, BC), tl.float32)
    sums_d = tl.zeros((BR, BC), tl.float32)
    for from_ in range(0, rows, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
            g = tl.load(gy + at, mask=inside, other=0.0) * _steep(away * slant[None, :] + beta[None, :], slope)
        sums += g
        sums_d += g * away
    total = tl.sum(sums, axis=0)
    of_scale = tl.sum(sums_d, axis=0) * root
    along = of_scale / measured * root
    before = of_scale
    if ADD:
        before = of_scale + tl.load(g_scale + task * g_step + c, mask=some, other=0.0)
    tl.store(g_scale + task * g_step + c, before, mask=some)
    tl.store(g_shift + task * g_step + c, total, mask=some)
    total = total / measured
    for from_ in range(0, rows, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
            g = tl.load(gy + at, mask=inside, other=0.0) * _steep(away * slant[None, :] + beta[None, :], slope)
        counts = (from_ + r < measured)[:, None]
        result = slant[None, :] * tl.where(counts, g - total[None, :] - away * along[None, :], g)
        if ADD:
            result += tl.load(moved + at, mask=inside, other=0.0)
        tl.store(gx + at, result, mask=inside)


@triton.jit
def norm_second(
    x, gy, v, v_scale, v_shift, scale, shift, mean, rstd, scale_gradient, shift_gradient, ggy, hx, h_scale, x_step,
    gy_step, v_step, direction_step, scale_step, stat_step, sums_step, ggy_step, hx_step, h_step, rows, measured, slope,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    r = tl.arange(0, BR)
    some = c < C
    x += task * x_step
    gy += task * gy_step
    v += task * v_step
    ggy += task * ggy_step
    hx += task * hx_step
    center = tl.load(mean + task * stat_step + c, mask=some, other=0.0)
    root = tl.load(rstd + task * stat_step + c, mask=some, other=0.0)
    slant = tl.load(scale + task * scale_step + c, mask=some, other=0.0) * root
    beta = tl.load(shift + task * scale_step + c, mask=some, other=0.0)
    at, inside = _tile(x, 0, r, c, rows, C)
    away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
    w = tl.load(v + at, mask=inside, other=0.0)
    steep = _steep(away * slant[None, :] + beta[None, :], slope)
    g = tl.load(gy + at, mask=inside, other=0.0) * steep
    sums = tl.zeros((BR, BC), tl.float32)
    sums_d = tl.zeros((BR, BC), tl.float32)
    sums_g = tl.zeros((BR, BC), tl.float32)
    for from_ in range(0, rows, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
            w = tl.load(v + at, mask=inside, other=0.0)
            steep = _steep(away * slant[None, :] + beta[None, :], slope)
            g = tl.load(gy + at, mask=inside, other=0.0) * steep
        of_measured = tl.where((from_ + r < measured)[:, None], w, 0.0)
        sums += of_measured
        sums_d += of_measured * away
        sums_g += w * g
    S = tl.load(scale_gradient + task * sums_step + c, mask=some, other=0.0) / measured
    G = tl.load(shift_gradient + task * sums_step + c, mask=some, other=0.0) / measured
    V = tl.sum(sums, axis=0) / measured
    U = tl.sum(sums_d, axis=0) * root / measured
    D = tl.sum(sums_g, axis=0) / measured - V * G - U * S
    by_g = tl.load(v_scale + task * direction_step + c, mask=some, other=0.0) - slant * U
    by_v = slant * S
    tl.store(h_scale + task * h_step + c, D * root * measured, mask=some)
    g_d = by_g * root
    g_1 = tl.load(v_shift + task * direction_step + c, mask=some, other=0.0) - slant * V
    h_g = root * by_g
    h_v = root * by_v
    h_d = root * root * (by_g * S - by_v * U + slant * D)
    h_1 = root * (by_g * G - by_v * V)
    for from_ in range(0, rows, BR):
        if not ONE:
            at, inside = _tile(x, from_, r, c, rows, C)
            away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
            w = tl.load(v + at, mask=inside, other=0.0)
            steep = _steep(away * slant[None, :] + beta[None, :], slope)
            g = tl.load(gy + at, mask=inside, other=0.0) * steep
        counts = (from_ + r < measured)[:, None]
        tl.store(ggy + at, steep * (slant[None, :] * w + g_d[None, :] * away + g_1[None, :]), mask=inside)
        pull = tl.where(counts, h_v[None, :] * w + h_d[None, :] * away + h_1[None, :], 0.0)
        tl.store(hx + at, h_g[None, :] * g - pull, mask=inside)
