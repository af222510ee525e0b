"""Starts the kernels with the tiles that suit the sizes. Tensors of a task lie one after the other, `step` apart."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from metalearn.nn.gpu import losses, norms, pixels, products

MOST_ROWS, MOST_PARTS = 256, 64
"""Rows of a norm that one program computes; and programs that share the rows of a larger one."""
MOST_SPLITS = 64
"""Programs that share the rows of a weight gradient."""
MOST_TILES = 1024
"""Programs of a weight gradient, of a task, that are enough for any GPU."""
MANY_ROWS = 4096
"""Rows from which on a product has large tiles. Its kernels are turned before, so that all it adds up lies in a row."""
MOST_NUMBERS = 4096
"""Numbers of a tile of the loss."""


class Tasks(NamedTuple):
    """A value of every task: `numbers` of the first task begin at its first number, those of the next `step` further.
    0: all tasks share them."""

    numbers: Tensor
    step: int


class Images(NamedTuple):
    """How far apart an image's samples, rows, columns and channels lie."""

    sample: int
    row: int
    column: int
    channel: int


class ConvolutionSizes(NamedTuple):
    """A convolution: the images' height, width and channels, those of the result, the kernels' height and width, the
    stride and the padding."""

    height: int
    width: int
    inputs: int
    out_height: int
    out_width: int
    outputs: int
    kernel_height: int
    kernel_width: int
    stride: int = 1
    padding: int = 0

    @property
    def dense(self) -> Images:
        """Images [samples][row][column][channel]."""
        row = self.width * self.inputs
        return Images(self.height * row, row, self.inputs, 1)

    def sizes(self) -> dict[str, int]:
        names = ("H", "W", "C", "OH", "OW", "CO", "KH", "KW", "STRIDE", "PADDING")
        return dict(zip(names, self, strict=True))


def precision() -> str:
    """How products round: in TF32 if the config asks for it; else as float32, by three products in TF32 where the GPU
    has it (their errors are half of those of float32's own products), or by float32's own."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "tf32x3" if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0) else "ieee"


def _power(count: int, least: int, most: int) -> int:
    """The smallest power of two that is not below `count`, within bounds."""
    return max(least, min(most, int(triton.next_power_of_2(count))))


def _step(value: Tasks | None) -> int:
    return 0 if value is None else value.step


def _numbers(value: Tasks | None, other: Tasks) -> Tensor:
    """The numbers of a value, or those of another in the place of one that is not read."""
    return other.numbers if value is None else value.numbers


def product(
    tasks: int, samples: int, g: ConvolutionSizes, images: Images, x: Tasks, w: Tasks, y: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, bias: Tasks | None = None,
) -> None:  # fmt: skip
    """y = x ∗ w (+ x2 ∗ w2) (+ bias)."""
    (x2, w2), rows = second or (x, w), samples * g.out_height * g.out_width
    few, numbers = rows <= 32, g.inputs * g.kernel_height * g.kernel_width
    many = rows >= MANY_ROWS and numbers >= 64
    bm, bn = 16 if few else 128 if many else 32, _power(g.outputs, 16, 32 if few else 64)
    bk = _power(numbers, 16, 64 if g.inputs % 64 == 0 and not many else 32)
    if many:
        w, w2 = (_turned(tasks, value, numbers, g.outputs) for value in (w, w2))
    products.product[(triton.cdiv(rows, bm), triton.cdiv(g.outputs, bn), tasks)](
        x.numbers, w.numbers, x2.numbers, w2.numbers, _numbers(bias, x), y.numbers, x.step, w.step, x2.step, w2.step,
        _step(bias), y.step, samples, *images, **g.sizes(), PAIRS=1 + (second is not None), BIAS=bias is not None,
        TURNED=many, BM=bm, BN=bn, BK=bk, PRECISION=precision(), num_warps=2 if few else 8 if many else 4,
        num_stages=3,
    )  # fmt: skip


def _turned(tasks: int, matrices: Tasks, rows: int, columns: int) -> Tasks:
    """Matrices [rows, columns], each turned to [columns, rows]."""
    count = tasks if matrices.step else 1
    lying = matrices.numbers.as_strided((count, rows, columns), (matrices.step, columns, 1))
    return Tasks(lying.transpose(1, 2).contiguous(), rows * columns if matrices.step else 0)


def input_gradient(
    tasks: int, samples: int, g: ConvolutionSizes, gy: Tasks, w: Tasks, gx: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, add: bool = False,
) -> None:  # fmt: skip
    """gx (+)= the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x ∗ w2⟩) by x."""
    gy2, w2 = second or (gy, w)
    rows = samples * triton.cdiv(g.height, g.stride) * triton.cdiv(g.width, g.stride)
    many = rows >= MANY_ROWS
    bm, bn = 128 if many else 64 if rows > 128 else 32, _power(g.inputs, 16, 64)
    bk = _power(g.outputs, 16, 64 if g.outputs % 64 == 0 and bm == 32 else 32)
    products.input_gradient[(triton.cdiv(rows, bm) * g.stride**2, triton.cdiv(g.inputs, bn), tasks)](
        gy.numbers, w.numbers, gy2.numbers, w2.numbers, gx.numbers, gy.step, w.step, gy2.step, w2.step, gx.step,
        samples, **g.sizes(), PAIRS=1 + (second is not None), ADD=add, BM=bm, BN=bn, BK=bk, PRECISION=precision(),
        num_warps=8 if many else 4, num_stages=3,
    )  # fmt: skip


def weight_gradient(
    tasks: int, samples: int, g: ConvolutionSizes, images: Images, x: Tasks, gy: Tasks, gw: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, gb: Tasks | None = None,
) -> None:  # fmt: skip
    """gw = the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x2 ∗ w⟩) by w, and gb that of ⟨gy, bias⟩ by the bias."""
    x2, gy2 = second or (x, gy)
    numbers, rows = g.inputs * g.kernel_height * g.kernel_width, samples * g.out_height * g.out_width
    bm, bn = _power(numbers, 16, 32), _power(g.outputs, 16, 64)
    tiles = triton.cdiv(numbers, bm) * triton.cdiv(g.outputs, bn)
    of_a_split = 256 if numbers <= bm else 2048
    splits = max(1, min(MOST_SPLITS, rows // of_a_split, MOST_TILES // tiles)) if gb is None else 1
    span, size = 32 * triton.cdiv(rows, 32 * splits), numbers * g.outputs
    to = gw if splits == 1 else Tasks(gw.numbers.new_empty(tasks, splits, size), splits * size)
    products.weight_gradient[(triton.cdiv(numbers, bm) * splits, triton.cdiv(g.outputs, bn), tasks)](
        x.numbers, gy.numbers, x2.numbers, gy2.numbers, to.numbers, _numbers(gb, gw), x.step, gy.step, x2.step,
        gy2.step, to.step, _step(gb), samples, splits, span, *images, **g.sizes(), PAIRS=1 + (second is not None),
        BIAS=gb is not None, BM=bm, BN=bn, BK=32, PRECISION=precision(), num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        products.sum_splits[(triton.cdiv(size, 256), tasks)](
            to.numbers, gw.numbers, gw.step, splits, size, SPLITS=triton.next_power_of_2(splits), B=256
        )  # fmt: skip


class NormSizes(NamedTuple):
    """Rows of a norm, those of them that are measured, and channels."""

    rows: int
    measured: int
    channels: int


class _Shares(NamedTuple):
    """How programs share a norm: the grid of one launch, and the sizes that the kernels know."""

    grid: tuple[int, int, int]
    stages: tuple[int, ...]
    sizes: dict[str, int]
    parts: Tensor


def _shares(tasks: int, sizes: "NormSizes", sums: int, like: Tensor) -> _Shares:
    """One program for all rows of a few channels, or several that share the rows. Nothing depends on the tasks."""
    rows, _, channels = sizes
    if rows <= MOST_ROWS:
        br, bc = _power(rows, 16, MOST_ROWS), _power(channels, 16, 16)
        tiles = {"C": channels, "SPAN": br, "BC": bc, "BR": br, "PARTS": 1}
        return _Shares((1, triton.cdiv(channels, bc), tasks), (0,), tiles, like)
    br, bc = 64, _power(channels, 16, 64)
    span = br * triton.cdiv(rows, br * MOST_PARTS)
    count = triton.cdiv(rows, span)
    tiles = {"C": channels, "SPAN": span, "BC": bc, "BR": br, "PARTS": triton.next_power_of_2(count)}
    parts = like.new_empty(tasks, count, sums, channels)
    return _Shares((count, triton.cdiv(channels, bc), tasks), (1, 2), tiles, parts)


def norm(
    tasks: int, sizes: NormSizes, epsilon: float, slope: float, *, x: Tasks, scale: Tasks, shift: Tasks, mean: Tasks,
    rstd: Tasks, y: Tasks,
) -> None:  # fmt: skip
    shares = _shares(tasks, sizes, 2, x.numbers)
    for stage in shares.stages:
        norms.norm[shares.grid](
            x.numbers, scale.numbers, shift.numbers, shares.parts, mean.numbers, rstd.numbers, y.numbers, x.step,
            scale.step, mean.step, y.step, sizes.rows, sizes.measured, epsilon, slope, shares.grid[0], STAGE=stage,
            **shares.sizes, num_warps=4,
        )  # fmt: skip


def norm_backward(
    tasks: int, sizes: NormSizes, slope: float, *, gy: Tasks, x: Tasks, scale: Tasks, shift: Tasks, mean: Tasks,
    rstd: Tasks, gx: Tasks, g_scale: Tasks, g_shift: Tasks, moved: Tasks | None = None,
    kept: tuple[Tasks, Tasks] | None = None,
) -> None:  # fmt: skip
    """With `moved`, it is added to gx, and what lies at g_scale to the gradient of γ. The sums of γ and β are `kept` in
    a second place, too."""
    shares, (kept_scale, kept_shift) = _shares(tasks, sizes, 2, x.numbers), kept or (g_scale, g_shift)
    for stage in shares.stages:
        norms.norm_backward[shares.grid](
            gy.numbers, x.numbers, scale.numbers, shift.numbers, mean.numbers, rstd.numbers, _numbers(moved, gx),
            shares.parts, gx.numbers, g_scale.numbers, g_shift.numbers, kept_scale.numbers, kept_shift.numbers,
            gy.step, x.step, scale.step, mean.step, _step(moved), gx.step, g_scale.step, kept_scale.step, sizes.rows,
            sizes.measured, slope, shares.grid[0], ADD=moved is not None, KEEP=kept is not None, STAGE=stage,
            **shares.sizes, num_warps=4,
        )  # fmt: skip


def norm_second(
    tasks: int, sizes: NormSizes, slope: float, *, x: Tasks, gy: Tasks, v: Tasks, v_scale: Tasks, v_shift: Tasks,
    scale: Tasks, shift: Tasks, mean: Tasks, rstd: Tasks, scale_gradient: Tasks, shift_gradient: Tasks, ggy: Tasks,
    hx: Tasks, h_scale: Tasks,
) -> None:  # fmt: skip
    shares = _shares(tasks, sizes, 3, x.numbers)
    for stage in shares.stages:
        norms.norm_second[shares.grid](
            x.numbers, gy.numbers, v.numbers, v_scale.numbers, v_shift.numbers, scale.numbers, shift.numbers,
            mean.numbers, rstd.numbers, scale_gradient.numbers, shift_gradient.numbers, shares.parts, ggy.numbers,
            hx.numbers, h_scale.numbers, x.step, gy.step, v.step, v_scale.step, scale.step, mean.step,
            scale_gradient.step, ggy.step, hx.step, h_scale.step, sizes.rows, sizes.measured, slope, shares.grid[0],
            STAGE=stage, **shares.sizes, num_warps=4,
        )  # fmt: skip


class LossSizes(NamedTuple):
    """Samples of a task, those of them that do not count, outputs that count, and channels of the last value."""

    samples: int
    known: int
    outputs: int
    channels: int


def _loss_tiles(sizes: LossSizes) -> tuple[int, dict[str, int]]:
    columns = triton.next_power_of_2(sizes.channels)
    rows = _power(sizes.samples, 1, max(1, MOST_NUMBERS // columns))
    return rows, {"C": sizes.channels, "BR": rows, "BC": columns}


def loss(tasks: int, sizes: LossSizes, z: Tasks, y: Tensor, g: Tasks, value: Tensor, score: Tensor) -> None:
    samples, known, outputs, _ = sizes
    _, tiles = _loss_tiles(sizes)
    losses.loss[(tasks,)](
        z.numbers, y, g.numbers, value, score, z.step, g.step, samples, known, outputs,
        CLASSES=not y.is_floating_point(), **tiles,
    )  # fmt: skip


def loss_change(tasks: int, sizes: LossSizes, g: Tasks, dz: Tasks, y: Tensor, change: Tasks) -> None:
    samples, known, outputs, _ = sizes
    rows, tiles = _loss_tiles(sizes)
    losses.loss_change[(tasks, triton.cdiv(samples, rows))](
        g.numbers, dz.numbers, y, change.numbers, g.step, dz.step, change.step, samples, known, outputs,
        CLASSES=not y.is_floating_point(), **tiles,
    )  # fmt: skip


def sum_rows(x: Tensor) -> Tensor:
    """The sum of rows [r, n], in pairs: neighbours first, then pairs of pairs."""
    rows, count = x.shape
    y = x.new_empty(count)
    halvings = (rows - 1).bit_length()
    block = max(16, min(256, 8192 >> halvings))
    losses.sum_rows[(triton.cdiv(count, block),)](x, y, rows, count, HALVINGS=halvings, B=block, num_warps=4)
    return y


def mean(tasks: int, samples: int, count: int, channels: int, x: Tasks, y: Tasks) -> None:
    """y [samples][channels] = the mean of x over `count` pixels."""
    tiles = {"C": channels, "BP": _power(count, 1, 64), "BC": _power(channels, 16, 64)}
    grid = (samples, triton.cdiv(channels, tiles["BC"]), tasks)
    pixels.mean[grid](x.numbers, y.numbers, x.step, y.step, count, **tiles)


def spread(tasks: int, samples: int, count: int, channels: int, gy: Tasks, gx: Tasks, *, add: bool) -> None:
    """The backward pass of `mean`."""
    tiles = {"C": channels, "BP": _power(count, 1, 64), "BC": _power(channels, 16, 64)}
    grid = (samples, triton.cdiv(channels, tiles["BC"]), tasks)
    pixels.spread[grid](gy.numbers, gx.numbers, gy.step, gx.step, count, ADD=add, **tiles)


def gathered(
    pictures: Tensor, turns: Tensor, values: Tensor, numbers: Tensor, shots: int, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Support and query pictures of episodes, [t, n, c, h, w].

    Args:
        pictures: bytes [n, h · w · c], colours last.
        turns: [4, h · w] int64: the places from which a picture turned by so many quarters takes its pixels.
        values: [256]: the numbers for bytes.
        numbers: [t, ways, 1 + shots + queries] int64: of each class the quarter turns, then its pictures.
        shots: support pictures of a class.
        shape: (h, w, c).
    """
    (tasks, ways), per_class, (height, width, channels) = numbers.shape[:2], numbers.shape[2] - 1, shape
    support, query = (
        torch.empty(tasks, ways * count, channels, height, width, device=pictures.device, dtype=values.dtype)
        for count in (shots, per_class - shots)
    )
    pixels.gather[(ways * per_class, tasks)](
        pictures, turns, values, numbers, support, query, ways, per_class, shots, turns.shape[1],
        CHANNELS=channels, B=_power(turns.shape[1], 16, 1024),
    )  # fmt: skip
    return support, query
