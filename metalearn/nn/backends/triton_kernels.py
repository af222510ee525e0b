"""The kernels on a GPU, in Triton: the functions of `kernels/*.c`, for all tasks at once. `triton_ops.py` starts them.

A program computes one tile of one task's result, and adds up in a fixed order: a task's bits do not depend on the other
tasks. Images of a task are [samples][row][column][channel], its kernels [row][column][input][output].
"""

import triton
import triton.language as tl

# Convolutions and linear layers. With `PAIRS` of 2, a second product is added: the tangent of a product is a sum of two
# (Pearlmutter 1994). A tile has `MORE` columns beside its BN, or 0: both are powers of two, but 160 = 128 + 32 is none.
# Where it has more, all columns fill tiles.


INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rounded(a):
    """Floats with the values of bfloat16: the interpreter would cut numbers off, and multiply their bits."""
    bits = a.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _rows_of_images(
    x, base, height, width, ok, k0, kk,
    SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    KW: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile [rows, BK] of windows: the numbers k0 + kk of every row's window, which begins at `base` and may lie
    outside of the image. Where a block of numbers lies in one pixel, its place is computed once."""
    if C % BK == 0:
        tap = k0 // C
        i = tap // KW
        j = tap % KW
        inside = ok
        if PADDED:
            inside = ok & (height + i >= 0) & (height + i < H) & (width + j >= 0) & (width + j < W)
        # Not k0 % C: behind a remainder Triton no longer sees four neighbours in a row, and copies single numbers.
        at = x + (base + i * SH + j * SW)[:, None] + (k0 - tap * C + kk)[None, :] * SC
        return tl.load(at, mask=inside[:, None], other=0.0)
    k = k0 + kk
    tap = k // C
    i = tap // KW
    j = tap % KW
    inside = ok[:, None] & (k < K)[None, :]
    if PADDED:
        down = height[:, None] + i[None, :]
        right = width[:, None] + j[None, :]
        inside = inside & (down >= 0) & (down < H) & (right >= 0) & (right < W)
    return tl.load(x + base[:, None] + (i * SH + j * SW + (k % C) * SC)[None, :], mask=inside, other=0.0)


@triton.jit
def _rows_of_numbers(
    w, k, co, K: tl.constexpr, CO: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """Columns of a tile [BK, BN] of a matrix [K, CO]; with `TURNED`, of one that lies as [CO, K]."""
    at = w + k[:, None] + co[None, :] * K if TURNED else w + k[:, None] * CO + co[None, :]
    if K % BK == 0 and CO % BN == 0:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[:, None] & (co < CO)[None, :], other=0.0)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a · b; in bf16, of operands rounded to nearest even."""
    if PRECISION == "bf16" and INTERPRETED:
        return tl.dot(_rounded(a), _rounded(b), acc)
    elif PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def product(
    x, w, x2, w2, bias, y, x_step, w_step, x2_step, w2_step, bias_step, y_step, N,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, TURNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MORE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x ∗ w (+ x2 ∗ w2) (+ bias). An image's number (n, h, w, c) lies at n SN + h SH + w SW + c SC. With `TURNED`,
    kernels lie as [output][row][column][input]."""
    K: tl.constexpr = KH * KW * C
    task = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    co = tl.program_id(1) * (BN + MORE) + tl.arange(0, BN)
    ok = m < N * OH * OW
    height = m // OW % OH * STRIDE - PADDING
    width = m % OW * STRIDE - PADDING
    base = m // (OH * OW) * SN + height * SH + width * SW
    kk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    if BIAS:
        row = tl.load(bias + task * bias_step + co, mask=co < CO, other=0.0)
        acc += row[None, :]
    if MORE:
        co2 = tl.program_id(1) * (BN + MORE) + BN + tl.arange(0, MORE)
        acc2 = tl.zeros((BM, MORE), tl.float32)
    for pair in tl.static_range(PAIRS):
        if pair == 0:
            xt = x + task * x_step
            wt = w + task * w_step
        else:
            xt = x2 + task * x2_step
            wt = w2 + task * w2_step
        for k0 in range(0, K, BK):
            a = _rows_of_images(xt, base, height, width, ok, k0, kk, SH, SW, SC, H, W, C, KW, K, PADDING > 0, BK)
            b = _rows_of_numbers(wt, k0 + kk, co, K, CO, BK, BN + MORE, TURNED)
            acc = _dot(a, b, acc, PRECISION)
            if MORE:
                b = _rows_of_numbers(wt, k0 + kk, co2, K, CO, BK, BN + MORE, TURNED)
                acc2 = _dot(a, b, acc2, PRECISION)
    tl.store(y + task * y_step + m[:, None] * CO + co[None, :], acc, mask=ok[:, None] & (co < CO)[None, :])
    if MORE:
        tl.store(y + task * y_step + m[:, None] * CO + co2[None, :], acc2, mask=ok[:, None] & (co2 < CO)[None, :])


@triton.jit
def input_gradient(
    gy, w, gy2, w2, gx, gy_step, w_step, gy2_step, w2_step, gx_step, N,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, PAIRS: tl.constexpr,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MORE: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """gx (+)= the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x ∗ w2⟩) by x. With a stride s, the pixels of x fall into s × s
    classes, whose pixels are reached by the same pixels of the kernels; a program's rows are of one class."""
    CLASS_H: tl.constexpr = (H + STRIDE - 1) // STRIDE
    CLASS_W: tl.constexpr = (W + STRIDE - 1) // STRIDE
    CHUNKS: tl.constexpr = (CO + BK - 1) // BK
    task = tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0) // (STRIDE * STRIDE)
    kind = tl.program_id(0) // blocks
    first_i = kind // STRIDE
    first_j = kind % STRIDE
    m = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    height = m // CLASS_W % CLASS_H * STRIDE + (first_i + STRIDE - PADDING % STRIDE) % STRIDE
    width = m % CLASS_W * STRIDE + (first_j + STRIDE - PADDING % STRIDE) % STRIDE
    n = m // (CLASS_H * CLASS_W)
    ok = (n < N) & (height < H) & (width < W)
    from_h = (height + PADDING - first_i) // STRIDE
    from_w = (width + PADDING - first_j) // STRIDE
    base = (n * OH + from_h) * OW + from_w
    taps_h = (KH - first_i + STRIDE - 1) // STRIDE
    taps_w = (KW - first_j + STRIDE - 1) // STRIDE
    ci = tl.program_id(1) * (BN + MORE) + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    row = gx + task * gx_step + ((n * H + height) * W + width)[:, None] * C
    at = row + ci[None, :]
    stored = ok[:, None] & (ci < C)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if ADD:
        acc += tl.load(at, mask=stored, other=0.0)
    if MORE:
        ci2 = tl.program_id(1) * (BN + MORE) + BN + tl.arange(0, MORE)
        acc2 = tl.zeros((BM, MORE), tl.float32)
        if ADD:
            acc2 += tl.load(row + ci2[None, :], mask=ok[:, None], other=0.0)
    for pair in tl.static_range(PAIRS):
        if pair == 0:
            gt = gy + task * gy_step
            wt = w + task * w_step
        else:
            gt = gy2 + task * gy2_step
            wt = w2 + task * w2_step
        for step in range(taps_h * taps_w * CHUNKS):
            tap = step // CHUNKS
            co = step % CHUNKS * BK + kk
            i = tap // taps_w
            j = tap % taps_w
            inside = ok & (from_h - i >= 0) & (from_h - i < OH) & (from_w - j >= 0) & (from_w - j < OW)
            kernel = ((first_i + i * STRIDE) * KW + first_j + j * STRIDE) * C
            grads = gt + (base - i * OW - j)[:, None] * CO + co[None, :]
            numbers = wt + (kernel + ci)[:, None] * CO + co[None, :]
            if CO % BK == 0 and C % (BN + MORE) == 0:
                a = tl.load(grads, mask=inside[:, None], other=0.0)
                b = tl.load(numbers)
            else:
                a = tl.load(grads, mask=inside[:, None] & (co < CO)[None, :], other=0.0)
                b = tl.load(numbers, mask=(ci < C)[:, None] & (co < CO)[None, :], other=0.0)
            acc = _dot(a, tl.trans(b), acc, PRECISION)
            if MORE:
                numbers = wt + (kernel + ci2)[:, None] * CO + co[None, :]
                b = tl.load(numbers, mask=(co < CO)[None, :], other=0.0)
                acc2 = _dot(a, tl.trans(b), acc2, PRECISION)
    tl.store(at, acc, mask=stored)
    if MORE:
        tl.store(row + ci2[None, :], acc2, mask=ok[:, None] & (ci2 < C)[None, :])


@triton.jit
def _of_first(number, places, some):
    """`some` of the places in the program with number 0, none in others."""
    return some & (places * 0 + number == 0)  # a comparison of numbers alone is no mask in Triton 3.9's interpreter


@triton.jit
def weight_gradient(
    x, gy, x2, gy2, gw, gb, x_step, gy_step, x2_step, gy2_step, gw_step, gb_step, N, splits, span,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MORE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gw = the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x2 ∗ w⟩) by w; gb = that of ⟨gy, bias⟩ by the bias, with `BIAS`.

    Where a kernel has few numbers for many rows, `splits` programs share the rows, `span` each; `sum_splits` adds up
    their results.
    """
    K: tl.constexpr = KH * KW * C
    ALIKE: tl.constexpr = C % BM == 0  # all numbers of a tile belong to one pixel of the kernels
    task = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    k = block * BM + tl.arange(0, BM)
    co = tl.program_id(1) * (BN + MORE) + tl.arange(0, BN)
    tap = block * BM // C
    if ALIKE:
        i = tap // KW
        j = tap % KW
        offset = i * SH + j * SW + (block * BM - tap * C + tl.arange(0, BM)) * SC
    else:
        i = k // C // KW
        j = k // C % KW
        offset = i * SH + j * SW + k % C * SC
    rows = N * OH * OW
    first = split * span
    last = tl.minimum(first + span, rows)
    gw += split * K * CO
    mm = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    total = tl.zeros((BN,), tl.float32)
    if MORE:
        co2 = tl.program_id(1) * (BN + MORE) + BN + tl.arange(0, MORE)
        acc2 = tl.zeros((BM, MORE), tl.float32)
    for pair in tl.static_range(PAIRS):
        if pair == 0:
            xt = x + task * x_step
            gt = gy + task * gy_step
        else:
            xt = x2 + task * x2_step
            gt = gy2 + task * gy2_step
        for from_ in range(first, last, BK):
            # The windows lie turned from the start: a tile that `tl.trans` turns is copied number by number.
            m = from_ + mm
            height = m // OW % OH * STRIDE - PADDING
            width = m % OW * STRIDE - PADDING
            base = m // (OH * OW) * SN + height * SH + width * SW
            if ALIKE:
                in_image = m < last
                if PADDING > 0:
                    in_image = in_image & (height + i >= 0) & (height + i < H) & (width + j >= 0) & (width + j < W)
                a = tl.load(xt + base[None, :] + offset[:, None], mask=in_image[None, :], other=0.0)
            else:
                inside = (m < last)[None, :] & (k < K)[:, None]
                if PADDING > 0:
                    down = height[None, :] + i[:, None]
                    right = width[None, :] + j[:, None]
                    inside = inside & (down >= 0) & (down < H) & (right >= 0) & (right < W)
                a = tl.load(xt + base[None, :] + offset[:, None], mask=inside, other=0.0)
            if CO % (BN + MORE) == 0:
                grads = tl.load(gt + m[:, None] * CO + co[None, :], mask=(m < last)[:, None], other=0.0)
            else:
                grads = tl.load(
                    gt + m[:, None] * CO + co[None, :], mask=(m < last)[:, None] & (co < CO)[None, :], other=0.0
                )
            if BIAS and pair == 0:
                total += tl.sum(grads, axis=0)
            if PRECISION == "tf32":
                # Hopper's tensor cores take TF32 only if the numbers of a sum are neighbours. Behind an addition they
                # are turned in registers; without it, each number is copied to its place alone, not 16 bytes at once.
                a += 0.0
                grads += 0.0
            acc = _dot(a, grads, acc, PRECISION)
            if MORE:
                grads = tl.load(gt + m[:, None] * CO + co2[None, :], mask=(m < last)[:, None], other=0.0)
                if PRECISION == "tf32":
                    grads += 0.0
                acc2 = _dot(a, grads, acc2, PRECISION)
    tl.store(gw + task * gw_step + k[:, None] * CO + co[None, :], acc, mask=(k < K)[:, None] & (co < CO)[None, :])
    if MORE:
        tl.store(
            gw + task * gw_step + k[:, None] * CO + co2[None, :], acc2, mask=(k < K)[:, None] & (co2 < CO)[None, :]
        )
    if BIAS:
        tl.store(gb + task * gb_step + co, total, mask=_of_first(tl.program_id(0), co, co < CO))


@triton.jit
def sum_splits(parts, gw, gw_step, splits, size, SPLITS: tl.constexpr, B: tl.constexpr):
    """gw = the sum of parts [splits, size]."""
    task = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * B + tl.arange(0, B)
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & (at < size)[None, :]
    values = tl.load(parts + (task * splits + split[:, None]) * size + at[None, :], mask=inside, other=0.0)
    tl.store(gw + task * gw_step + at, tl.sum(values, axis=0), mask=at < size)


# Batch norm with a leaky ReLU behind it; the formulas are those of `kernels/norm.c`, whose names these kernels have.
# Where all rows of a task fit one program (`STAGE` 0), it computes all. Else programs share the rows, `SPAN` each: in a
# first launch (1) they sum up their own rows, in a second one (2) every program adds these sums up, always in the same
# order, and computes its rows.


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
        measured_here = tl.minimum(tl.maximum(measured - first, 0), SPAN)
        sums = tl.zeros((BR, BC), tl.float32)
        for from_ in range(first, first + SPAN, BR):
            at, inside = _tile(from_, r, c, measured, C)
            sums += tl.load(x + at, mask=inside, other=0.0)
        center = tl.sum(sums, axis=0) / tl.maximum(measured_here, 1)
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
        sizes = tl.minimum(tl.maximum(measured - tl.arange(0, PARTS) * SPAN, 0), SPAN)[:, None]
        center = tl.sum(means * sizes, axis=0) / measured
        gap = means - center[None, :]
        spread = tl.sum(_parts(parts, 1, c, count, 2, C, PARTS) + gap * gap * sizes, axis=0)
    if STAGE != 1:
        root = 1.0 / tl.sqrt_rn(spread / measured + epsilon)
        tl.store(mean + task * stat_step + c, center, mask=_of_first(first, c, some))
        tl.store(rstd + task * stat_step + c, root, mask=_of_first(first, c, some))
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
        leads = _of_first(first, c, some)
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
        tl.store(h_scale + task * h_step + c, D * root * measured, mask=_of_first(first, c, some))
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


# Losses, and sums of tasks


@triton.jit
def _softmax(z, outputs, k):
    """Probabilities of the first `outputs` classes, the logarithm of their sum, and the largest value."""
    z = tl.where((k < outputs)[None, :], z, float("-inf"))
    most = tl.max(z, axis=1)
    powers = tl.exp(z - most[:, None])
    total = tl.sum(powers, axis=1)
    return powers / total[:, None], tl.log(total), most


@triton.jit
def loss(
    z, y, g, value, score, z_step, g_step, samples, support_size, outputs,
    C: tl.constexpr, CLASSES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean cross-entropy and accuracy of classes y [t, n]; or the mean squared error of numbers y [t, n, outputs]. The
    gradient g [samples][C] is 0 at the first `support_size` samples, and where there is no output. A class that there
    is not gives NaN."""
    task = tl.program_id(0).to(tl.int64)
    counted = samples - support_size
    k = tl.arange(0, BC)
    r = tl.arange(0, BR)
    z += task * z_step
    g += task * g_step
    used = (k < outputs)[None, :]
    losses = tl.zeros((BR,), tl.float32)
    scores = tl.zeros((BR,), tl.float32)
    for first in range(0, samples, BR):
        row = first + r
        counts = (row >= support_size) & (row < samples)
        at = row[:, None] * C + k[None, :]
        values = tl.load(z + at, mask=counts[:, None] & used, other=0.0)
        if CLASSES:
            label = tl.load(y + task * counted + row - support_size, mask=counts, other=0)
            p, log_sum, most = _softmax(values, outputs, k)
            label_value = tl.sum(tl.where(k[None, :] == label[:, None], values, 0.0), axis=1)
            valid = (label >= 0) & (label < outputs)
            losses += tl.where(counts, tl.where(valid, log_sum - (label_value - most), float("nan")), 0.0)
            best = tl.argmax(tl.where(used, values, float("-inf")), axis=1)
            scores += tl.where(counts & (best == label), 1.0, 0.0)
            slope = (p - tl.where(k[None, :] == label[:, None], 1.0, 0.0)) / counted
        else:
            target = tl.load(
                y + (task * counted + row - support_size)[:, None] * outputs + k[None, :],
                mask=counts[:, None] & used,
                other=0.0,
            )
            away = values - target
            losses += tl.sum(away * away, axis=1)
            slope = 2.0 * away / (counted * outputs)
        inside = (row < samples)[:, None] & (k < C)[None, :]
        tl.store(g + at, tl.where(counts[:, None] & used, slope, 0.0), mask=inside)
    total = tl.sum(losses, axis=0)
    if CLASSES:
        tl.store(value + task, total / counted)
        tl.store(score + task, tl.sum(scores, axis=0) / counted)
    else:
        tl.store(value + task, total / (counted * outputs))
        tl.store(score + task, total / (counted * outputs))


@triton.jit
def loss_change(
    g, dz, y, change, g_step, dz_step, change_step, samples, support_size, outputs,
    C: tl.constexpr, CLASSES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The tangent of the gradient g of `loss`, from the tangent dz of its values."""
    task = tl.program_id(0).to(tl.int64)
    counted = samples - support_size
    k = tl.arange(0, BC)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    counts = (row >= support_size) & (row < samples)
    used = counts[:, None] & (k < outputs)[None, :]
    at = row[:, None] * C + k[None, :]
    tangent = tl.load(dz + task * dz_step + at, mask=used, other=0.0)
    if CLASSES:
        label = tl.load(y + task * counted + row - support_size, mask=counts, other=0)
        p = tl.load(g + task * g_step + at, mask=used, other=0.0)
        p += tl.where(used & (k[None, :] == label[:, None]), 1.0 / counted, 0.0)
        mean = tl.sum(p * tangent, axis=1) * counted
        result = p * (tangent - mean[:, None])
    else:
        result = 2.0 * tangent / (counted * outputs)
    inside = (row < samples)[:, None] & (k < C)[None, :]
    tl.store(change + task * change_step + at, tl.where(used, result, 0.0), mask=inside)


@triton.jit
def sum_rows(x, y, rows, count, HALVINGS: tl.constexpr, B: tl.constexpr):
    """y [count] = the sum of `rows` rows of x, in pairs: neighbours first, then pairs of pairs."""
    R: tl.constexpr = 2**HALVINGS
    at = tl.program_id(0) * B + tl.arange(0, B)
    row = tl.arange(0, R)
    inside = (row < rows)[:, None] & (at < count)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * count + at[None, :], mask=inside, other=0.0)
    for level in tl.static_range(HALVINGS):
        pairs = tl.reshape(values, (R // 2 ** (level + 1), 2, B))
        values = tl.sum(pairs, axis=1)
    tl.store(y + at, tl.reshape(values, (B,)), mask=at < count)


# Means over pixels, and the pictures of episodes


@triton.jit
def mean(x, y, x_step, y_step, count, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """y [samples][C] = the mean of x [samples][count][C]."""
    task = tl.program_id(2).to(tl.int64)
    sample = tl.program_id(0)
    p = tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = tl.zeros((BP, BC), tl.float32)
    for first in range(0, count, BP):
        at = x + task * x_step + (sample * count + first + p)[:, None] * C + c[None, :]
        sums += tl.load(at, mask=(first + p < count)[:, None] & (c < C)[None, :], other=0.0)
    tl.store(y + task * y_step + sample * C + c, tl.sum(sums, axis=0) / count, mask=c < C)


@triton.jit
def spread(gy, gx, gy_step, gx_step, count, C: tl.constexpr, ADD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr):
    """gx [samples][count][C] (+)= gy [samples][C] / count."""
    task = tl.program_id(2).to(tl.int64)
    sample = tl.program_id(0)
    p = tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    share = tl.load(gy + task * gy_step + sample * C + c, mask=c < C, other=0.0) / count
    for first in range(0, count, BP):
        inside = (first + p < count)[:, None] & (c < C)[None, :]
        at = gx + task * gx_step + (sample * count + first + p)[:, None] * C + c[None, :]
        values = tl.zeros((BP, BC), tl.float32) + share[None, :]
        if ADD:
            values += tl.load(at, mask=inside, other=0.0)
        tl.store(at, values, mask=inside)


@triton.jit
def gather(
    pictures, turns, values, numbers, support, query, ways, per_class, shots, pixels, CHANNELS: tl.constexpr,
    B: tl.constexpr,
):  # fmt: skip
    """A picture of an episode: `numbers` [t, ways, 1 + per_class] are the quarter turns of each class, then the numbers
    of its pictures [n, pixels, channels]. `turns` [4, pixels] are the places from which a turned picture takes its
    pixels, `values` [256] the numbers for bytes."""
    task = tl.program_id(1).to(tl.int64)
    way = tl.program_id(0) // per_class
    which = tl.program_id(0) % per_class
    row = numbers + (task * ways + way) * (1 + per_class)
    turn = tl.load(row)
    number = tl.load(row + 1 + which)
    if which < shots:
        to = support + ((task * ways + way) * shots + which) * CHANNELS * pixels
    else:
        to = query + ((task * ways + way) * (per_class - shots) + which - shots) * CHANNELS * pixels
    for first in range(0, pixels, B):
        p = first + tl.arange(0, B)
        inside = p < pixels
        source = tl.load(turns + turn * pixels + p, mask=inside, other=0)
        for channel in tl.static_range(CHANNELS):
            byte = tl.load(pictures + (number * pixels + source) * CHANNELS + channel, mask=inside, other=0)
            value = tl.load(values + byte.to(tl.int32), mask=inside, other=0.0)
            tl.store(to + channel * pixels + p, value, mask=inside)
