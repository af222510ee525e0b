"""The layers on a GPU, by Triton's kernels; and whole networks, layer by layer.

Tensors of a task lie one after the other, `step` apart. Kernels start with the tiles that suit the sizes. The sweeps of
a network are those of `kernels/network.c`, but a layer is computed for all tasks at once. All places are known before
the first call, nothing waits for the GPU, and no sum depends on the number of tasks.
"""

import ctypes
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

import metalearn.nn.backends.triton_attention as attention
import metalearn.nn.backends.triton_kernels as kernels  # not from the package, which imports this module
from metalearn.nn.backends.c import ACTIVATIONS, MULTIPLE, LayerKind, NetworkCall, filled
from metalearn.nn.backends.torch_ops import in_pairs
from metalearn.nn.surroundings import rounds_products

# What Triton did up to 3.9 without a word: a product and a sum round once. From 3.9 on it warns where none has chosen,
# and from 3.10 on it would round twice, which is slower and gives other bits.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

MOST_ROWS = 256  # of a norm, that one program computes
MOST_PARTS = 64  # programs that share the rows of a larger norm
MOST_SPLITS = 64  # programs that share the rows of a weight gradient
MOST_TILES = 1024  # programs of a task's weight gradient: enough for any GPU, so that more need not share the rows
# Rows from which on a product has large tiles. Its kernels are turned before, so that all it adds up lies in a row.
MANY_ROWS = 4096
WIDE_TILES = 256  # as MOST_TILES, of wide tiles: one or two fill a multiprocessor
ROUNDED = ("tf32", "bf16")  # precisions with wide tiles; three products would spill registers on an A100
MOST_NUMBERS = 4096  # of a tile of the loss
ATTENTION_TILE = 32  # rows and columns of the weights; with more, the second derivative spills its registers
ATTENTION_TENSORS = ("q", "k", "v", "mask", "u", "a", "b", "c", "o", "gq", "gk", "gv", "gu")


class Tasks(NamedTuple):
    """A value of every task: `numbers` of the first task begin at its first number, those of the next `step` further.
    0: all tasks share them."""

    numbers: Tensor
    step: int


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
    def dense(self) -> tuple[int, ...]:
        """How far apart samples, rows, columns and channels of images [samples][row][column][channel] lie."""
        row = self.width * self.inputs
        return self.height * row, row, self.inputs, 1

    def sizes(self) -> dict[str, int]:
        names = ("H", "W", "C", "OH", "OW", "CO", "KH", "KW", "STRIDE", "PADDING")
        return dict(zip(names, self, strict=True))


def precision() -> str:
    """How the products of layers round: as the config asks, or as float32."""
    return "bf16" if rounds_products() else _of_attention()


def _of_attention() -> str:
    """The same for attention, which bf16 does not round."""
    # Three products in TF32 have half the errors of float32's own products, and are as fast or faster.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "tf32x3" if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0) else "ieee"


def _columns(count: int, wide: bool) -> tuple[int, int]:
    """The columns of a tile, and those beside them."""
    # Of A rows and B columns, a tile reads (A + B) K numbers for 2 A B K operations, so that wide ones wait less for
    # memory. 160 are not 128 alone, which would compute 256.
    if wide and count % 160 == 0 and count % 128:
        return 128, 32
    return _power(count, 16, 128 if wide else 64), 0


def _power(count: int, least: int, most: int) -> int:
    """The smallest power of two that is not below `count`, within bounds."""
    return max(least, min(most, int(triton.next_power_of_2(count))))


def product(
    tasks: int, samples: int, g: ConvolutionSizes, images: tuple[int, ...], x: Tasks, w: Tasks, y: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, bias: Tasks | None = None,
) -> None:  # fmt: skip
    """y = x ∗ w (+ x2 ∗ w2) (+ bias)."""
    (x2, w2), rows = second or (x, w), samples * g.out_height * g.out_width
    few, numbers = rows <= 32, g.inputs * g.kernel_height * g.kernel_width
    many = rows >= MANY_ROWS and numbers >= 64
    wide = many and bias is None and precision() in ROUNDED
    bm, (bn, more) = 16 if few else 128 if many else 32, _columns(g.outputs, wide)
    bn = min(bn, 32) if few else bn
    bk = _power(numbers, 16, 64 if g.inputs % 64 == 0 and not many else 32)
    if many:
        w, w2 = (_turned(tasks, value, numbers, g.outputs) for value in (w, w2))
    row = bias or Tasks(x.numbers, 0)  # a kernel takes an address in any case: here, of what it does not read
    kernels.product[(triton.cdiv(rows, bm), triton.cdiv(g.outputs, bn + more), tasks)](
        x.numbers, w.numbers, x2.numbers, w2.numbers, row.numbers, y.numbers, x.step, w.step, x2.step, w2.step,
        row.step, y.step, samples, *images, **g.sizes(), PAIRS=1 + (second is not None), BIAS=bias is not None,
        TURNED=many, BM=bm, BN=bn, MORE=more, BK=bk, PRECISION=precision(), num_warps=2 if few else 8 if many else 4,
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
    bm, (bn, more) = 128 if many else 64 if rows > 128 else 32, _columns(g.inputs, many and precision() in ROUNDED)
    bk = _power(g.outputs, 16, 64 if g.outputs % 64 == 0 and bm == 32 else 32)
    kernels.input_gradient[(triton.cdiv(rows, bm) * g.stride**2, triton.cdiv(g.inputs, bn + more), tasks)](
        gy.numbers, w.numbers, gy2.numbers, w2.numbers, gx.numbers, gy.step, w.step, gy2.step, w2.step, gx.step,
        samples, **g.sizes(), PAIRS=1 + (second is not None), ADD=add, BM=bm, BN=bn, MORE=more, BK=bk,
        PRECISION=precision(), num_warps=8 if many else 4, num_stages=3,
    )  # fmt: skip


def weight_gradient(
    tasks: int, samples: int, g: ConvolutionSizes, images: tuple[int, ...], x: Tasks, gy: Tasks, gw: Tasks, *,
    second: tuple[Tasks, Tasks] | None = None, gb: Tasks | None = None,
) -> None:  # fmt: skip
    """gw = the derivative of ⟨gy, x ∗ w⟩ (+ ⟨gy2, x2 ∗ w⟩) by w, and gb that of ⟨gy, bias⟩ by the bias."""
    (x2, gy2), to_bias = second or (x, gy), gb or Tasks(gw.numbers, 0)
    numbers, rows = g.inputs * g.kernel_height * g.kernel_width, samples * g.out_height * g.out_width
    wide = rows >= MANY_ROWS and numbers >= 64 and gb is None and precision() in ROUNDED
    bm, (bn, more) = _power(numbers, 16, 128 if wide else 32), _columns(g.outputs, wide)
    tiles, most = triton.cdiv(numbers, bm) * triton.cdiv(g.outputs, bn + more), WIDE_TILES if wide else MOST_TILES
    of_a_split = 256 if numbers <= bm else 2048
    splits = max(1, min(MOST_SPLITS, rows // of_a_split, most // tiles)) if gb is None else 1
    span, size = 32 * triton.cdiv(rows, 32 * splits), numbers * g.outputs
    to = gw if splits == 1 else Tasks(gw.numbers.new_empty(tasks, splits, size), splits * size)
    kernels.weight_gradient[(triton.cdiv(numbers, bm) * splits, triton.cdiv(g.outputs, bn + more), tasks)](
        x.numbers, gy.numbers, x2.numbers, gy2.numbers, to.numbers, to_bias.numbers, x.step, gy.step, x2.step,
        gy2.step, to.step, to_bias.step, samples, splits, span, *images, **g.sizes(), PAIRS=1 + (second is not None),
        BIAS=gb is not None, BM=bm, BN=bn, MORE=more, BK=32, PRECISION=precision(),
        num_warps=8 if wide else 4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        kernels.sum_splits[(triton.cdiv(size, 256), tasks)](
            to.numbers, gw.numbers, gw.step, splits, size, SPLITS=triton.next_power_of_2(splits), B=256
        )  # fmt: skip


def _shares(
    tasks: int, rows: int, channels: int, sums: int, like: Tensor
) -> tuple[tuple[int, int, int], tuple[int, ...], Tensor, dict[str, int]]:
    """How programs share a norm: one for all rows of a few channels, or several that share the rows. The grid of a
    launch, its stages, a place for `sums` of every program, and the sizes that the kernels know."""
    # By the sizes alone: if it depended on the number of tasks, so would the bits of a task.
    if rows <= MOST_ROWS:
        br, bc = _power(rows, 16, MOST_ROWS), _power(channels, 16, 16)
        tiles = {"C": channels, "SPAN": br, "BC": bc, "BR": br, "PARTS": 1}
        return (1, triton.cdiv(channels, bc), tasks), (0,), like, tiles
    br, bc = 64, _power(channels, 16, 64)
    span = br * triton.cdiv(rows, br * MOST_PARTS)
    count = triton.cdiv(rows, span)
    tiles = {"C": channels, "SPAN": span, "BC": bc, "BR": br, "PARTS": triton.next_power_of_2(count)}
    return (count, triton.cdiv(channels, bc), tasks), (1, 2), like.new_empty(tasks, count, sums, channels), tiles


# Norms: `sizes` are rows, those of them that are measured, and channels.


def norm(
    tasks: int, sizes: Sequence[int], epsilon: float, slope: float, *, x: Tasks, scale: Tasks, shift: Tasks,
    mean: Tasks, rstd: Tasks, y: Tasks,
) -> None:  # fmt: skip
    rows, measured, channels = sizes
    grid, stages, parts, tiles = _shares(tasks, rows, channels, 2, x.numbers)
    for stage in stages:
        kernels.norm[grid](
            x.numbers, scale.numbers, shift.numbers, parts, mean.numbers, rstd.numbers, y.numbers, x.step, scale.step,
            mean.step, y.step, rows, measured, epsilon, slope, grid[0], STAGE=stage, **tiles, num_warps=4,
        )  # fmt: skip


def norm_backward(
    tasks: int, sizes: Sequence[int], slope: float, *, gy: Tasks, x: Tasks, scale: Tasks, shift: Tasks, mean: Tasks,
    rstd: Tasks, gx: Tasks, g_scale: Tasks, g_shift: Tasks, moved: Tasks | None = None,
    kept: tuple[Tasks, Tasks] | None = None,
) -> None:  # fmt: skip
    """With `moved`, it is added to gx, and what lies at g_scale to the gradient of γ. The sums of γ and β are `kept` in
    a second place, too."""
    rows, measured, channels = sizes
    grid, stages, parts, tiles = _shares(tasks, rows, channels, 2, x.numbers)
    (kept_scale, kept_shift), added = kept or (g_scale, g_shift), moved or Tasks(gx.numbers, 0)
    for stage in stages:
        kernels.norm_backward[grid](
            gy.numbers, x.numbers, scale.numbers, shift.numbers, mean.numbers, rstd.numbers, added.numbers, parts,
            gx.numbers, g_scale.numbers, g_shift.numbers, kept_scale.numbers, kept_shift.numbers, gy.step, x.step,
            scale.step, mean.step, added.step, gx.step, g_scale.step, kept_scale.step, rows, measured, slope, grid[0],
            ADD=moved is not None, KEEP=kept is not None, STAGE=stage, **tiles, num_warps=4,
        )  # fmt: skip


def norm_second(
    tasks: int, sizes: Sequence[int], slope: float, *, x: Tasks, gy: Tasks, v: Tasks, v_scale: Tasks, v_shift: Tasks,
    scale: Tasks, shift: Tasks, mean: Tasks, rstd: Tasks, scale_gradient: Tasks, shift_gradient: Tasks, ggy: Tasks,
    hx: Tasks, h_scale: Tasks,
) -> None:  # fmt: skip
    rows, measured, channels = sizes
    grid, stages, parts, tiles = _shares(tasks, rows, channels, 3, x.numbers)
    for stage in stages:
        kernels.norm_second[grid](
            x.numbers, gy.numbers, v.numbers, v_scale.numbers, v_shift.numbers, scale.numbers, shift.numbers,
            mean.numbers, rstd.numbers, scale_gradient.numbers, shift_gradient.numbers, parts, ggy.numbers,
            hx.numbers, h_scale.numbers, x.step, gy.step, v.step, v_scale.step, scale.step, mean.step,
            scale_gradient.step, ggy.step, hx.step, h_scale.step, rows, measured, slope, grid[0], STAGE=stage, **tiles,
            num_warps=4,
        )  # fmt: skip


def gathered(
    pictures: Tensor, turns: Tensor, values: Tensor, numbers: Tensor, shots: int, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Support and query pictures of episodes, [t, n, c, h, w], from `pictures` of bytes [n, h · w · c], with `shots`
    support pictures of a class; `shape` is (h, w, c). For `turns`, `values` and `numbers` see `kernels.gather`."""
    (tasks, ways), per_class, (height, width, channels) = numbers.shape[:2], numbers.shape[2] - 1, shape
    support, query = (
        torch.empty(tasks, ways * count, channels, height, width, device=pictures.device, dtype=values.dtype)
        for count in (shots, per_class - shots)
    )
    kernels.gather[(ways * per_class, tasks)](
        pictures, turns, values, numbers, support, query, ways, per_class, shots, turns.shape[1],
        CHANNELS=channels, B=_power(turns.shape[1], 16, 1024),
    )  # fmt: skip
    return support, query


# Networks

MOST_IN_LAYER = 2**31 - 1  # numbers of a layer of a task: within them, kernels count in 32 bits
MOST_SUMMED = 128  # rows that one program adds up


class _ValuePlaces:
    """The size of a value of a task, and the places of what belongs to it, as in `kernels/network.c`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.value = self.gradient = self.extra = self.tangent = self.change = self.moved = -1


class GpuPlan:
    """A network's plan for tasks of `samples` samples, as `metalearn.nn.backends.c.CompiledPlan`."""

    def __init__(self, layers: Any, image: Sequence[int], parameters: int, samples: int) -> None:
        self.layers, self.image, self.samples = list(layers), tuple(image), samples
        self.address = self  # what `network` takes; plans in C have an address
        self.places = [_ValuePlaces(0), *(_ValuePlaces(samples * x.height * x.width * x.channels) for x in self.layers)]
        self.windows = [self._window(number) for number in range(len(self.layers))]
        layers_and_places = [
            (number, layer, place)
            for number, (layer, place) in enumerate(zip(self.layers, self.places[1:], strict=True))
            if layer.kind != LayerKind.WINDOWS
        ]
        end = 0
        for _, layer, place in layers_and_places:
            place.value, end = end, end + filled(place.size)
            place.extra, end = end, end + (4 * layer.channels if layer.kind == LayerKind.NORM else 0)
        self.values = end
        readers = Counter(self.reads(number) for number in range(len(self.layers)))
        readers.update(layer.other for layer in self.layers if layer.kind == LayerKind.SUM)
        for number, layer, place in reversed(layers_and_places):
            if place.gradient < 0:
                place.gradient, end = end, end + filled(place.size)
            if layer.kind == LayerKind.SUM:  # both parts of a sum have its gradient
                for part in (self.reads(number), layer.other):
                    if part and readers[part] == 1:
                        self.places[part].gradient = place.gradient
        self.kept = end
        for number, layer, place in layers_and_places:
            place.tangent, end = end, end + filled(place.size)
            place.change, end = end, end + filled(place.size)
            if layer.kind == LayerKind.NORM:
                place.moved, end = end, end + filled(self.places[self.reads(number)].size)
        self.scratch = end
        largest = max(parameters, samples * math.prod(image), *(place.size for place in self.places))
        if largest > MOST_IN_LAYER:
            raise ValueError(
                f"{samples} inputs of {list(image)} numbers: a layer of a task has {largest} numbers, and the kernels "
                f"can count to {MOST_IN_LAYER}; METALEARN_KERNELS=torch computes the layers one by one"
            )

    def reads(self, number: int) -> int:
        """The value that a layer reads; the windows of inputs are never gathered."""
        value = int(getattr(self.layers[number], "from"))
        return value if self.differs(value) else 0

    def differs(self, value: int) -> bool:
        """Whether a value has a derivative."""
        return value > 0 and self.layers[value - 1].kind != LayerKind.WINDOWS

    def images(self, number: int) -> tuple[int, ...]:
        """As `ConvolutionSizes.dense`, for the images that a convolution reads: inputs are [channel][row][column]."""
        if getattr(self.layers[number], "from") == self.reads(number):
            return self.windows[number].dense
        channels, height, width = self.image
        return channels * height * width, width, 1, height * width

    def _window(self, number: int) -> ConvolutionSizes:
        layer = self.layers[number]
        if layer.kind != LayerKind.CONVOLUTION:
            return ConvolutionSizes(*[1] * 8)
        out, value = (layer.height, layer.width, layer.channels), getattr(layer, "from")
        if not value:
            return ConvolutionSizes(1, 1, math.prod(self.image), *out, 1, 1)
        before = self.layers[value - 1]
        if before.kind == LayerKind.WINDOWS:
            channels, height, width = self.image
            kernel = before.kernel
            return ConvolutionSizes(height, width, channels, *out, kernel, kernel, before.stride, before.padding)
        sizes = before.height, before.width, before.channels
        if layer.kernel == 0:  # a linear layer: all pixels at once
            return ConvolutionSizes(*sizes, *out, *sizes[:2])
        return ConvolutionSizes(*sizes, *out, layer.kernel, layer.kernel, layer.stride, layer.padding)


class _Sweep:
    """A call of a plan: where everything lies. What is kept for a later call, [t, plan.kept], or [t, plan.values] of
    the outputs, is a tensor of its own; behind its last place begins the scratch."""

    def __init__(self, plan: GpuPlan, call: NetworkCall, what: str) -> None:
        self.plan, self.call, self.tasks = plan, call, len(call.x)
        self.parameters = Tasks(call.parameters, call.parameters.stride(0))
        self.inputs = Tasks(call.x, call.x[0].numel())
        self._first = plan.values if what in ("outputs", "outputs_gradient") else plan.kept
        self._kept = call.x.new_empty(self.tasks, self._first) if call.kept is None else call.kept
        end = {"product": plan.scratch, "outputs_gradient": plan.kept}.get(what, self._first)
        self._scratch = call.x.new_empty(self.tasks, end - self._first)
        self._beside = _side_stream(call.x)

    def at(self, place: int) -> Tasks:
        """What lies at a place of every task."""
        if place >= self._first:
            return Tasks(self._scratch[:, place - self._first :], self._scratch.stride(0))
        return Tasks(self._kept[:, place:], self._kept.stride(0))

    def value(self, number: int) -> Tasks:
        return self.at(self.plan.places[number].value) if number else self.inputs

    def gradient(self, number: int) -> Tasks:
        return self.at(self.plan.places[number].gradient)

    def tangent(self, number: int) -> Tasks:
        return self.at(self.plan.places[number].tangent)

    def change(self, number: int) -> Tasks:
        return self.at(self.plan.places[number].change)

    def images_of(self, of: Callable[[int], Tasks], number: int) -> Tensor:
        """A value, or what `of` gives in its shape, as images [t, n, h, w, c], a view."""
        layer = self.plan.layers[number - 1]
        shape = (self.plan.samples, layer.height, layer.width, layer.channels)
        images: Tensor = of(number).numbers[:, : self.plan.places[number].size].unflatten(1, shape)
        return images

    def forward(self) -> None:
        """All values."""
        for number, layer in enumerate(self.plan.layers):
            v, x = number + 1, self.plan.reads(number)
            match layer.kind:
                case LayerKind.CONVOLUTION:
                    product(
                        self.tasks, self.plan.samples, self.plan.windows[number], self.plan.images(number),
                        self.value(x), _from(self.parameters, layer.weight), self.value(v),
                        bias=_from(self.parameters, layer.bias) if layer.bias >= 0 else None,
                    )  # fmt: skip
                case LayerKind.NORM:
                    sizes, reads = self._of_norm(number)
                    norm(self.tasks, sizes, layer.epsilon, layer.slope, **reads, y=self.value(v))
                case LayerKind.ACTIVATION:
                    before, after = self.images_of(self.value, x), self.images_of(self.value, v)
                    match ACTIVATIONS[layer.activation]:
                        case "leaky_relu":
                            after.copy_(torch.where(before > 0, before, layer.slope * before))
                        case "softplus":
                            after.copy_(torch.nn.functional.softplus(before))
                        case _:
                            torch.tanh(before, out=after)
                case LayerKind.POOL | LayerKind.MEAN | LayerKind.SUM:
                    self._linear(number, self.value)

    def _linear(self, number: int, of: Callable[[int], Tasks]) -> None:
        """A layer that computes tangents as it does values: a pool (by the maxima of the values), a mean or a sum."""
        layer, v, x = self.plan.layers[number], number + 1, self.plan.reads(number)
        before, result = self.images_of(of, x), self.images_of(of, v)
        if layer.kind == LayerKind.SUM:
            torch.add(before, self.images_of(of, layer.other), out=result)
        elif layer.kind == LayerKind.MEAN:
            self._average(number, kernels.mean, of(x), of(v))
        else:
            largest = self._largest(number)
            result.copy_(torch.stack(_corners(before)).gather(0, largest.unsqueeze(0))[0])

    def _average(self, number: int, kernel: Any, source: Tasks, to: Tasks, **options: bool) -> None:
        """A mean over pixels, or its backward pass `spread`."""
        before = self.plan.layers[self.plan.reads(number) - 1]
        pixels, channels = before.height * before.width, before.channels
        tiles = {"C": channels, "BP": _power(pixels, 1, 64), "BC": _power(channels, 16, 64)}
        grid = (self.plan.samples, triton.cdiv(channels, tiles["BC"]), self.tasks)
        kernel[grid](source.numbers, to.numbers, source.step, to.step, pixels, **options, **tiles)

    def _largest(self, number: int) -> Tensor:
        """Which of four pixels is the largest, for every pixel of a pool."""
        # The first one of equals, by argmax. It is found again in each sweep, which takes no memory in between.
        x = self.plan.reads(number)
        return torch.stack(_corners(self.images_of(self.value, x))).argmax(dim=0)

    def loss(self) -> None:
        """The losses and scores, and the gradients of the last values."""
        c, last = self.call, len(self.plan.layers)
        z, g = self.value(last), self.gradient(last)
        kernels.loss[(self.tasks,)](
            z.numbers, c.y, g.numbers, c.loss, c.score, z.step, g.step, self.plan.samples, c.support_size, c.outputs,
            **self._loss_tiles(),
        )  # fmt: skip

    def _loss_tiles(self) -> dict[str, int]:
        channels, y = self.plan.layers[-1].channels, self.call.y
        assert y is not None
        columns = triton.next_power_of_2(channels)
        rows = _power(self.plan.samples, 1, max(1, MOST_NUMBERS // columns))
        return {"C": channels, "CLASSES": not y.is_floating_point(), "BR": rows, "BC": columns}

    def forward_tangents(self, direction: Tasks, changes: Tasks) -> None:
        """The tangents of all values along the direction. The part of γ's product that a norm's tangent gives goes to
        `changes`, where `backward` adds the rest."""
        for number, layer in enumerate(self.plan.layers):
            v, x = number + 1, self.plan.reads(number)
            tangent = self.tangent(x) if self.plan.differs(x) else None
            match layer.kind:
                case LayerKind.CONVOLUTION:
                    moves = None if tangent is None else (tangent, _from(self.parameters, layer.weight))
                    product(
                        self.tasks, self.plan.samples, self.plan.windows[number], self.plan.images(number),
                        self.value(x), _from(direction, layer.weight), self.tangent(v), second=moves,
                        bias=_from(direction, layer.bias) if layer.bias >= 0 else None,
                    )  # fmt: skip
                case LayerKind.NORM:
                    assert tangent is not None
                    (sizes, reads), (scale_gradient, shift_gradient) = self._of_norm(number), self._norm_sums(number)
                    norm_second(
                        self.tasks, sizes, layer.slope, **reads, gy=self.gradient(v), v=tangent,
                        v_scale=_from(direction, layer.weight), v_shift=_from(direction, layer.bias),
                        scale_gradient=scale_gradient, shift_gradient=shift_gradient, ggy=self.tangent(v),
                        hx=self.at(self.plan.places[v].moved), h_scale=_from(changes, layer.weight),
                    )  # fmt: skip
                case LayerKind.ACTIVATION:
                    before, value = self.images_of(self.value, x), self.images_of(self.value, v)
                    result = self.images_of(self.tangent, v)
                    torch.mul(_steepness(layer, before, value), self.images_of(self.tangent, x), out=result)
                case LayerKind.POOL | LayerKind.MEAN | LayerKind.SUM:
                    self._linear(number, self.tangent)

    def loss_change(self) -> None:
        """The tangent of the gradient of the last values."""
        c, last, tiles = self.call, len(self.plan.layers), self._loss_tiles()
        g, dz, change = self.gradient(last), self.tangent(last), self.change(last)
        kernels.loss_change[(self.tasks, triton.cdiv(self.plan.samples, tiles["BR"]))](
            g.numbers, dz.numbers, c.y, change.numbers, g.step, dz.step, change.step, self.plan.samples,
            c.support_size, c.outputs, **tiles,
        )  # fmt: skip

    def backward(self, result: Tensor, direction: Tasks | None = None) -> None:
        """The gradients of all values, and those of the parameters [t, P]. With a `direction`, the tangents of these
        gradients: those of the parameters are the product."""
        changes, parameters = direction is not None, Tasks(result, result.stride(0))
        of = self.change if changes else self.gradient
        written: set[int] = set()
        with self._beside.joined():
            for number in reversed(range(len(self.plan.layers))):
                layer, v, x = self.plan.layers[number], number + 1, self.plan.reads(number)
                if layer.kind == LayerKind.WINDOWS:
                    continue
                gx = of(x) if self.plan.differs(x) else None
                add = x in written
                written.add(x)
                match layer.kind:
                    case LayerKind.CONVOLUTION:
                        self._convolution_backward(number, of(v), gx, parameters, add, direction)
                    case LayerKind.NORM:
                        assert gx is not None
                        sizes, reads = self._of_norm(number)
                        norm_backward(
                            self.tasks, sizes, layer.slope, **reads, gy=of(v), gx=gx,
                            g_scale=_from(parameters, layer.weight), g_shift=_from(parameters, layer.bias),
                            moved=self.at(self.plan.places[v].moved) if changes else None,
                            kept=None if changes else self._norm_sums(number),
                        )  # fmt: skip
                    case LayerKind.ACTIVATION:
                        before, value = self.images_of(self.value, x), self.images_of(self.value, v)
                        steep = _steepness(layer, before, value)
                        result_of_x = steep * self.images_of(of, v)
                        name = ACTIVATIONS[layer.activation]
                        if changes and name != "leaky_relu":
                            bend = (1 - value * value) * -2 * value if name == "tanh" else steep * (1 - steep)
                            moved = self.images_of(self.tangent, x)
                            result_of_x += bend * moved * self.images_of(self.gradient, v)
                        _give(result_of_x, self.images_of(of, x), add)
                    case LayerKind.MEAN:
                        self._average(number, kernels.spread, of(v), of(x), ADD=add)
                    case LayerKind.POOL:
                        gy, to = self.images_of(of, v), self.images_of(of, x)
                        if not add:
                            to.zero_()
                        largest = self._largest(number)
                        for which, corner in enumerate(_corners(to)):
                            corner.add_(torch.where(largest == which, gy, 0.0))
                    case LayerKind.SUM:
                        _give(self.images_of(of, v), self.images_of(of, x), add)
                        _give(self.images_of(of, v), self.images_of(of, layer.other), layer.other in written)
                        written.add(layer.other)

    def _convolution_backward(
        self, number: int, gy: Tasks, gx: Tasks | None, parameters: Tasks, add: bool, direction: Tasks | None
    ) -> None:
        """With a `direction`, gy is a change, and gx and the parameters get changes."""
        layer, v, x = self.plan.layers[number], number + 1, self.plan.reads(number)
        window, samples = self.plan.windows[number], self.plan.samples
        by_kernel = by_image = None
        if direction is not None:
            by_kernel = (self.tangent(x), self.gradient(v)) if gx is not None else None
            by_image = (self.gradient(v), _from(direction, layer.weight))
        with self._beside.after_all():  # nothing in this sweep reads it
            weight_gradient(
                self.tasks, samples, window, self.plan.images(number), self.value(x), gy,
                _from(parameters, layer.weight), second=by_kernel,
                gb=_from(parameters, layer.bias) if layer.bias >= 0 else None,
            )  # fmt: skip
        if gx is not None:
            weights = _from(self.parameters, layer.weight)
            input_gradient(self.tasks, samples, window, gy, weights, gx, second=by_image, add=add)

    def _of_norm(self, number: int) -> tuple[tuple[int, int, int], dict[str, Tasks]]:
        """The sizes of a norm, and what it and its derivatives read."""
        layer, samples, extra = self.plan.layers[number], self.plan.samples, self.plan.places[number + 1].extra
        pixels, channels = layer.height * layer.width, layer.channels
        sizes = samples * pixels, (self.call.support_size or samples) * pixels, channels
        return sizes, {
            "x": self.value(self.plan.reads(number)), "mean": self.at(extra), "rstd": self.at(extra + channels),
            "scale": _from(self.parameters, layer.weight), "shift": _from(self.parameters, layer.bias),
        }  # fmt: skip

    def _norm_sums(self, number: int) -> tuple[Tasks, Tasks]:
        """Where the gradients of γ and β are kept for the second derivative."""
        extra, channels = self.plan.places[number + 1].extra, self.plan.layers[number].channels
        return self.at(extra + 2 * channels), self.at(extra + 3 * channels)


def _from(values: Tasks, place: int) -> Tasks:
    """What lies at a place of every task's parameters, or of something like them."""
    return Tasks(values.numbers[:, place:], values.step)


def _give(value: Tensor, to: Tensor, add: bool) -> None:
    if to.data_ptr() == value.data_ptr():
        return  # both parts of a sum have its gradient
    if add:
        to.add_(value)
    else:
        to.copy_(value)


def _corners(images: Tensor) -> list[Tensor]:
    """The four pixels of every 2×2 pixels of images [t, n, h, w, c]; a last odd row or column has none."""
    height, width = images.shape[2] // 2 * 2, images.shape[3] // 2 * 2
    return [images[:, :, i:height:2, j:width:2] for i in (0, 1) for j in (0, 1)]


def _steepness(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """The derivative of an activation at x, where it is y."""
    match ACTIVATIONS[layer.activation]:
        case "leaky_relu":
            return torch.where(x > 0, 1.0, layer.slope)
        case "softplus":
            return torch.sigmoid(x)
        case _:
            return 1 - y * y


class _Beside:
    """A second stream for what nothing waits for until the end of a sweep; in a CUDA graph it becomes a branch."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._forked = stream, False

    @contextmanager
    def after_all(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        self._forked = True
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def joined(self) -> Iterator[None]:
        try:
            yield
        finally:  # after an error too: else the recording cannot be ended
            if self._forked:  # else the stream is no part of the recording
                torch.cuda.current_stream().wait_stream(self._stream)


_streams: dict[torch.device, Any] = {}


def _side_stream(x: Tensor) -> _Beside:
    # Outside of a graph, everything runs in order: there the host is the slower one.
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return _Beside(None)
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)  # of the lowest priority
    return _Beside(_streams[x.device])


class GpuKernels:
    """What `metalearn.nn.backends.c.Kernels` does on a CPU, in float32."""

    lanes = MULTIPLE
    widest_head = 128.0  # numbers of a head of attention: wider tiles would not fit the shared memory
    real = ctypes.c_float
    gathered = staticmethod(gathered)
    plan = staticmethod(GpuPlan)

    def convolution(self, by: str, geometry: Any, gy: Tensor, x: Tensor, weight: Tensor, step: int) -> None:
        """As `metalearn.nn.backends.c.Kernels.convolution`."""
        tasks, samples, height, width, inputs, *rest = (int(number) for number in geometry)
        g = ConvolutionSizes(height, width, inputs, *rest)
        if by == "gy":
            product(tasks, samples, g, g.dense, _dense(x), Tasks(weight, step), _dense(gy))
        elif by == "x":
            input_gradient(tasks, samples, g, _dense(gy), Tasks(weight, step), _dense(x))
        else:
            weight_gradient(tasks, samples, g, g.dense, _dense(x), _dense(gy), _dense(weight))

    def norm(self, name: str, sizes: Sequence[int], epsilon: float, slope: float, **tensors: Tensor) -> None:
        """As `metalearn.nn.backends.c.Kernels.norm`."""
        tasks, *of, scale_step = sizes
        values: dict[str, Any] = {key: _dense(value) for key, value in tensors.items()}
        values |= {key: Tasks(tensors[key], scale_step) for key in ("scale", "shift")}
        if name == "norm":
            norm(tasks, of, epsilon, slope, **values)
        elif name == "norm_backward":
            norm_backward(tasks, of, slope, **values)
        else:
            norm_second(tasks, of, slope, **values)

    def attention(self, name: str, every: int, scale: float, **tensors: Tensor | None) -> None:
        """As `metalearn.nn.backends.c.Kernels.attention`; heads have at most `widest_head` numbers."""
        q, k, v, mask, u, a, b, c, o, gq, gk, gv, gu = (tensors.get(key) for key in ATTENTION_TENSORS)
        assert q is not None and k is not None and v is not None
        (heads, n, d), (_, m, e), second = q.shape, v.shape, name == "attention_second"
        masks = (1, 1, 0, 0) if mask is None else (len(mask), every, mask[0].numel(), m if mask.shape[1] > 1 else 0)
        sizes = {
            "D": d, "E": e, "WIDE_D": _power(d, 16, 128), "WIDE_E": _power(e, 16, 128), "MASKED": mask is not None,
            "BM": ATTENTION_TILE, "BN": ATTENTION_TILE, "PRECISION": _of_attention(),
        }  # fmt: skip
        by_rows, by_columns = (heads * triton.cdiv(count, ATTENTION_TILE) for count in (n, m))
        numbers, others = (n, m, *masks, scale), (q if mask is None else mask, u, *((a, b, c) if second else (q, k, v)))
        if o is not None:
            attention.attention[(by_rows,)](q, k, v, others[0], o, *numbers, **sizes, num_warps=4, num_stages=1)
            return
        sums = q.new_empty(4 if second else 2, heads, n)
        options = {"SECOND": second, "BK": 16, "num_warps": 8 if second else 4, "num_stages": 1}
        attention.attention_rows[(by_rows,)](
            q, k, v, *others, sums, gq, gq if gu is None else gu, *numbers, **sizes, **options
        )
        attention.attention_columns[(by_columns,)](q, k, v, *others, sums, gk, gv, *numbers, **sizes, **options)

    def sum_rows(self, x: Tensor) -> Tensor:
        """As `metalearn.nn.backends.c.Kernels.sum_rows`."""
        while len(x) > MOST_SUMMED:
            x = in_pairs(x)
        rows, count = x.shape
        y, halvings = x.new_empty(count), (rows - 1).bit_length()
        block = max(16, min(256, 8192 >> halvings))
        kernels.sum_rows[(triton.cdiv(count, block),)](x, y, rows, count, HALVINGS=halvings, B=block, num_warps=4)
        return y

    def network(self, what: str, plan: GpuPlan, call: NetworkCall) -> None:
        """As `metalearn.nn.backends.c.Kernels.network`."""
        sweep, last = _Sweep(plan, call, what), len(plan.layers)
        match what:
            case "loss":
                sweep.forward()
                sweep.loss()
                if call.gradient is not None:
                    sweep.backward(call.gradient)
                    if call.rate is not None:
                        torch.add(call.parameters, call.gradient, alpha=-call.rate, out=call.gradient)
            case "product":
                assert call.direction is not None and call.product is not None
                direction = call.direction if call.rate is None else -call.rate * call.direction
                along = Tasks(direction, direction.stride(0))
                sweep.forward_tangents(along, Tasks(call.product, call.product.stride(0)))
                sweep.loss_change()
                sweep.backward(call.product, along)
                if call.rate is not None:
                    call.product.add_(call.direction)
            case "outputs":
                assert call.result is not None
                sweep.forward()
                values = sweep.images_of(sweep.value, last)
                call.result.copy_(values[:, call.support_size :].flatten(2, 3))
            case "outputs_gradient":
                assert call.result is not None and call.gradient is not None
                slope = sweep.images_of(sweep.gradient, last)
                slope[:, : call.support_size].zero_()
                slope[:, call.support_size :].copy_(call.result.unflatten(2, slope.shape[2:4]))
                sweep.backward(call.gradient)


def _dense(x: Tensor) -> Tasks:
    return Tasks(x, x[0].numel())
