"""The three products of a convolution whose kernels differ by task, and of a linear layer, in Triton.

Images of a task are [samples][row][column][channel], its kernels [row][column][input][output]. Each program computes
one tile of one task's result, and adds up in a fixed order: a task's bits do not depend on the other tasks.

With `PAIRS` of 2, a second product is added: the tangent of a product is a sum of two (Pearlmutter 1994).
"""

import triton
import triton.language as tl


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
        at = x + (base + i * SH + j * SW)[:, None] + (k0 % C + kk)[None, :] * SC
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
    """A tile [BK, BN] of a matrix [K, CO]; with `TURNED`, of one that lies as [CO, K]."""
    at = w + k[:, None] + co[None, :] * K if TURNED else w + k[:, None] * CO + co[None, :]
    if K % BK == 0 and CO % BN == 0:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[:, None] & (co < CO)[None, :], other=0.0)


@triton.jit
def product(
    x, w, x2, w2, bias, y, x_step, w_step, x2_step, w2_step, bias_step, y_step, N,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, TURNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = x ∗ w (+ x2 ∗ w2) (+ bias). An image's number (n, h, w, c) lies at n SN + h SH + w SW + c SC. With `TURNED`,
    kernels lie as [output][row][column][input]."""
    K: tl.constexpr = KH * KW * C
    task = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    co = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = m < N * OH * OW
    height = m // OW % OH * STRIDE - PADDING
    width = m % OW * STRIDE - PADDING
    base = m // (OH * OW) * SN + height * SH + width * SW
    kk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    if BIAS:
        row = tl.load(bias + task * bias_step + co, mask=co < CO, other=0.0)
        acc += row[None, :]
    xt = x + task * x_step
    wt = w + task * w_step
    for k0 in range(0, K, BK):
        a = _rows_of_images(xt, base, height, width, ok, k0, kk, SH, SW, SC, H, W, C, KW, K, PADDING > 0, BK)
        b = _rows_of_numbers(wt, k0 + kk, co, K, CO, BK, BN, TURNED)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if PAIRS == 2:
        xt = x2 + task * x2_step
        wt = w2 + task * w2_step
        for k0 in range(0, K, BK):
            a = _rows_of_images(xt, base, height, width, ok, k0, kk, SH, SW, SC, H, W, C, KW, K, PADDING > 0, BK)
            b = _rows_of_numbers(wt, k0 + kk, co, K, CO, BK, BN, TURNED)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tl.store(y + task * y_step + m[:, None] * CO + co[None, :], acc, mask=ok[:, None] & (co < CO)[None, :])


@triton.jit
def input_gradient(
    gy, w, gy2, w2, gx, gy_step, w_step, gy2_step, w2_step, gx_step, N,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CO: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, PAIRS: tl.constexpr,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
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
    ci = tl.program_id(1) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    at = gx + task * gx_step + ((n * H + height) * W + width)[:, None] * C + ci[None, :]
    stored = ok[:, None] & (ci < C)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if ADD:
        acc += tl.load(at, mask=stored, other=0.0)
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
            if CO % BK == 0 and C % BN == 0:
                a = tl.load(grads, mask=inside[:, None], other=0.0)
                b = tl.load(numbers)
            else:
                a = tl.load(grads, mask=inside[:, None] & (co < CO)[None, :], other=0.0)
                b = tl.load(numbers, mask=(ci < C)[:, None] & (co < CO)[None, :], other=0.0)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    tl.store(at, acc, mask=stored)


@triton.jit
def weight_gradient(
    x, gy, x2, gy2, gw, gb, x_step, gy_step, x2_step, gy2_step, gw_step, gb_step, N, splits, span,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gw = the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x2 ∗ w⟩) by w; gb = that of ⟨gy, bias⟩ by the bias, with `BIAS`.

    Where a kernel has few numbers for so many rows, `splits` programs share the rows, `span` each; `sum_splits` adds up
    their results.
    """
    K: tl.constexpr = KH * KW * C
    ALIKE: tl.constexpr = C % BM == 0  # all numbers of a tile belong to one pixel of the kernels
    task = tl.program_id(2).to(tl.int64)
    block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    k = block * BM + tl.arange(0, BM)
    co = tl.program_id(1) * BN + tl.arange(0, BN)
    tap = block * BM // C
    if ALIKE:
        i = tap // KW
        j = tap % KW
        offset = i * SH + j * SW + (block * BM % C + tl.arange(0, BM)) * SC
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
    for pair in tl.static_range(PAIRS):
        if pair == 0:
            xt = x + task * x_step
            gt = gy + task * gy_step
        else:
            xt = x2 + task * x2_step
            gt = gy2 + task * gy2_step
        for from_ in range(first, last, BK):
            m = from_ + mm
            height = m // OW % OH * STRIDE - PADDING
            width = m % OW * STRIDE - PADDING
            base = m // (OH * OW) * SN + height * SH + width * SW
            if ALIKE:
                there = m < last
                if PADDING > 0:
                    there = there & (height + i >= 0) & (height + i < H) & (width + j >= 0) & (width + j < W)
                a = tl.load(xt + base[:, None] + offset[None, :], mask=there[:, None], other=0.0)
            else:
                inside = (m < last)[:, None] & (k < K)[None, :]
                if PADDING > 0:
                    down = height[:, None] + i[None, :]
                    right = width[:, None] + j[None, :]
                    inside = inside & (down >= 0) & (down < H) & (right >= 0) & (right < W)
                a = tl.load(xt + base[:, None] + offset[None, :], mask=inside, other=0.0)
            if CO % BN == 0:
                grads = tl.load(gt + m[:, None] * CO + co[None, :], mask=(m < last)[:, None], other=0.0)
            else:
                grads = tl.load(
                    gt + m[:, None] * CO + co[None, :], mask=(m < last)[:, None] & (co < CO)[None, :], other=0.0
                )
            acc = tl.dot(tl.trans(a), grads, acc, input_precision=PRECISION)
            if BIAS and pair == 0:
                total += tl.sum(grads, axis=0)
    tl.store(gw + task * gw_step + k[:, None] * CO + co[None, :], acc, mask=(k < K)[:, None] & (co < CO)[None, :])
    if BIAS:
        tl.store(gb + task * gb_step + co, total, mask=(co < CO) & (tl.program_id(0) == 0))


@triton.jit
def sum_splits(parts, gw, gw_step, splits, size, SPLITS: tl.constexpr, B: tl.constexpr):
    """gw = the sum of parts [splits, size]."""
    task = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * B + tl.arange(0, B)
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & (at < size)[None, :]
    values = tl.load(parts + (task * splits + split[:, None]) * size + at[None, :], mask=inside, other=0.0)
    tl.store(gw + task * gw_step + at, tl.sum(values, axis=0), mask=at < size)
