"""Parameters in packed form: those of a task are one row of numbers, in the order in which the kernels read them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.layers import Convolution, Layer, Linear, Norm, Params, Residual

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


class Place(NamedTuple):
    """Where a parameter lies in a row: as a strided view of `shape`. The sizes are those of its own dimensions, but a
    flattened image in a linear layer's inputs has two: channels and pixels."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]

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
        self.places: dict[str, Place] = {}
        self.size = 0
        self._shapes = shapes
        self._add(layers, None)
        self._numbers = [math.prod(place.sizes) for place in self.places.values()]
        self._to_row, self._to_parameters = self._orders()

    def _add(self, layers: Sequence[Layer], channels: int | None) -> int | None:
        """Places the layers' parameters. `channels` are those of the input; None: they are not filled with zeros."""
        for layer in layers:
            match layer:
                case Convolution(weight):
                    shape = outputs, inputs, height, width = self._shapes[weight]
                    depth, to = inputs if channels is None else filled(inputs), filled(outputs)
                    self._place(weight, shape, (1, to, width * depth * to, depth * to), height * width * depth * to)
                    channels = outputs
                case Norm(scale, shift):
                    for name in (scale, shift):
                        self._place(name, self._shapes[name], (1,), filled(*self._shapes[name]))
                case Linear(weight, bias):
                    outputs, inputs = self._shapes[weight]
                    used = inputs if channels is None else channels
                    depth, to = inputs if channels is None else filled(used), filled(outputs)
                    pixels = inputs // used
                    self._place(weight, (outputs, used, pixels), (1, to, depth * to), pixels * depth * to)
                    self._place(bias, (outputs,), (1,), to)
                    channels = outputs
                case Residual(main, around):
                    after = self._add(main, channels)
                    self._add(around, channels)
                    channels = after
        return channels

    def _place(self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], size: int) -> None:
        self.places[name] = Place(self.size, shape, stride, self._shapes[name])
        self.size += size

    def _orders(self) -> tuple[Tensor, Tensor]:
        """For every number of a row its place in the parameters, one after the other with a zero at the end; and for
        every number of the parameters its place in a row."""
        total = sum(self._numbers)
        to_row, first = torch.full((self.size,), total), 0
        for place, count in zip(self.places.values(), self._numbers, strict=True):
            place.of(to_row).copy_(torch.arange(first, first + count).view(place.shape))
            first += count
        places = torch.arange(self.size)
        return to_row, torch.cat([place.of(places).flatten() for place in self.places.values()])

    def row(self, params: Sequence[Tensor]) -> Tensor:
        """Parameters in the order of the places, with any leading dimensions, as rows […, P]."""
        result: Tensor = _Rows.apply(self, *params)
        return result

    def pack(self, params: Sequence[Tensor]) -> Tensor:
        """As `row`, without a derivative."""
        lead = params[0].shape[: params[0].dim() - len(next(iter(self.places.values())).sizes)]
        flat = [value.reshape(*lead, -1) for value in params]
        return torch.cat([*flat, flat[0].new_zeros(*lead, 1)], dim=-1).index_select(-1, self._to_row)

    def unpack(self, row: Tensor) -> list[Tensor]:
        """Rows […, P] as the parameters in the order of the places."""
        parts = row.index_select(-1, self._to_parameters).split(self._numbers, dim=-1)
        return [
            part.view(*row.shape[:-1], *place.sizes) for part, place in zip(parts, self.places.values(), strict=True)
        ]


class _Rows(Function):
    """(layout, parameters) → rows."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *params: Tensor) -> Tensor:
        ctx.layout = layout
        return layout.pack(params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.layout.unpack(grads[0]))
