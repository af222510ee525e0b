"""The loss of every task with its gradient, and the tangent of that gradient; and the sum of tasks, in Triton."""

import triton
import triton.language as tl


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
    z, y, g, value, score, z_step, g_step, samples, known, outputs,
    C: tl.constexpr, CLASSES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Mean cross-entropy and accuracy of classes y [t, n]; or the mean squared error of numbers y [t, n, outputs]. The
    gradient g [samples][C] is 0 at the first `known` samples, and where there is no output. A class that there is not
    gives NaN."""
    task = tl.program_id(0).to(tl.int64)
    counted = samples - known
    k = tl.arange(0, BC)
    r = tl.arange(0, BR)
    z += task * z_step
    g += task * g_step
    used = (k < outputs)[None, :]
    losses = tl.zeros((BR,), tl.float32)
    scores = tl.zeros((BR,), tl.float32)
    for first in range(0, samples, BR):
        row = first + r
        counts = (row >= known) & (row < samples)
        at = row[:, None] * C + k[None, :]
        values = tl.load(z + at, mask=counts[:, None] & used, other=0.0)
        if CLASSES:
            label = tl.load(y + task * counted + row - known, mask=counts, other=0)
            p, log_sum, most = _softmax(values, outputs, k)
            own = tl.sum(tl.where(k[None, :] == label[:, None], values, 0.0), axis=1)
            valid = (label >= 0) & (label < outputs)
            losses += tl.where(counts, tl.where(valid, log_sum - (own - most), float("nan")), 0.0)
            best = tl.argmax(tl.where(used, values, float("-inf")), axis=1)
            scores += tl.where(counts & (best == label), 1.0, 0.0)
            slope = (p - tl.where(k[None, :] == label[:, None], 1.0, 0.0)) / counted
        else:
            wanted = tl.load(
                y + (task * counted + row - known)[:, None] * outputs + k[None, :],
                mask=counts[:, None] & used,
                other=0.0,
            )
            away = values - wanted
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
    g, dz, y, change, g_step, dz_step, change_step, samples, known, outputs,
    C: tl.constexpr, CLASSES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The tangent of the gradient g of `loss`, from the tangent dz of its values."""
    task = tl.program_id(0).to(tl.int64)
    counted = samples - known
    k = tl.arange(0, BC)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    counts = (row >= known) & (row < samples)
    used = counts[:, None] & (k < outputs)[None, :]
    at = row[:, None] * C + k[None, :]
    tangent = tl.load(dz + task * dz_step + at, mask=used, other=0.0)
    if CLASSES:
        label = tl.load(y + task * counted + row - known, mask=counts, other=0)
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
