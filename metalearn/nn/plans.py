"""Plans of the compiled network: its layers as kernels/network.c takes them, for one shape of inputs."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from metalearn.nn.layers import (
    Activation,
    ChannelsLast,
    Convolution,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    Mean,
    Norm,
    Residual,
)
from metalearn.nn.native import LAYER, AnyKernels
from metalearn.nn.norm import EPSILON
from metalearn.nn.packing import Layout, filled

MOST_PLANS = 16
"""Plans that a network keeps, one for each number of samples and shape of inputs. One may take megabytes."""

MOST_LAYERS, MOST_TAPS = 96, 49
"""Compiled layers (kernels/network.c), and pixels of a kernel that convolves other values than inputs: a plan lists the
taps of every group of pixels, so it grows with their square."""


Fields = dict[str, float]
"""Fields of a layer of kernels/network.c."""


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


class LayerKind(IntEnum):
    """`enum kind` of kernels/network.h."""

    WINDOWS, CONVOLUTION, NORM, ACTIVATION, POOL, MEAN, SUM = range(7)


ACTIVATIONS = ("leaky_relu", "softplus", "tanh")
"""By their numbers in kernels/network.h."""


class _Compiler:
    """Turns steps into the layers of kernels/network.c, for one shape of inputs."""

    def __init__(self, layout: Layout, shapes: Mapping[str, tuple[int, ...]], inputs: ValueSize) -> None:
        self._layout, self._shapes = layout, shapes
        self._values = [inputs]
        self.layers: list[Fields] = []

    @property
    def last(self) -> ValueSize:
        """The last value."""
        return self._values[-1]

    def add(self, step: Step) -> None:
        """Adds a step.

        Raises:
            ValueError: the values that it reads do not fit it.
        """
        to, kind, fields = self._compiled(step.layer, *(self._values[value] for value in step.reads))
        read = dict(zip(("from", "other"), step.reads, strict=False))
        self.layers.append({"kind": kind, "bias": -1, **read, **to._asdict(), **fields})
        self._values.append(to)

    def _compiled(
        self, layer: Layer | Windows | Products, x: ValueSize, *others: ValueSize
    ) -> tuple[ValueSize, int, Fields]:
        """The value that a layer gives, its kind, and its further fields."""
        match layer:
            case Windows(convolution):
                to, sizes = self._convolution(convolution, x)
                seen = x.used * int(sizes["kernel"]) ** 2
                return to._replace(channels=seen, used=seen), LayerKind.WINDOWS, sizes
            case Products(weight):
                outputs = self._shapes[weight][0]
                to = x._replace(channels=filled(outputs), used=outputs)
                return to, LayerKind.CONVOLUTION, {"kernel": 1, "stride": 1, "padding": 0, **self._at(weight=weight)}
            case Convolution(weight):
                to, sizes = self._convolution(layer, x)
                return to, LayerKind.CONVOLUTION, sizes | self._at(weight=weight)
            case Norm(scale, shift, slope):
                return x, LayerKind.NORM, {"slope": slope, "epsilon": EPSILON, **self._at(weight=scale, bias=shift)}
            case Activation(name, slope):
                return x, LayerKind.ACTIVATION, {"activation": ACTIVATIONS.index(name), "slope": slope}
            case MaxPool():
                if min(x.height, x.width) < 2:
                    raise ValueError(f"a map of {x.height}×{x.width} pixels cannot be pooled; it needs 2×2")
                return x._replace(height=x.height // 2, width=x.width // 2), LayerKind.POOL, {}
            case Mean():
                return x._replace(height=1, width=1), LayerKind.MEAN, {}
            case Linear(weight, bias):
                outputs, inputs = self._shapes[weight]
                if inputs != x.used * x.height * x.width:
                    raise ValueError(f"{x.used * x.height * x.width} numbers do not fit {weight}, which takes {inputs}")
                return (
                    ValueSize(1, 1, filled(outputs), outputs),
                    LayerKind.CONVOLUTION,
                    self._at(weight=weight, bias=bias),
                )
            case Residual():
                if (x,) != others:
                    raise ValueError(f"the branches of a sum must have equal shapes: {x}, {others[0]}")
                return x, LayerKind.SUM, {}
        raise AssertionError(f"{layer}: is no step")

    def _convolution(self, layer: Convolution, x: ValueSize) -> tuple[ValueSize, Fields]:
        """What a convolution of `x` gives, and the sizes of its kernels."""
        outputs, inputs, kernel, _ = self._shapes[layer.weight]
        if inputs != x.used or min(x.height, x.width) + 2 * layer.padding < kernel:
            raise ValueError(
                f"images of {x.used} channels and {x.height}×{x.width} pixels do not fit kernels {layer.weight} of "
                f"{inputs} channels and {kernel}×{kernel} pixels"
            )
        height, width = ((size + 2 * layer.padding - kernel) // layer.stride + 1 for size in (x.height, x.width))
        sizes: Fields = {"kernel": kernel, "stride": layer.stride, "padding": layer.padding}
        return ValueSize(height, width, filled(outputs), outputs), sizes

    def _at(self, **names: str) -> Fields:
        return {field: self._layout.places[name].offset for field, name in names.items()}


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
        """The plan for tasks of `samples` inputs. Those that were used last are kept, `MOST_PLANS` of them.

        Raises:
            ValueError: the inputs do not fit the layers, or are too large for the offsets of the kernels.
        """
        key = (type(kernels), kernels.real, samples, input_shape)
        with self._making:
            plan = self._plans.pop(key, None)
            if plan is None:
                if isinstance(self.layers[0], ChannelsLast) and len(input_shape) != 3:
                    raise ValueError(f"the network takes images [channels, height, width], not {list(input_shape)}")
                image = input_shape if len(input_shape) == 3 else (math.prod(input_shape), 1, 1)
                compiler = _Compiler(self.layout, self._shapes, ValueSize(image[1], image[2], image[0], image[0]))
                for step in self._steps:
                    compiler.add(step)
                fields = compiler.layers
                layers = (LAYER * len(fields))(*(LAYER(**layer) for layer in fields))
                compiled = kernels.plan(layers, image, self.layout.size, samples)
                pixels = [layer["height"] * layer["width"] for layer in fields if layer["kind"] == LayerKind.NORM]
                plan = NetworkPlan(kernels, compiled, compiler.last, int(min(pixels, default=0)))
            self._plans[key] = plan
            if len(self._plans) > MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan
