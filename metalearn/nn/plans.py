"""Plans of the compiled network: its layers as kernels/network.c takes them, for one shape of inputs."""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
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
from metalearn.nn.native import LAYER, CompiledPlan, Kernels
from metalearn.nn.norm import EPSILON
from metalearn.nn.packing import Layout, filled

MOST_PLANS = 16
"""Plans that a network keeps, one for each number of samples and shape of inputs. One may take megabytes."""

MOST_LAYERS, MOST_TAPS = 96, 49
"""Compiled layers (kernels/network.c), and pixels of a kernel that convolves other values than inputs (taps.h)."""


def refusal(layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Why a network of these layers cannot be compiled, whatever its inputs; None: it can. `shapes` are those of the
    parameters, as far as they are known."""
    walk = _Walk(shapes)
    walk.through(layers, 0)
    if walk.count > MOST_LAYERS:
        walk.refused.append(f"this network has {walk.count} layers; {MOST_LAYERS} can be compiled as a whole")
    if any(walk.readers[value] > 1 for value in walk.normalised):
        walk.refused.append("a norm of this network shares its input with another layer")
    return walk.refused[0] if walk.refused else None


class _Walk:
    """Goes through layers as `_Compiler` does, without the sizes of images. Value 0 is the inputs.

    Attributes:
        count: how many compiled layers there are.
        readers: how many layers read a value.
        normalised: the values that norms read.
        refused: what cannot be compiled.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self.count = 0
        self.readers: Counter[int] = Counter()
        self.normalised: list[int] = []
        self.refused: list[str] = []

    def through(self, layers: Sequence[Layer], value: int) -> int:
        """Goes through the layers behind `value`; gives the last value."""
        for layer in layers:
            value = self._behind(layer, value)
        return value

    def _behind(self, layer: Layer, x: int) -> int:
        match layer:
            case ChannelsLast() | Flatten():
                return x
            case Residual(main, around):
                ends = self.through(main, x), self.through(around, x)
                if 0 in ends:
                    self.refused.append("a branch of a sum of this network has no weights")
                return self._new(*ends)
            case Convolution() if x == 0:
                return self._new(self._new(0))  # the windows are a layer of their own
            case Convolution(weight):
                height, width = self._shapes.get(weight, (0, 0))[-2:]
                if height * width > MOST_TAPS:
                    self.refused.append(
                        f"kernels {weight} have {height}×{width} pixels; {MOST_TAPS} can be compiled as a whole"
                    )
            case Norm() | Activation() | MaxPool() | Mean() if x == 0:
                self.refused.append(f"this network begins with {type(layer).__name__}, which has no weights")
            case Norm():
                self.normalised.append(x)
        return self._new(x)

    def _new(self, *read: int) -> int:
        self.readers.update(read)
        self.count += 1
        return self.count


class Value(NamedTuple):
    """A value between layers: its number, and the size of its images. Only `used` of its channels are not zero."""

    number: int
    height: int
    width: int
    channels: int
    used: int


class Plan(NamedTuple):
    """A network for one shape of inputs: what computes it, its compiled form, the last value, and the pixels of the
    smallest image that a norm takes; 0: there is no norm."""

    kernels: Kernels
    compiled: CompiledPlan
    last: Value
    fewest_pixels: int


class _Compiler:
    """Turns layers into those of kernels/network.c, for one shape of inputs."""

    WINDOWS, CONVOLUTION, NORM, ACTIVATION, POOL, MEAN, SUM = range(7)
    ACTIVATIONS = ("leaky_relu", "softplus", "tanh")

    def __init__(self, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._layout, self._shapes = layout, shapes
        self.layers: list[dict[str, float]] = []

    def add(self, layers: Sequence[Layer], value: Value) -> Value:
        """Adds the layers behind `value`; gives the last value."""
        for layer in layers:
            value = self._added(layer, value)
        return value

    def _added(self, layer: Layer, x: Value) -> Value:
        match layer:
            case ChannelsLast() | Flatten():
                return x
            case Convolution(weight, stride, padding):
                return self._convolution(weight, stride, padding, x)
            case Norm(scale, shift, slope):
                places = self._at(weight=scale, bias=shift)
                return self._new(self.NORM, x, x, slope=slope, epsilon=EPSILON, **places)
            case Activation(name, slope):
                return self._new(self.ACTIVATION, x, x, activation=self.ACTIVATIONS.index(name), slope=slope)
            case MaxPool():
                if min(x.height, x.width) < 2:
                    raise ValueError(f"a map of {x.height}×{x.width} pixels cannot be pooled; it needs 2×2")
                return self._new(self.POOL, x, x._replace(height=x.height // 2, width=x.width // 2))
            case Mean():
                return self._new(self.MEAN, x, x._replace(height=1, width=1))
            case Linear(weight, bias):
                outputs, inputs = self._shapes[weight]
                if inputs != x.used * x.height * x.width:
                    raise ValueError(f"{x.used * x.height * x.width} numbers do not fit {weight}, which takes {inputs}")
                to = Value(0, 1, 1, filled(outputs), outputs)
                return self._new(self.CONVOLUTION, x, to, **self._at(weight=weight, bias=bias))
            case Residual(main, around):
                first, second = self.add(main, x), self.add(around, x)
                if first[1:] != second[1:]:
                    raise ValueError(f"the branches of a sum must have equal shapes: {first}, {second}")
                return self._new(self.SUM, first, first, other=second.number)

    def _convolution(self, weight: str, stride: int, padding: int, x: Value) -> Value:
        outputs, inputs, kernel, _ = self._shapes[weight]
        if inputs != x.used or min(x.height, x.width) + 2 * padding < kernel:
            raise ValueError(
                f"images of {x.used} channels and {x.height}×{x.width} pixels do not fit kernels {weight} of {inputs} "
                f"channels and {kernel}×{kernel} pixels"
            )
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (x.height, x.width))
        if x.number == 0:  # of images, the windows are gathered first
            seen = x.used * kernel**2
            x = self._new(
                self.WINDOWS, x, Value(0, height, width, seen, seen), kernel=kernel, stride=stride, padding=padding
            )
            kernel, stride, padding = 1, 1, 0
        to = Value(0, height, width, filled(outputs), outputs)
        return self._new(
            self.CONVOLUTION, x, to, kernel=kernel, stride=stride, padding=padding, **self._at(weight=weight)
        )

    def _at(self, **names: str) -> dict[str, int]:
        return {field: self._layout.places[name].offset for field, name in names.items()}

    def _new(self, kind: int, before: Value, to: Value, **fields: float) -> Value:
        sizes = {"height": to.height, "width": to.width, "channels": to.channels, "used": to.used}
        self.layers.append({"kind": kind, "from": before.number, "bias": -1, **sizes, **fields})
        return to._replace(number=len(self.layers))


class Shaped:
    """A network whose parameters have known shapes: how they are packed, and the plans for shapes of inputs.

    Attributes:
        layers: of the network.
        key: the name of its packed parameters.
        layout: where each parameter lies in a row of packed parameters.
        refused: why the network cannot be compiled; None: it can.
    """

    def __init__(self, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]], key: str) -> None:
        self.layers, self.key = tuple(layers), key
        self.refused = refusal(layers, shapes)
        self.layout = Layout(layers, shapes)
        self._shapes = shapes
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._making = threading.Lock()

    def plan(self, kernels: Kernels, samples: int, input_shape: tuple[int, ...]) -> Plan:
        """The plan for tasks of `samples` inputs. Those that were used last are kept, `MOST_PLANS` of them.

        Raises:
            ValueError: the inputs do not fit the layers, or are too large for the offsets of the kernels.
        """
        key = (kernels.real, samples, input_shape)
        with self._making:
            plan = self._plans.pop(key, None) or self._made(kernels, samples, input_shape)
            self._plans[key] = plan
            if len(self._plans) > MOST_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def _made(self, kernels: Kernels, samples: int, input_shape: tuple[int, ...]) -> Plan:
        if isinstance(self.layers[0], ChannelsLast) and len(input_shape) != 3:
            raise ValueError(f"the network takes images [channels, height, width], not {list(input_shape)}")
        image = input_shape if len(input_shape) == 3 else (math.prod(input_shape), 1, 1)
        compiler = _Compiler(self.layout, self._shapes)
        last = compiler.add(self.layers, Value(0, image[1], image[2], image[0], image[0]))
        layers = (LAYER * len(compiler.layers))(*(LAYER(**layer) for layer in compiler.layers))
        plan = kernels.plan(layers, image, self.layout.size, samples)
        pixels = [layer["height"] * layer["width"] for layer in compiler.layers if layer["kind"] == compiler.NORM]
        fewest = int(min(pixels, default=0))
        return Plan(kernels, plan, last, fewest)
