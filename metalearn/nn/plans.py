"""A network of known layers as kernels take it: each task's parameters in one row, and the layers' plan.

The numbers of a row lie in the order in which the kernels read them. A plan is made for one shape of inputs.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.backends import AnyKernels, kernels_for, torch_ops
from metalearn.nn.backends.c import ACTIVATIONS, LAYER, MULTIPLE, Kernels, LayerKind, filled
from metalearn.nn.layers import (
    EPSILON,
    Activation,
    ChannelsLast,
    Convolution,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    Mean,
    Norm,
    Params,
    Residual,
)

PACKED = "packed."
"""The prefix of the name of the one tensor [t, P] of packed parameters; a number follows, that of its layout."""


def is_packed(params: Params) -> bool:
    """Whether these are packed parameters."""
    return len(params) == 1 and next(iter(params)).startswith(PACKED)


class ParameterPlace(NamedTuple):
    """Where a parameter lies in a row: as a strided view of `shape`. The sizes are those of its own dimensions, but a
    flattened image in a linear layer's inputs has two: channels and pixels. The row has `vectors` of these output
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
        """Numbers of this layout on a device."""
        if device.type == "cpu":
            return getattr(self, name)  # type: ignore[no-any-return]
        if (name, device) not in self._moved:  # once: the host would wait for a copy, and a CUDA graph cannot have one
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
    """The sum over the tasks of [t, …], added in pairs: neighbours first, then pairs of pairs."""
    # Chunks are added in the same way, so the sum over all tasks has the same bits for chunks of 1, 2, 4, 8, … tasks.
    kernels = _kernels_for(values)
    if kernels is not None:
        return kernels.sum_rows(values.reshape(len(values), -1)).view(values.shape[1:])
    return torch_ops.sum_rows(values)


def _kernels_for(values: Tensor) -> "AnyKernels | None":
    """The kernels, if they can compute with these values: they are dense, and no graph is wanted."""
    with_graph = torch.is_grad_enabled() and values.requires_grad
    return kernels_for(values) if values.is_contiguous() and not with_graph else None


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


# Plans

MOST_PLANS = 16  # that a network keeps, one for each number of samples and shape of inputs: one may take megabytes
MOST_LAYERS = 96  # as kernels/network.c has it
# Pixels of a kernel that convolves other values than inputs: a plan lists the taps of every group of pixels, so it
# grows with their square.
MOST_TAPS = 49

Fields = dict[str, float]  # fields of a layer of kernels/network.c


class Windows(NamedTuple):
    """The windows of the inputs that a convolution takes, gathered before it."""

    convolution: Convolution


class Products(NamedTuple):
    """The products of windows with the kernels that `weight` names."""

    weight: str


class Step(NamedTuple):
    """A layer of the compiled network, and the values that it reads: 0 is the inputs, and i what step i gives."""

    layer: Layer | Windows | Products
    reads: tuple[int, ...]


def steps_of(layers: Sequence[Layer]) -> list[Step]:
    """The layers in the order in which the compiled network computes them."""
    steps: list[Step] = []

    def add(layer: Layer | Windows | Products, *reads: int) -> int:
        steps.append(Step(layer, reads))
        return len(steps)

    def through(layers: Sequence[Layer], value: int) -> int:
        for layer in layers:
            match layer:
                case ChannelsLast() | Flatten():
                    pass
                case Residual(main, around):
                    value = add(layer, through(main, value), through(around, value))
                case Convolution(weight) if value == 0:
                    value = add(Products(weight), add(Windows(layer), value))
                case _:
                    value = add(layer, value)
        return value

    through(layers, 0)
    return steps


def refusal(steps: Sequence[Step], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a network of these steps cannot be compiled, whatever its inputs; None: it can. `shapes` are those of the
    parameters, as far as they are known."""
    readers = Counter(value for step in steps for value in step.reads)
    for layer, reads in steps:
        match layer:
            case Residual() if 0 in reads:
                return "a branch of a sum of this network has no weights"
            case Norm() | Activation() | MaxPool() | Mean() if 0 in reads:
                return f"this network begins with {type(layer).__name__}, which has no weights"
            case Norm() if readers[reads[0]] > 1:
                return "a norm of this network shares its input with another layer"
            case Convolution(weight):
                height, width = shapes.get(weight, (0, 0))[-2:]
                if height * width > MOST_TAPS:
                    return f"kernels {weight} have {height}×{width} pixels; {MOST_TAPS} can be compiled as a whole"
    if len(steps) > MOST_LAYERS:
        return f"this network has {len(steps)} layers; {MOST_LAYERS} can be compiled as a whole"
    return None


class ValueSize(NamedTuple):
    """A value between layers: the size of its images. Only `used` of its channels are not zero."""

    height: int
    width: int
    channels: int
    used: int


class NetworkPlan(NamedTuple):
    """A network for one shape of inputs: what computes it, its compiled form, the last value, and the pixels of the
    smallest image that a norm takes; 0: there is no norm."""

    kernels: Any
    compiled: Any
    last: ValueSize
    fewest_pixels: int


def planned(
    steps: Sequence[Step], layout: Layout, shapes: Mapping[str, tuple[int, ...]], inputs: ValueSize
) -> tuple[list[Fields], ValueSize]:
    """The steps as layers of kernels/network.c, for one shape of inputs, and the last value. Raises ValueError if the
    values that a layer reads do not fit it."""
    values, layers = [inputs], list[Fields]()

    def at(**names: str) -> Fields:
        return {field: layout.places[name].offset for field, name in names.items()}

    def convolved(layer: Convolution, x: ValueSize) -> tuple[ValueSize, Fields]:
        """What a convolution of `x` gives, and the sizes of its kernels."""
        outputs, inputs, kernel, _ = shapes[layer.weight]
        if inputs != x.used or min(x.height, x.width) + 2 * layer.padding < kernel:
            raise ValueError(
                f"images of {x.used} channels and {x.height}×{x.width} pixels do not fit kernels {layer.weight} of "
                f"{inputs} channels and {kernel}×{kernel} pixels"
            )
        height, width = ((size + 2 * layer.padding - kernel) // layer.stride + 1 for size in (x.height, x.width))
        sizes: Fields = {"kernel": kernel, "stride": layer.stride, "padding": layer.padding}
        return ValueSize(height, width, filled(outputs), outputs), sizes

    for layer, reads in steps:
        x, *others = (values[value] for value in reads)
        to, kind, fields = x, LayerKind.CONVOLUTION, Fields()
        match layer:
            case Windows(convolution):
                to, fields = convolved(convolution, x)
                pixels = x.used * int(fields["kernel"]) ** 2
                to, kind = to._replace(channels=pixels, used=pixels), LayerKind.WINDOWS
            case Products(weight):
                outputs = shapes[weight][0]
                to = x._replace(channels=filled(outputs), used=outputs)
                fields = {"kernel": 1, "stride": 1, "padding": 0, **at(weight=weight)}
            case Convolution(weight):
                to, fields = convolved(layer, x)
                fields |= at(weight=weight)
            case Norm(scale, shift, slope):
                kind, fields = LayerKind.NORM, {"slope": slope, "epsilon": EPSILON, **at(weight=scale, bias=shift)}
            case Activation(name, slope):
                kind, fields = LayerKind.ACTIVATION, {"activation": ACTIVATIONS.index(name), "slope": slope}
            case MaxPool():
                if min(x.height, x.width) < 2:
                    raise ValueError(f"a map of {x.height}×{x.width} pixels cannot be pooled; it needs 2×2")
                to, kind = x._replace(height=x.height // 2, width=x.width // 2), LayerKind.POOL
            case Mean():
                to, kind = x._replace(height=1, width=1), LayerKind.MEAN
            case Linear(weight, bias):
                outputs, inputs_of_weight = shapes[weight]
                numbers = x.used * x.height * x.width
                if inputs_of_weight != numbers:
                    raise ValueError(f"{numbers} numbers do not fit {weight}, which takes {inputs_of_weight}")
                to, fields = ValueSize(1, 1, filled(outputs), outputs), at(weight=weight, bias=bias)
            case Residual():
                if [x] != others:
                    raise ValueError(f"the branches of a sum must have equal shapes: {x}, {others[0]}")
                kind = LayerKind.SUM
        read = dict(zip(("from", "other"), reads, strict=False))
        layers.append({"kind": kind, "bias": -1, **read, **to._asdict(), **fields})
        values.append(to)
    return layers, values[-1]


class ShapedNetwork:
    """A network whose parameters have known shapes: how they are packed, and the plans for shapes of inputs.

    Attributes:
        layers: of the network.
        key: the name of its packed parameters.
        layout: where each parameter lies in a row of packed parameters.
        refused: why the network cannot be compiled; None: it can.
    """

    def __init__(self, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]], key: str) -> None:
        self.layers, self.key = tuple(layers), key
        self._steps = steps_of(layers)
        self.refused = refusal(self._steps, shapes)
        self.layout = Layout(layers, shapes)
        self._shapes = shapes
        self._plans: dict[tuple[Any, ...], NetworkPlan] = {}
        self._making = threading.Lock()

    def plan(self, kernels: AnyKernels, samples: int, input_shape: tuple[int, ...]) -> NetworkPlan:
        """The plan for tasks of `samples` inputs. Those that were used last are kept, `MOST_PLANS` of them. Raises
        ValueError if the inputs do not fit the layers, or are too large for the offsets of the kernels."""
        key = (type(kernels), kernels.real, samples, input_shape)
        with self._making:
            plan = self._plans.pop(key, None)
            if plan is None:
                if isinstance(self.layers[0], ChannelsLast) and len(input_shape) != 3:
                    raise ValueError(f"the network takes images [channels, height, width], not {list(input_shape)}")
                image = input_shape if len(input_shape) == 3 else (math.prod(input_shape), 1, 1)
                inputs = ValueSize(image[1], image[2], image[0], image[0])
                fields, last = planned(self._steps, self.layout, self._shapes, inputs)
                layers = (LAYER * len(fields))(*(LAYER(**layer) for layer in fields))
                compiled = kernels.plan(layers, image, self.layout.size, samples)
                pixels = [layer["height"] * layer["width"] for layer in fields if layer["kind"] == LayerKind.NORM]
                plan = NetworkPlan(kernels, compiled, last, int(min(pixels, default=0)))
            self._plans[key] = plan
            if len(self._plans) > MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan
