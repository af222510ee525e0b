"""A whole network on a GPU: the loss of every task, its gradient and its Hessian-vector product, layer by layer.

The sweeps are those of `kernels/network.c`; but a layer is computed for all tasks at once. All places are known before
the first call, nothing waits for the GPU, and no sum depends on the number of tasks.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metalearn.nn.gpu import launch
from metalearn.nn.gpu.launch import ConvolutionSizes, Images, LossSizes, NormSizes, Tasks
from metalearn.nn.native import NetworkCall
from metalearn.nn.packing import MULTIPLE, filled, in_pairs
from metalearn.nn.plans import ACTIVATIONS, LayerKind

MOST_NUMBERS = 2**31 - 1
"""Numbers of a layer of a task: within them, kernels count in 32 bits."""

MOST_SUMMED = 128
"""Rows that one program adds up."""


class _ValuePlaces:
    """The size of a value of a task, and the places of what belongs to it, as in `kernels/network.c`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.value = self.gradient = self.extra = self.tangent = self.change = self.moved = -1


class GpuPlan:
    """A network's plan for tasks of `samples` samples.

    Attributes:
        kept: how many numbers of a task the product needs.
        values: how many numbers of a task the gradient of its outputs needs.
    """

    def __init__(self, layers: Any, image: Sequence[int], parameters: int, samples: int) -> None:
        self.layers, self.image, self.parameters, self.samples = list(layers), tuple(image), parameters, samples
        self.address = self
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
            place.extra, end = end, end + (4 * int(layer.channels) if layer.kind == LayerKind.NORM else 0)
        self.values = end
        self.kept = end = self._lay_out_gradients(end)
        for number, layer, place in layers_and_places:
            place.tangent, end = end, end + filled(place.size)
            place.change, end = end, end + filled(place.size)
            if layer.kind == LayerKind.NORM:
                place.moved, end = end, end + filled(self.places[self.reads(number)].size)
        self.scratch = end
        largest = max(parameters, samples * math.prod(image), *(place.size for place in self.places))
        if largest > MOST_NUMBERS:
            raise ValueError(
                f"{samples} inputs of {list(image)} numbers: a layer of a task has {largest} numbers, and the kernels "
                f"can count to {MOST_NUMBERS}; METALEARN_KERNELS=torch computes the layers one by one"
            )

    def reads(self, number: int) -> int:
        """The value that a layer reads; the windows of inputs are never gathered."""
        value = int(getattr(self.layers[number], "from"))
        return 0 if value and self.layers[value - 1].kind == LayerKind.WINDOWS else value

    def differs(self, value: int) -> bool:
        """Whether a value has a derivative."""
        return value > 0 and self.layers[value - 1].kind != LayerKind.WINDOWS

    def images(self, number: int) -> Images:
        """How the images lie that a convolution reads: inputs are [channel][row][column]."""
        window, value = self.windows[number], int(getattr(self.layers[number], "from"))
        if value and self.layers[value - 1].kind == LayerKind.WINDOWS:
            channels, height, width = self.image
            return Images(channels * height * width, width, 1, height * width)
        return window.dense

    def _window(self, number: int) -> ConvolutionSizes:
        layer = self.layers[number]
        if layer.kind != LayerKind.CONVOLUTION:
            return ConvolutionSizes(*[1] * 8)
        value = int(getattr(layer, "from"))
        before = self.layers[value - 1] if value else None
        out = (int(layer.height), int(layer.width), int(layer.channels))
        if before is not None and before.kind == LayerKind.WINDOWS:
            channels, height, width = self.image
            kernel = int(before.kernel)
            return ConvolutionSizes(
                height, width, channels, *out, kernel, kernel, int(before.stride), int(before.padding)
            )
        if before is None:
            return ConvolutionSizes(1, 1, self.image[0] * self.image[1] * self.image[2], *out, 1, 1)
        sizes = (int(before.height), int(before.width), int(before.channels))
        if layer.kernel == 0:  # a linear layer: all pixels at once
            return ConvolutionSizes(*sizes, *out, *sizes[:2])
        return ConvolutionSizes(
            *sizes, *out, int(layer.kernel), int(layer.kernel), int(layer.stride), int(layer.padding)
        )

    def _lay_out_gradients(self, end: int) -> int:
        readers = [0] * len(self.places)
        for number, layer in enumerate(self.layers):
            readers[self.reads(number)] += 1
            if layer.kind == LayerKind.SUM:
                readers[layer.other] += 1
        for value in range(len(self.layers), 0, -1):
            place, layer = self.places[value], self.layers[value - 1]
            if layer.kind == LayerKind.WINDOWS:
                continue
            if place.gradient < 0:
                place.gradient, end = end, end + filled(place.size)
            if layer.kind == LayerKind.SUM:  # both parts of a sum have its gradient
                for part in (self.reads(value - 1), int(layer.other)):
                    if part and readers[part] == 1:
                        self.places[part].gradient = place.gradient
        return end


class _Sweep:
    """A call of a plan: where everything lies.

    Args:
        plan, call: of the network.
        kept: [t, plan.kept], or [t, plan.values] where no gradient is kept.
        scratch: [t, …], whose first number has the place `plan.kept`, or `plan.values` where no gradient is kept.
        first: the place of the first number of `scratch`.
    """

    def __init__(self, plan: GpuPlan, call: NetworkCall, kept: Tensor, scratch: Tensor | None, first: int) -> None:
        self.plan, self.call, self._kept, self._scratch, self._first = plan, call, kept, scratch, first
        self.tasks = call.parameters.shape[0]
        self.parameters = Tasks(call.parameters, call.parameters.stride(0))
        self.inputs = Tasks(call.x, call.x[0].numel())
        self.sizes = LossSizes(plan.samples, call.known, call.outputs, int(plan.layers[-1].channels))
        self._beside = _side_stream(call.x)

    def at(self, place: int) -> Tasks:
        """What lies at a place of every task."""
        if self._scratch is not None and place >= self._first:
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

    def images_of(self, of: Tasks, number: int) -> Tensor:
        """A value as images [t, n, h, w, c], a view."""
        layer = self.plan.layers[number - 1]
        shape = (self.plan.samples, int(layer.height), int(layer.width), int(layer.channels))
        images: Tensor = of.numbers[:, : self.plan.places[number].size].unflatten(1, shape)
        return images

    def forward(self) -> None:
        """All values."""
        for number, layer in enumerate(self.plan.layers):
            v, x = number + 1, self.plan.reads(number)
            match layer.kind:
                case LayerKind.CONVOLUTION:
                    launch.product(
                        self.tasks, self.plan.samples, self.plan.windows[number], self.plan.images(number),
                        self.value(x), _from(self.parameters, layer.weight), self.value(v),
                        bias=_from(self.parameters, layer.bias) if layer.bias >= 0 else None,
                    )  # fmt: skip
                case LayerKind.NORM:
                    extra, channels = self.plan.places[v].extra, int(layer.channels)
                    launch.norm(
                        self.tasks, self._norm_sizes(number), layer.epsilon, layer.slope, x=self.value(x),
                        scale=_from(self.parameters, layer.weight), shift=_from(self.parameters, layer.bias),
                        mean=self.at(extra), rstd=self.at(extra + channels), y=self.value(v),
                    )  # fmt: skip
                case LayerKind.ACTIVATION:
                    before, after = self.images_of(self.value(x), x), self.images_of(self.value(v), v)
                    match ACTIVATIONS[layer.activation]:
                        case "leaky_relu":
                            after.copy_(torch.where(before > 0, before, layer.slope * before))
                        case "softplus":
                            after.copy_(torch.nn.functional.softplus(before))
                        case _:
                            torch.tanh(before, out=after)
                case LayerKind.POOL | LayerKind.MEAN | LayerKind.SUM:
                    self._linear(number, self.value)

    def _linear(self, number: int, of: Any) -> None:
        """A layer that computes tangents as it does values: a pool (by the maxima of the values), a mean or a sum."""
        layer, v, x = self.plan.layers[number], number + 1, self.plan.reads(number)
        given, result = self.images_of(of(x), x), self.images_of(of(v), v)
        if layer.kind == LayerKind.SUM:
            torch.add(given, self.images_of(of(int(layer.other)), int(layer.other)), out=result)
        elif layer.kind == LayerKind.MEAN:
            launch.mean(self.tasks, *self._averaged(number), of(x), of(v))
        else:
            chosen = self._chosen(number)
            result.copy_(torch.stack(_corners(given)).gather(0, chosen.unsqueeze(0))[0])

    def _averaged(self, number: int) -> tuple[int, int, int]:
        """Samples, pixels and channels of a mean."""
        before = self.plan.layers[self.plan.reads(number) - 1]
        return self.plan.samples, int(before.height * before.width), int(before.channels)

    def _chosen(self, number: int) -> Tensor:
        """Which of four pixels is the largest, for every pixel of a pool: the first one of equals."""
        x = self.plan.reads(number)
        return torch.stack(_corners(self.images_of(self.value(x), x))).argmax(dim=0)

    def loss(self) -> None:
        """The losses and scores, and the gradients of the last values."""
        last = len(self.plan.layers)
        c = self.call
        assert c.y is not None and c.loss is not None and c.score is not None
        launch.loss(self.tasks, self.sizes, self.value(last), c.y, self.gradient(last), c.loss, c.score)

    def forward_tangents(self, direction: Tasks, product: Tasks) -> None:
        """The tangents of all values along the direction."""
        for number, layer in enumerate(self.plan.layers):
            v, x = number + 1, self.plan.reads(number)
            tangent = self.tangent(x) if self.plan.differs(x) else None
            match layer.kind:
                case LayerKind.CONVOLUTION:
                    moves = None if tangent is None else (tangent, _from(self.parameters, layer.weight))
                    launch.product(
                        self.tasks, self.plan.samples, self.plan.windows[number], self.plan.images(number),
                        self.value(x), _from(direction, layer.weight), self.tangent(v), second=moves,
                        bias=_from(direction, layer.bias) if layer.bias >= 0 else None,
                    )  # fmt: skip
                case LayerKind.NORM:
                    assert tangent is not None
                    place, channels = self.plan.places[v], int(layer.channels)
                    launch.norm_second(
                        self.tasks, self._norm_sizes(number), layer.slope, x=self.value(x), gy=self.gradient(v),
                        v=tangent, v_scale=_from(direction, layer.weight), v_shift=_from(direction, layer.bias),
                        scale=_from(self.parameters, layer.weight), shift=_from(self.parameters, layer.bias),
                        mean=self.at(place.extra), rstd=self.at(place.extra + channels),
                        scale_gradient=self.at(place.extra + 2 * channels),
                        shift_gradient=self.at(place.extra + 3 * channels), ggy=self.tangent(v),
                        hx=self.at(place.moved), h_scale=_from(product, layer.weight),
                    )  # fmt: skip
                case LayerKind.ACTIVATION:
                    given, value = self.images_of(self.value(x), x), self.images_of(self.value(v), v)
                    result = self.images_of(self.tangent(v), v)
                    torch.mul(_steepness(layer, given, value), self.images_of(self.tangent(x), x), out=result)
                case LayerKind.POOL | LayerKind.MEAN | LayerKind.SUM:
                    self._linear(number, self.tangent)

    def loss_change(self) -> None:
        """The tangent of the gradient of the last values."""
        last, y = len(self.plan.layers), self.call.y
        assert y is not None
        launch.loss_change(self.tasks, self.sizes, self.gradient(last), self.tangent(last), y, self.change(last))

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
                        place, channels = self.plan.places[v], int(layer.channels)
                        sums = self.at(place.extra + 2 * channels), self.at(place.extra + 3 * channels)
                        launch.norm_backward(
                            self.tasks, self._norm_sizes(number), layer.slope, gy=of(v), x=self.value(x),
                            scale=_from(self.parameters, layer.weight), shift=_from(self.parameters, layer.bias),
                            mean=self.at(place.extra), rstd=self.at(place.extra + channels), gx=gx,
                            g_scale=_from(parameters, layer.weight), g_shift=_from(parameters, layer.bias),
                            moved=self.at(place.moved) if changes else None, kept=None if changes else sums,
                        )  # fmt: skip
                    case LayerKind.ACTIVATION:
                        given, value = self.images_of(self.value(x), x), self.images_of(self.value(v), v)
                        steep = _steepness(layer, given, value)
                        result_of_x = steep * self.images_of(of(v), v)
                        name = ACTIVATIONS[layer.activation]
                        if changes and name != "leaky_relu":
                            bend = (1 - value * value) * -2 * value if name == "tanh" else steep * (1 - steep)
                            moved = self.images_of(self.tangent(x), x)
                            result_of_x += bend * moved * self.images_of(self.gradient(v), v)
                        _give(result_of_x, self.images_of(of(x), x), add)
                    case LayerKind.MEAN:
                        launch.spread(self.tasks, *self._averaged(number), of(v), of(x), add=add)
                    case LayerKind.POOL:
                        gy, to = self.images_of(of(v), v), self.images_of(of(x), x)
                        if not add:
                            to.zero_()
                        chosen = self._chosen(number)
                        for which, corner in enumerate(_corners(to)):
                            corner.add_(torch.where(chosen == which, gy, 0.0))
                    case LayerKind.SUM:
                        _give(self.images_of(of(v), v), self.images_of(of(x), x), add)
                        other = int(layer.other)
                        _give(self.images_of(of(v), v), self.images_of(of(other), other), other in written)
                        written.add(other)

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
            launch.weight_gradient(
                self.tasks, samples, window, self.plan.images(number), self.value(x), gy,
                _from(parameters, layer.weight), second=by_kernel,
                gb=_from(parameters, layer.bias) if layer.bias >= 0 else None,
            )  # fmt: skip
        if gx is not None:
            weights = _from(self.parameters, layer.weight)
            launch.input_gradient(self.tasks, samples, window, gy, weights, gx, second=by_image, add=add)

    def _norm_sizes(self, number: int) -> NormSizes:
        layer = self.plan.layers[number]
        pixels, channels = int(layer.height * layer.width), int(layer.channels)
        return NormSizes(self.plan.samples * pixels, (self.call.known or self.plan.samples) * pixels, channels)


def _from(values: Tasks, place: int) -> Tasks:
    """What lies at a place of every task's parameters, or of something like them."""
    return Tasks(values.numbers[:, int(place) :], values.step)


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
    """A second stream for what nothing waits for until the end of a sweep; in a CUDA graph it becomes a branch. Outside
    of a graph, everything runs in order: there the host is the slower one."""

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
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return _Beside(None)
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)  # of the lowest priority
    return _Beside(_streams[x.device])


class GpuKernels:
    """What `metalearn.nn.native.Kernels` does on a CPU, in float32."""

    lanes = MULTIPLE
    real = ctypes.c_float
    gathered = staticmethod(launch.gathered)

    def product(self, geometry: Any, x: Tensor, weight: Tensor, step: int, y: Tensor) -> None:
        """y = x ∗ w; `step` is the distance from one task's kernels to the next task's, 0 if they share them."""
        tasks, samples, window = _of(geometry)
        launch.product(tasks, samples, window, window.dense, _dense(x), Tasks(weight, step), _dense(y))

    def input_gradient(self, geometry: Any, gy: Tensor, weight: Tensor, step: int, gx: Tensor) -> None:
        """The derivative of ⟨gy, x ∗ w⟩ by x."""
        tasks, samples, window = _of(geometry)
        launch.input_gradient(tasks, samples, window, _dense(gy), Tasks(weight, step), _dense(gx))

    def weight_gradient(self, geometry: Any, gy: Tensor, x: Tensor, gw: Tensor) -> None:
        """The derivative of ⟨gy, x ∗ w⟩ by w."""
        tasks, samples, window = _of(geometry)
        launch.weight_gradient(tasks, samples, window, window.dense, _dense(x), _dense(gy), _dense(gw))

    def norm(self, name: str, sizes: Sequence[int], epsilon: float, slope: float, **tensors: Tensor) -> None:
        """Calls `norm`, `norm_backward` or `norm_second`; `sizes` are tasks, rows, measured rows, channels and
        scale_step."""
        tasks, rows, measured, channels, scale_step = sizes
        values = {key: _dense(value) for key, value in tensors.items()}
        for key in ("scale", "shift"):
            values[key] = Tasks(tensors[key], scale_step)
        of = NormSizes(rows, measured, channels)
        if name == "norm":
            launch.norm(tasks, of, epsilon, slope, **values)
        elif name == "norm_backward":
            launch.norm_backward(tasks, of, slope, **values)  # type: ignore[arg-type]
        else:
            launch.norm_second(tasks, of, slope, **values)

    def sum_rows(self, x: Tensor) -> Tensor:
        """The sum of rows [r, n], in pairs: neighbours first, then pairs of pairs."""
        while len(x) > MOST_SUMMED:
            x = in_pairs(x)
        return launch.sum_rows(x)

    def plan(self, layers: Any, image: Sequence[int], parameters: int, samples: int) -> GpuPlan:
        """A network's plan, as `metalearn.nn.native.Kernels.plan`."""
        return GpuPlan(layers, image, parameters, samples)

    def network_loss(self, plan: GpuPlan, call: NetworkCall) -> None:
        """Losses and gradients of all tasks."""
        kept = call.x.new_empty(len(call.x), plan.kept) if call.kept is None else call.kept
        sweep = _Sweep(plan, call, kept, None, plan.kept)
        sweep.forward()
        sweep.loss()
        if call.gradient is None:
            return
        sweep.backward(call.gradient)
        if call.rate is not None:
            torch.add(call.parameters, call.gradient, alpha=-call.rate, out=call.gradient)

    def network_product(self, plan: GpuPlan, call: NetworkCall) -> None:
        """Hessian-vector products of all tasks."""
        assert call.kept is not None and call.direction is not None and call.product is not None
        scratch = call.x.new_empty(len(call.x), plan.scratch - plan.kept)
        direction = call.direction if call.rate is None else -call.rate * call.direction
        sweep, along = _Sweep(plan, call, call.kept, scratch, plan.kept), Tasks(direction, direction.stride(0))
        sweep.forward_tangents(along, Tasks(call.product, call.product.stride(0)))
        sweep.loss_change()
        sweep.backward(call.product, along)
        if call.rate is not None:
            call.product.add_(call.direction)

    def network_outputs(self, plan: GpuPlan, call: NetworkCall) -> None:
        """Last values of all tasks."""
        kept = call.x.new_empty(len(call.x), plan.values) if call.kept is None else call.kept
        assert call.result is not None
        sweep, last = _Sweep(plan, call, kept, None, plan.values), len(plan.layers)
        sweep.forward()
        call.result.copy_(sweep.images_of(sweep.value(last), last)[:, call.known :].flatten(2, 3))

    def network_outputs_gradient(self, plan: GpuPlan, call: NetworkCall) -> None:
        """From the gradients of the last values to those of the parameters, of all tasks."""
        assert call.kept is not None and call.result is not None and call.gradient is not None
        scratch = call.x.new_empty(len(call.x), plan.kept - plan.values)
        sweep, last = _Sweep(plan, call, call.kept, scratch, plan.values), len(plan.layers)
        slope = sweep.images_of(sweep.gradient(last), last)
        slope[:, : call.known].zero_()
        slope[:, call.known :].copy_(call.result.unflatten(2, slope.shape[2:4]))
        sweep.backward(call.gradient)


def _of(geometry: Any) -> tuple[int, int, ConvolutionSizes]:
    """Tasks, samples and window of a geometry as `metalearn.nn.conv` gives it."""
    tasks, samples, height, width, inputs, *rest = (int(number) for number in geometry)
    return tasks, samples, ConvolutionSizes(height, width, inputs, *rest)


def _dense(x: Tensor) -> Tasks:
    return Tasks(x, x[0].numel())
