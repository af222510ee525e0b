"""Batch norm with a leaky ReLU behind it, and its first and second derivatives, in Triton.

The formulas are those of `kernels/norm.c`, whose names these kernels have. Where all rows of a task fit one program
(`STAGE` 0), it computes all. Else programs share the rows, `SPAN` each: in a first launch (1) they sum up their own
rows, in a second one (2) every program adds these sums up, always in the same order, and computes its rows.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(from_, r, c, rows, C: tl.constexpr):
    """Rows `from_` + r and channels c: their places, and which of them there are."""
    row = from_ + r
    return row[:, None] * C + c[None, :], (row < rows)[:, None] & (c < C)[None, :]


@triton.jit
def _parts(parts, which, c, count, SUMS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """The sums number `which` of all programs, [PARTS, BC]."""
    b = tl.arange(0, PARTS)
    at = parts + (b * SUMS + which)[:, None] * C + c[None, :]
    return tl.load(at, mask=(b < count)[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def _steep(z, slope):
    """1 where z > 0, else the slope."""
    return tl.where(z > 0, 1.0, slope)


@triton.jit
def _statistics(scale, shift, mean, rstd, task, c, some, scale_step, stat_step):
    """Of some channels the mean, 1 / the deviation, γ / the deviation, and β."""
    center = tl.load(mean + task * stat_step + c, mask=some, other=0.0)
    root = tl.load(rstd + task * stat_step + c, mask=some, other=0.0)
    slant = tl.load(scale + task * scale_step + c, mask=some, other=0.0) * root
    return center, root, slant, tl.load(shift + task * scale_step + c, mask=some, other=0.0)


@triton.jit
def _slopes(x, gy, at, inside, center, slant, beta, slope):
    """Of a tile x − mean, the slope of the activation, and gy times that slope."""
    away = tl.load(x + at, mask=inside, other=0.0) - center[None, :]
    steep = _steep(away * slant[None, :] + beta[None, :], slope)
    return away, steep, tl.load(gy + at, mask=inside, other=0.0) * steep


@triton.jit
def norm(
    x, scale, shift, parts, mean, rstd, y, x_step, scale_step, stat_step, y_step, rows, measured, epsilon, slope, count,
    C: tl.constexpr, STAGE: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Mean and variance are put together from those of parts (Chan, Golub and LeVeque 1979, equations 2.1)."""
    task = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * SPAN
    r = tl.arange(0, BR)
    some = c < C
    x += task * x_step
    y += task * y_step
    parts += task * count * 2 * C
    if STAGE < 2:
        own = tl.minimum(tl.maximum(measured - first, 0), SPAN)
        sums = tl.zeros((BR, BC), tl.float32)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, measured, C)
            sums += tl.load(x + at, mask=inside, other=0.0)
        center = tl.sum(sums, axis=0) / tl.maximum(own, 1)
        squares = tl.zeros((BR, BC), tl.float32)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, measured, C)
            away = tl.where(inside, tl.load(x + at, mask=inside, other=0.0) - center[None, :], 0.0)
            squares += away * away
        spread = tl.sum(squares, axis=0)
        if STAGE == 1:
            to = parts + tl.program_id(0) * 2 * C + c
            tl.store(to, center, mask=some)
            tl.store(to + C, spread, mask=some)
    else:
        means = _parts(parts, 0, c, count, 2, C, PARTS)
        owns = tl.minimum(tl.maximum(measured - tl.arange(0, PARTS) * SPAN, 0), SPAN)[:, None]
        center = tl.sum(means * owns, axis=0) / measured
        gap = means - center[None, :]
        spread = tl.sum(_parts(parts, 1, c, count, 2, C, PARTS) + gap * gap * owns, axis=0)
    if STAGE != 1:
        root = 1.0 / tl.sqrt_rn(spread / measured + epsilon)
        tl.store(mean + task * stat_step + c, center, mask=some & (first == 0))
        tl.store(rstd + task * stat_step + c, root, mask=some & (first == 0))
        slant = tl.load(scale + task * scale_step + c, mask=some, other=0.0) * root
        beta = tl.load(shift + task * scale_step + c, mask=some, other=0.0)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, rows, C)
            z = (tl.load(x + at, mask=inside, other=0.0) - center[None, :]) * slant[None, :] + beta[None, :]
            tl.store(y + at, z * _steep(z, slope), mask=inside)


@triton.jit
def norm_backward(
    gy, x, scale, shift, mean, rstd, moved, parts, gx, g_scale, g_shift, kept_scale, kept_shift, gy_step, x_step,
    scale_step, stat_step, moved_step, gx_step, g_step, kept_step, rows, measured, slope, count,
    C: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, STAGE: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """With `ADD`, `moved` is added to gx, and what lies at g_scale to the gradient of γ. With `KEEP`, the sums are kept
    in a second place, too."""
    task = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * SPAN
    r = tl.arange(0, BR)
    some = c < C
    x += task * x_step
    gy += task * gy_step
    gx += task * gx_step
    moved += task * moved_step
    parts += task * count * 2 * C
    center, root, slant, beta = _statistics(scale, shift, mean, rstd, task, c, some, scale_step, stat_step)
    if STAGE < 2:
        sums = tl.zeros((BR, BC), tl.float32)
        sums_d = tl.zeros((BR, BC), tl.float32)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, rows, C)
            away, _, g = _slopes(x, gy, at, inside, center, slant, beta, slope)
            sums += g
            sums_d += g * away
        total = tl.sum(sums, axis=0)
        total_d = tl.sum(sums_d, axis=0)
        if STAGE == 1:
            to = parts + tl.program_id(0) * 2 * C + c
            tl.store(to, total, mask=some)
            tl.store(to + C, total_d, mask=some)
    else:
        total = tl.sum(_parts(parts, 0, c, count, 2, C, PARTS), axis=0)
        total_d = tl.sum(_parts(parts, 1, c, count, 2, C, PARTS), axis=0)
    if STAGE != 1:
        of_scale = total_d * root
        leads = some & (first == 0)
        if KEEP:
            tl.store(kept_scale + task * kept_step + c, of_scale, mask=leads)
            tl.store(kept_shift + task * kept_step + c, total, mask=leads)
        before = of_scale
        if ADD:
            before = of_scale + tl.load(g_scale + task * g_step + c, mask=leads, other=0.0)
        tl.store(g_scale + task * g_step + c, before, mask=leads)
        tl.store(g_shift + task * g_step + c, total, mask=leads)
        along = of_scale / measured * root
        total = total / measured
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, rows, C)
            away, _, g = _slopes(x, gy, at, inside, center, slant, beta, slope)
            counts = (from_ + r < measured)[:, None]
            result = slant[None, :] * tl.where(counts, g - total[None, :] - away * along[None, :], g)
            if ADD:
                result += tl.load(moved + at, mask=inside, other=0.0)
            tl.store(gx + at, result, mask=inside)


@triton.jit
def norm_second(
    x, gy, v, v_scale, v_shift, scale, shift, mean, rstd, scale_gradient, shift_gradient, parts, ggy, hx, h_scale,
    x_step, gy_step, v_step, direction_step, scale_step, stat_step, sums_step, ggy_step, hx_step, h_step, rows,
    measured, slope, count,
    C: tl.constexpr, STAGE: tl.constexpr, SPAN: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * SPAN
    r = tl.arange(0, BR)
    some = c < C
    x += task * x_step
    gy += task * gy_step
    v += task * v_step
    ggy += task * ggy_step
    hx += task * hx_step
    parts += task * count * 3 * C
    center, root, slant, beta = _statistics(scale, shift, mean, rstd, task, c, some, scale_step, stat_step)
    if STAGE < 2:
        sums = tl.zeros((BR, BC), tl.float32)
        sums_d = tl.zeros((BR, BC), tl.float32)
        sums_g = tl.zeros((BR, BC), tl.float32)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, rows, C)
            away, _, g = _slopes(x, gy, at, inside, center, slant, beta, slope)
            w = tl.load(v + at, mask=inside, other=0.0)
            of_measured = tl.where((from_ + r < measured)[:, None], w, 0.0)
            sums += of_measured
            sums_d += of_measured * away
            sums_g += w * g
        total = tl.sum(sums, axis=0)
        total_d = tl.sum(sums_d, axis=0)
        total_g = tl.sum(sums_g, axis=0)
        if STAGE == 1:
            to = parts + tl.program_id(0) * 3 * C + c
            tl.store(to, total, mask=some)
            tl.store(to + C, total_d, mask=some)
            tl.store(to + 2 * C, total_g, mask=some)
    else:
        total = tl.sum(_parts(parts, 0, c, count, 3, C, PARTS), axis=0)
        total_d = tl.sum(_parts(parts, 1, c, count, 3, C, PARTS), axis=0)
        total_g = tl.sum(_parts(parts, 2, c, count, 3, C, PARTS), axis=0)
    if STAGE != 1:
        S = tl.load(scale_gradient + task * sums_step + c, mask=some, other=0.0) / measured
        G = tl.load(shift_gradient + task * sums_step + c, mask=some, other=0.0) / measured
        V = total / measured
        U = total_d * root / measured
        D = total_g / measured - V * G - U * S
        by_g = tl.load(v_scale + task * direction_step + c, mask=some, other=0.0) - slant * U
        by_v = slant * S
        tl.store(h_scale + task * h_step + c, D * root * measured, mask=some & (first == 0))
        g_d = by_g * root
        g_1 = tl.load(v_shift + task * direction_step + c, mask=some, other=0.0) - slant * V
        h_g = root * by_g
        h_v = root * by_v
        h_d = root * root * (by_g * S - by_v * U + slant * D)
        h_1 = root * (by_g * G - by_v * V)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, rows, C)
            away, steep, g = _slopes(x, gy, at, inside, center, slant, beta, slope)
            w = tl.load(v + at, mask=inside, other=0.0)
            counts = (from_ + r < measured)[:, None]
            tl.store(ggy + at, steep * (slant[None, :] * w + g_d[None, :] * away + g_1[None, :]), mask=inside)
            pull = tl.where(counts, h_v[None, :] * w + h_d[None, :] * away + h_1[None, :], 0.0)
            tl.store(hx + at, h_g[None, :] * g - pull, mask=inside)
