"""Parameters in packed form: those of a task are one row of numbers, in the order in which the kernels read them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.layers import Convolution, Layer, Linear, Norm, Params, Residual
from metalearn.nn.native import AnyKernels, Kernels, compiled_for

PACKED = "packed."
"""The prefix of the name of the one tensor [t, P] of packed parameters; a number follows, that of its layout."""

MULTIPLE = 16
"""Channels are filled with zeros up to a multiple of this, the widest vector of the kernels. They stay zero: their
gradients are zero."""


def is_packed(params: Params) -> bool:
    """Whether these are packed parameters."""
    return len(params) == 1 and next(iter(params)).startswith(PACKED)


def filled(channels: int) -> int:
    """The channels with the zeros behind them."""
    return -(-channels // MULTIPLE) * MULTIPLE


class ParameterPlace(NamedTuple):
    """Where a parameter lies in a row: as a strided view of `shape`. The sizes are those of its own dimensions, but a
    flattened image in a linear layer's inputs has two: channels and pixels. The row has `vectors` of so many output
    `channels` for it, zeros included."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]
    vectors: int
    channels: int

    def of(self, row: Tensor) -> Tensor:
        """The parameter in a dense `row` [P], a view."""
        return row.as_strided(self.shape, self.stride, self.offset)


class Layout:
    """The places of all parameters in a row, from the layers and the parameters' shapes.

    Attributes:
        places: by name, in the order of the layers.
        size: numbers of a row.
    """

    def __init__(self, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.places: dict[str, ParameterPlace] = {}
        self.size = 0
        self._shapes = shapes
        self._add(layers, None)
        self._numbers = [math.prod(place.sizes) for place in self.places.values()]
        self._count = sum(self._numbers)
        # For every number of a row its place in the parameters, one after the other with a zero at the end; and for
        # every number of the parameters its place in a row.
        self._to_row, first = torch.full((self.size,), self._count, dtype=torch.int32), 0
        for place, count in zip(self.places.values(), self._numbers, strict=True):
            place.of(self._to_row).copy_(torch.arange(first, first + count).view(place.shape))
            first += count
        row = torch.arange(self.size)
        self._to_parameters = torch.cat([place.of(row).flatten() for place in self.places.values()])
        # The tiles of `rows.c`: first number, rows and step of every `MULTIPLE` channels of a parameter.
        self._tiles = torch.tensor([
            (place.offset + channel, place.vectors, place.channels)
            for place in self.places.values()
            for channel in range(0, place.channels, MULTIPLE)
        ])  # fmt: skip
        self._at: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}
        self._moved: dict[tuple[str, torch.device], Tensor] = {}

    def _add(self, layers: Sequence[Layer], channels: int | None) -> int | None:
        """Places the layers' parameters. `channels` are those of the input; None: they are not filled with zeros."""
        for layer in layers:
            match layer:
                case Convolution(weight):
                    shape = outputs, inputs, height, width = self._shapes[weight]
                    depth, to = inputs if channels is None else filled(inputs), filled(outputs)
                    self._place(weight, shape, (1, to, width * depth * to, depth * to), height * width * depth, to)
                    channels = outputs
                case Norm(scale, shift):
                    for name in (scale, shift):
                        self._place(name, self._shapes[name], (1,), 1, filled(*self._shapes[name]))
                case Linear(weight, bias):
                    outputs, inputs = self._shapes[weight]
                    used = inputs if channels is None else channels
                    depth, to = inputs if channels is None else filled(used), filled(outputs)
                    pixels = inputs // used
                    self._place(weight, (outputs, used, pixels), (1, to, depth * to), pixels * depth, to)
                    self._place(bias, (outputs,), (1,), 1, to)
                    channels = outputs
                case Residual(main, around):
                    after = self._add(main, channels)
                    self._add(around, channels)
                    channels = after
        return channels

    def _place(self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], vectors: int, channels: int) -> None:
        self.places[name] = ParameterPlace(self.size, shape, stride, self._shapes[name], vectors, channels)
        self.size += vectors * channels

    def rows(self, params: Sequence[Tensor], tasks: int) -> Tensor:
        """Parameters in the order of the places as rows [t, P], which share memory."""
        result: Tensor = _Rows.apply(self, tasks, *params)
        return result

    def pack(self, params: Sequence[Tensor]) -> Tensor:
        """The parameters as one row [P]."""
        flat = [value.reshape(-1) for value in params]
        kernels = _kernels_for(flat[0])
        if isinstance(kernels, Kernels):
            return kernels.pack(torch.cat(flat), self._tiles, self._to_row)
        return torch.cat([*flat, flat[0].new_zeros(1)])[self._on(flat[0].device, "_to_row")]

    def _on(self, device: torch.device, name: str) -> Tensor:
        """Numbers of this layout on a device. A GPU gets them once: a copy would be waited for."""
        if device.type == "cpu":
            return getattr(self, name)  # type: ignore[no-any-return]
        if (name, device) not in self._moved:
            self._moved[name, device] = getattr(self, name).to(device, torch.int64)
        return self._moved[name, device]

    def replaced(self, row: Tensor, values: Params) -> Tensor:
        """Rows [t, P] with other values of some parameters: [*shape], which all tasks share, or [t, *shape]."""
        names = tuple(name for name in self.places if name in values)
        at = names, row.device
        if at not in self._at:
            numbers = dict(zip(self.places, self._to_parameters.split(self._numbers), strict=True))
            self._at[at] = torch.cat([numbers[name] for name in names]).to(row.device)
        flat: list[Tensor] = []
        for name in names:
            shared = values[name].dim() == len(self.places[name].sizes)
            flat.append(_Shared.apply(values[name].reshape(-1), len(row)) if shared else values[name].flatten(1))
        return row.index_copy(1, self._at[at], torch.cat(flat, dim=1))

    def unpack(self, row: Tensor) -> list[Tensor]:
        """Rows […, P] as the parameters in the order of the places."""
        kernels = _kernels_for(row) if row.dim() == 1 else None
        if isinstance(kernels, Kernels):
            flat = kernels.unpack(row, self._tiles, self._to_row, self._count)
        else:
            flat = row.index_select(-1, self._on(row.device, "_to_parameters"))
        parts = zip(flat.split(self._numbers, dim=-1), self.places.values(), strict=True)
        return [part.view(*row.shape[:-1], *place.sizes) for part, place in parts]


def sum_of_tasks(values: Tensor) -> Tensor:
    """The sum over the tasks of [t, …], added in pairs: neighbours first, then pairs of pairs. Chunks are added in the
    same way, so the sum over all tasks has the same bits for chunks of 1, 2, 4, 8, … tasks."""
    kernels = _kernels_for(values)
    if kernels is not None:
        return kernels.sum_rows(values.reshape(len(values), -1)).view(values.shape[1:])
    while len(values) > 1:
        values = in_pairs(values)
    return values[0]


def in_pairs(values: Tensor) -> Tensor:
    """The sums of neighbours; of an odd number, the last one as it is."""
    even = len(values) // 2 * 2
    pairs = values[0:even:2] + values[1:even:2]
    return pairs if even == len(values) else torch.cat([pairs, values[even:]])


def _kernels_for(values: Tensor) -> "AnyKernels | None":
    """The kernels, if they can compute with these values: they are dense, and no graph is wanted."""
    with_graph = torch.is_grad_enabled() and values.requires_grad
    return compiled_for(values) if values.is_contiguous() and not with_graph else None


class _Rows(Function):
    """(layout, tasks, parameters) → rows."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, tasks: int, *params: Tensor) -> Tensor:
        ctx.layout = layout
        return layout.pack(params).expand(tasks, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.layout.unpack(sum_of_tasks(grads[0])))


class _Shared(Function):
    """(values, tasks) → the values of every task."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tasks: int) -> Tensor:
        return values.expand(tasks, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_of_tasks(grads[0]), None
