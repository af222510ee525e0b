"""Starts the kernels with the tiles that suit the sizes. Tensors of a task lie one after the other, `step` apart."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from metalearn.nn.gpu import losses, norms, products

MOST_ROWS = 1024
"""Rows of a norm that a program holds at once."""
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


class Window(NamedTuple):
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
    return max(least, min(most, triton.next_power_of_2(count)))


def _step(value: Tasks | None) -> int:
    return 0 if value is None else value.step


def _numbers(value: Tasks | None, other: Tasks) -> Tensor:
    """The numbers of a value, or those of another in the place of one that is not read."""
    return other.numbers if value is None else value.numbers


def product(
    tasks: int, samples: int, g: Window, images: Images, x: Tasks, w: Tasks, y: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, bias: Tasks | None = None,
) -> None:  # fmt: skip
    """y = x ∗ w (+ x2 ∗ w2) (+ bias)."""
    (x2, w2), rows = second or (x, w), samples * g.out_height * g.out_width
    bm, bn = 32, _power(g.outputs, 16, 64)
    bk = _power(g.inputs * g.kernel_height * g.kernel_width, 16, 64 if g.inputs % 64 == 0 and not second else 32)
    products.product[(triton.cdiv(rows, bm), triton.cdiv(g.outputs, bn), tasks)](
        x.numbers, w.numbers, x2.numbers, w2.numbers, _numbers(bias, x), y.numbers, x.step, w.step, x2.step, w2.step,
        _step(bias), y.step, samples, *images, **g.sizes(), PAIRS=1 + (second is not None), BIAS=bias is not None,
        BM=bm, BN=bn, BK=bk, PRECISION=precision(), num_warps=4, num_stages=3,
    )  # fmt: skip


def input_gradient(
    tasks: int, samples: int, g: Window, gy: Tasks, w: Tasks, gx: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, add: bool = False,
) -> None:  # fmt: skip
    """gx (+)= the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x ∗ w2⟩) by x."""
    gy2, w2 = second or (gy, w)
    rows = samples * triton.cdiv(g.height, g.stride) * triton.cdiv(g.width, g.stride)
    bm, bn, bk = 32, _power(g.inputs, 16, 64), _power(g.outputs, 16, 64 if g.outputs % 64 == 0 and not second else 32)
    products.input_gradient[(triton.cdiv(rows, bm) * g.stride**2, triton.cdiv(g.inputs, bn), tasks)](
        gy.numbers, w.numbers, gy2.numbers, w2.numbers, gx.numbers, gy.step, w.step, gy2.step, w2.step, gx.step,
        samples, **g.sizes(), PAIRS=1 + (second is not None), ADD=add, BM=bm, BN=bn, BK=bk, PRECISION=precision(),
        num_warps=4, num_stages=3,
    )  # fmt: skip


def weight_gradient(
    tasks: int, samples: int, g: Window, images: Images, x: Tasks, gy: Tasks, gw: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, gb: Tasks | None = None,
) -> None:  # fmt: skip
    """gw = the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x2 ∗ w⟩) by w, and gb that of ⟨gy, bias⟩ by the bias."""
    x2, gy2 = second or (x, gy)
    numbers = g.inputs * g.kernel_height * g.kernel_width
    bm, bn = _power(numbers, 16, 32), _power(g.outputs, 16, 64)
    products.weight_gradient[(triton.cdiv(numbers, bm), triton.cdiv(g.outputs, bn), tasks)](
        x.numbers, gy.numbers, x2.numbers, gy2.numbers, gw.numbers, _numbers(gb, gw), x.step, gy.step, x2.step,
        gy2.step, gw.step, _step(gb), samples, *images, **g.sizes(), PAIRS=1 + (second is not None),
        BIAS=gb is not None, BM=bm, BN=bn, BK=32, PRECISION=precision(), num_warps=4, num_stages=3,
    )  # fmt: skip


def _columns(rows: int, channels: int) -> dict[str, Any]:
    """The tiles of a norm: as many rows as a program can hold, of eight channels or more."""
    br = _power(rows, 16, MOST_ROWS)
    bc = _power(channels, 8, 8 if br > 256 else 16)
    return {"C": channels, "BC": bc, "BR": br, "ONE": rows <= br, "num_warps": max(4, min(16, br * bc // 512))}


class NormSizes(NamedTuple):
    """Rows of a norm, those of them that are measured, and channels."""

    rows: int
    measured: int
    channels: int


def norm(
    tasks: int, sizes: NormSizes, epsilon: float, slope: float, *, x: Tasks, scale: Tasks, shift: Tasks, mean: Tasks,
    rstd: Tasks, y: Tasks,
) -> None:  # fmt: skip
    tiles = _columns(sizes.rows, sizes.channels)
    norms.norm[(triton.cdiv(sizes.channels, tiles["BC"]), tasks)](
        x.numbers, scale.numbers, shift.numbers, mean.numbers, rstd.numbers, y.numbers, x.step, scale.step, mean.step,
        y.step, sizes.rows, sizes.measured, epsilon, slope, **tiles,
    )  # fmt: skip


def norm_backward(
    tasks: int, sizes: NormSizes, slope: float, *, gy: Tasks, x: Tasks, scale: Tasks, shift: Tasks, mean: Tasks,
    rstd: Tasks, gx: Tasks, g_scale: Tasks, g_shift: Tasks, moved: Tasks | None = None,
) -> None:  # fmt: skip
    """With `moved`, it is added to gx, and what lies at g_scale to the gradient of γ."""
    tiles = _columns(sizes.rows, sizes.channels)
    norms.norm_backward[(triton.cdiv(sizes.channels, tiles["BC"]), tasks)](
        gy.numbers, x.numbers, scale.numbers, shift.numbers, mean.numbers, rstd.numbers, _numbers(moved, gx),
        gx.numbers, g_scale.numbers, g_shift.numbers, gy.step, x.step, scale.step, mean.step, _step(moved), gx.step,
        g_scale.step, sizes.rows, sizes.measured, slope, ADD=moved is not None, **tiles,
    )  # fmt: skip


def norm_second(
    tasks: int, sizes: NormSizes, slope: float, *, x: Tasks, gy: Tasks, v: Tasks, v_scale: Tasks, v_shift: Tasks,
    scale: Tasks, shift: Tasks, mean: Tasks, rstd: Tasks, scale_gradient: Tasks, shift_gradient: Tasks, ggy: Tasks,
    hx: Tasks, h_scale: Tasks,
) -> None:  # fmt: skip
    tiles = _columns(sizes.rows, sizes.channels)
    norms.norm_second[(triton.cdiv(sizes.channels, tiles["BC"]), tasks)](
        x.numbers, gy.numbers, v.numbers, v_scale.numbers, v_shift.numbers, scale.numbers, shift.numbers, mean.numbers,
        rstd.numbers, scale_gradient.numbers, shift_gradient.numbers, ggy.numbers, hx.numbers, h_scale.numbers, x.step,
        gy.step, v.step, v_scale.step, scale.step, mean.step, scale_gradient.step, ggy.step, hx.step, h_scale.step,
        sizes.rows, sizes.measured, slope, **tiles,
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
