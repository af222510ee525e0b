"""Means over pixels, and the pictures of episodes, in Triton."""

import triton
import triton.language as tl


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
