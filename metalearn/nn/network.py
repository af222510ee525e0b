"""A network of known layers, compiled: outputs, the loss of every task, its gradient and its Hessian-vector product.

The parameters of a task are one row of a tensor [t, P], the *packed* form of `Params`, a dictionary of one tensor. So
inner optimisers, which compute elementwise, need one operation for all parameters. Each task is computed by itself,
from the first layer to the last (`backends/kernels/network.c`), and its numbers do not depend on the other tasks.

The numbers of a row lie in the order in which the kernels read them. A plan is made for one shape of inputs.

The loss can be differentiated twice, the outputs once. Higher derivatives are those of the layers, one by one.
"""

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.backends import AnyKernels, kernels_for, kernels_of_products, torch_ops
from metalearn.nn.backends.c import ACTIVATIONS, LAYER, MULTIPLE, Kernels, LayerKind, NetworkCall, filled
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
    apply_layers,
    parameters_of,
)
from metalearn.nn.surroundings import constant, surroundings

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
    """The `places` of all parameters in a row of `size` numbers, by name, in the order of the layers."""

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
        self._to_row_on, self._to_parameters_on = constant(self._to_row), constant(self._to_parameters)
        self._at: dict[tuple[tuple[str, ...], torch.device], Tensor] = {}

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
        return torch.cat([*flat, flat[0].new_zeros(1)])[self._to_row_on(flat[0].device, torch.int64)]

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
            flat = row.index_select(-1, self._to_parameters_on(row.device, torch.int64))
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


Step = tuple[Layer | Windows | Products, tuple[int, ...]]
"""A layer of the compiled network, and the values that it reads: 0 is the inputs, and i what step i gives."""


def steps_of(layers: Sequence[Layer]) -> list[Step]:
    """The layers in the order in which the compiled network computes them."""
    steps: list[Step] = []

    def add(layer: Layer | Windows | Products, *reads: int) -> int:
        steps.append((layer, reads))
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
    readers = Counter(value for _, reads in steps for value in reads)
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
    """A network whose parameters have known shapes: how they lie in a row of packed parameters, which go by the name
    `key`, and the plans for shapes of inputs. `refused` says why it cannot be compiled; None: it can."""

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


# Derivatives by parameters, the loss that compiled networks compute, and the metric beside it

Metrics = dict[str, Tensor]


def leaves(params: Params) -> Params:
    """Fresh leaves with the same values, to differentiate by."""
    return {name: p.detach().requires_grad_() for name, p in params.items()}


def gradient_at(params: Params, losses: Tensor, *, twice: bool) -> Params:
    """The gradient of the sum of losses [t] by the parameters; with `twice`, it has a graph of its own. Parameters
    that have no part in them get zeros."""
    grads = torch.autograd.grad(
        losses.sum(), list(params.values()), create_graph=twice, allow_unused=True, materialize_grads=True
    )
    return dict(zip(params, grads, strict=True))


def usual_metrics(outputs: Tensor, y: Tensor) -> Metrics:
    """Of each task, its `loss` [t] and a metric. Classes (`y` [t, n] integers; `outputs` [t, n, ways] logits): mean
    cross-entropy, and `accuracy`. Numbers (`y` [t, n, d]): the mean squared error, as `loss` and `mse`."""
    if y.is_floating_point():
        return mean_squared_error(outputs, y)
    return {name: values.mean(dim=1) for name, values in usual_metrics_of_samples(outputs, y).items()}


def usual_metrics_of_samples(outputs: Tensor, y: Tensor) -> Metrics:
    """As `usual_metrics`, for every sample [t, n]."""
    if y.is_floating_point():
        errors = squared_errors(outputs, y)
        return {"loss": errors, "mse": errors.detach()}
    return {"loss": cross_entropies(outputs, y), "accuracy": accuracy(outputs, y)}


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """Of samples with classes `y` [t, n]: [t, n]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is that of the class `y` [t, n], else 0."""
    return (logits.detach().argmax(dim=-1) == y).to(logits.dtype)


def squared_errors(outputs: Tensor, y: Tensor) -> Tensor:
    """Their mean over the numbers of a sample, `y` [t, n, d]: [t, n]."""
    return (outputs - y).square().mean(dim=2)


def mean_squared_error(outputs: Tensor, y: Tensor) -> Metrics:
    """The loss of tasks of real numbers `y` [t, n, d], and their `mse`."""
    # One mean over both dimensions: a mean of means would round twice.
    mse = (outputs - y).square().mean(dim=(1, 2))
    return {"loss": mse, "mse": mse.detach()}


class CompiledNetwork:
    """A sequence of layers that is compiled when it is used. If it `ignores_support`, the statistics of norms are those
    of the batch."""

    def __init__(self, layers: Sequence[Layer], *, ignores_support: bool = False) -> None:
        self.layers = tuple(layers)
        self._ignores_support = ignores_support
        self._names = tuple(parameters_of(layers))
        self._shaped: dict[tuple[tuple[int, ...], ...], ShapedNetwork] = {}
        self._packed: dict[str, ShapedNetwork] = {}
        self._making = threading.Lock()

    def computes(self, params: Params, device: torch.device | None = None) -> bool:
        """Whether the compiled network can compute with these parameters, on their device or another: it needs
        kernels that round products as the config asks, and layers that can be compiled."""
        values = [params[name] for name in self._names if name in params]
        if len(values) < len(self._names) or not values:
            return False
        kernels = kernels_of_products(device or values[0].device, values[0].dtype)
        return kernels is not None and self._of(values).refused is None

    def refusal(self, params: Params) -> str | None:
        """Why the layers cannot be compiled as one network; None: they can. Of the parameters, some may be missing."""
        shapes = {name: tuple(params[name].shape) for name in self._names if name in params}
        return refusal(steps_of(self.layers), shapes)

    def pack(self, params: Params, tasks: int) -> Params:
        """Meta-parameters in packed form for `tasks` tasks, sharing memory; gradients add up over the tasks. Raises
        ValueError if the layers cannot be compiled."""
        values = [params[name] for name in self._names]
        shaped = self._of(values)
        if shaped.refused is not None:
            raise ValueError(f"{shaped.refused}; it can be computed one layer after the other")
        return {shaped.key: shaped.layout.rows(values, tasks)}

    def replaced(self, packed: Params, values: Params) -> Params:
        """Packed parameters with other `values` of some of them: [*shape], which all tasks share, or [t, *shape]."""
        if not values:
            return packed
        ((key, row),) = packed.items()
        return {key: self._packed[key].layout.replaced(row, values)}

    def unpack(self, packed: Params) -> Params:
        """Packed parameters, or sums of such [P], by name; and other parameters as they are."""
        if not is_packed(packed):
            return packed
        ((key, row),) = packed.items()
        return dict(zip(self._names, self._packed[key].layout.unpack(row), strict=True))

    def outputs(self, params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """What the last layer gives, [t, n, d], for packed `params` and samples `x` [t, n, …]. The statistics of the
        support set `support_x` normalise, or without one those of `x`."""
        if torch.compiler.is_exporting():  # the layers one by one, in torch's operations
            if self._ignores_support or support_x is None:
                return apply_layers(self.layers, self.unpack(params), x)
            support_size, h = support_x.shape[1], torch.cat([support_x, x], dim=1)
            return apply_layers(self.layers, self.unpack(params), h, support_size)[:, support_size:]
        ((key, row),) = params.items()
        samples = _Tasks(self._packed[key], row, x, None if self._ignores_support else support_x)
        if torch.is_grad_enabled() and samples.x.requires_grad:
            return samples.by_layers(row)
        if torch.is_grad_enabled() and row.requires_grad:
            result: Tensor = _RowsToOutputs.apply(row, samples)
        else:
            result, _ = samples.outputs(row, keep=False)
        return samples.flattened(result)

    def metrics(
        self, params: Params, x: Tensor, y: Tensor, support_x: Tensor | None = None, *, twice: bool = False
    ) -> Metrics:
        """Each task's `loss` [t], and its `accuracy` for classes `y` [t, n], or `mse` for numbers `y` [t, n, d]. With
        `twice`, it keeps what the second derivative of the loss needs. The rest is as for `outputs`."""
        ((key, row),) = params.items()
        tasks = _Tasks(self._packed[key], row, x, None if self._ignores_support else support_x, y, twice=twice)
        if torch.is_grad_enabled() and row.requires_grad:
            loss, score = _RowsToLoss.apply(row, tasks)
        else:
            loss, score, _, _ = tasks.loss(row, gradient=False)
        return {"loss": loss, "mse" if y.is_floating_point() else "accuracy": score}

    def gradient(self, params: Params, x: Tensor, y: Tensor, *, twice: bool = False) -> Params:
        """The gradient of each task's loss by its packed parameters, in packed form. With `twice`, it has a derivative
        of its own. It is what `torch.autograd.grad` gives for the loss of `metrics`, in one call."""
        ((key, row),) = params.items()
        tasks = _Tasks(self._packed[key], row, x, None, y, twice=twice)
        _, _, gradient, kept = tasks.loss(row.detach(), gradient=True)
        return {key: _WithDerivative.apply(row, gradient, kept, tasks) if twice else gradient}  # type: ignore[dict-item]

    def stepped(self, params: Params, x: Tensor, y: Tensor, rate: float, *, twice: bool = False) -> Params:
        """The packed parameters after a step of gradient descent, θ − rate · ∇L(θ), in one call. With `twice`, the
        derivative of the gradient counts too; else it is a constant."""
        ((key, row),) = params.items()
        tasks = _Tasks(self._packed[key], row, x, None, y, twice=twice, rate=rate)
        _, _, after, kept = tasks.loss(row.detach(), gradient=True)
        return {key: _WithDerivative.apply(row, after, kept, tasks)}

    def _of(self, values: Sequence[Tensor]) -> ShapedNetwork:
        """The network for the shapes of these parameters."""
        shapes = tuple([tuple(value.shape) for value in values])
        if shapes not in self._shaped:  # asked again under the lock: two threads may come here at once
            with self._making:
                by_name = dict(zip(self._names, shapes, strict=True))
                shaped = self._shaped.get(shapes) or ShapedNetwork(self.layers, by_name, f"{PACKED}{len(self._shaped)}")
                self._packed[shaped.key] = self._shaped[shapes] = shaped
        return self._shaped[shapes]


class _Tasks:
    """The samples of some tasks, and what is to be predicted for them, as the kernels take them."""

    def __init__(
        self, shaped: ShapedNetwork, row: Tensor, x: Tensor, support_x: Tensor | None, y: Tensor | None = None, *,
        twice: bool = False, rate: float | None = None,
    ) -> None:  # fmt: skip
        """With a `rate`, the parameters after a step take the place of the gradient. Raises ValueError if samples,
        targets and parameters do not fit, or a derivative by the samples is wanted."""
        self.shaped, self.support_size = shaped, 0 if support_x is None else support_x.shape[1]
        self.x = (x if support_x is None else torch.cat([support_x, x], dim=1)).contiguous()
        # Kernels would read beyond the memory of samples, targets and parameters that do not fit.
        if (self.x.dtype, self.x.device) != (row.dtype, row.device):
            raise ValueError(
                f"inputs {self.x.dtype} on {self.x.device}: must be as the parameters, {row.dtype} on {row.device}"
            )
        kernels = kernels_for(row)
        assert kernels is not None
        self.plan = shaped.plan(kernels, self.x.shape[1], tuple(self.x.shape[2:]))
        if (self.support_size or self.x.shape[1]) * self.plan.fewest_pixels == 1:
            raise ValueError("batch norm of one sample of one pixel: a single number has no variance")
        if row.shape != (len(self.x), shaped.layout.size):
            raise ValueError(f"parameters of {len(row)} tasks: must be those of {len(self.x)}, as the inputs")
        self.twice, self.rate, self.outputs_read = twice, rate, self.plan.last.used
        self.y: Tensor | None = None
        # What a backward pass reads again is saved by autograd, which refuses it if it has been changed in place.
        self.read = [self.x]
        if y is None:
            return
        if torch.is_grad_enabled() and self.x.requires_grad:
            raise ValueError(
                "inputs with a graph: the compiled loss has no derivative by its inputs; detach them, or compute the "
                "outputs and a loss of them"
            )
        numbers = y.is_floating_point()
        y = (y if numbers else y.long()).contiguous()
        if not numbers and (present := surroundings().present) is not None:
            self.outputs_read = min(present, self.outputs_read)
        tasks, samples, outputs = *self.x.shape[:2], self.outputs_read
        shape = (tasks, samples - self.support_size, *((outputs,) if numbers else ()))
        if y.shape != shape:
            raise ValueError(f"targets {list(y.shape)}: must be {list(shape)}, for inputs {list(self.x.shape)}")
        if numbers and y.dtype != row.dtype:
            raise ValueError(f"targets {y.dtype}: must be {row.dtype}, as the parameters")
        if not numbers and not y.is_cuda:  # there it would wait for the GPU, whose kernels give NaN
            least, most = torch.aminmax(y)
            if least < 0 or most >= outputs:
                raise ValueError(f"classes {int(least)} to {int(most)}: must be from 0 to {outputs - 1}")
        self.y = y
        self.read.append(y)

    def compute(self, what: str, row: Tensor, **tensors: Tensor | None) -> None:
        """Has the kernels compute; `NetworkCall` explains the tensors."""
        if row.stride(1) != 1 or row.stride(0) not in (0, row.shape[1]):  # neither dense nor one row for all tasks
            row = row.contiguous()
        call = NetworkCall(row, self.x, self.support_size, self.outputs_read, self.y, self.rate, **tensors)
        self.plan.kernels.network(what, self.plan.compiled.address, call)

    def outputs(self, row: Tensor, *, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The last values [t, n, pixels, channels], and with `keep` what their gradient needs."""
        tasks, last = row.shape[0], self.plan.last
        samples = self.x.shape[1] - self.support_size
        result = row.new_empty(tasks, samples, last.height * last.width, last.channels)
        kept = row.new_empty(tasks, self.plan.compiled.values) if keep else None
        self.compute("outputs", row, result=result, kept=kept)
        return result, kept

    def loss(self, row: Tensor, *, gradient: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Loss and score [t]; with `gradient`, the gradient [t, P] too, and what the product needs."""
        tasks = row.shape[0]
        loss, score = row.new_empty(tasks), row.new_empty(tasks)
        slope = row.new_empty(row.shape) if gradient else None
        kept = row.new_empty(tasks, self.plan.compiled.kept) if gradient and self.twice else None
        self.compute("loss", row, loss=loss, score=score, gradient=slope, kept=kept)
        return loss, score, slope, kept

    def flattened(self, result: Tensor) -> Tensor:
        """Last values as the layers give them, [t, n, d]."""
        return result[..., : self.plan.last.used].transpose(2, 3).flatten(2)

    def by_layers(self, row: Tensor) -> Tensor:
        """The outputs [t, n, d], by the layers one by one: they can be differentiated any number of times."""
        params = dict(zip(parameters_of(self.shaped.layers), self.shaped.layout.unpack(row), strict=True))
        return apply_layers(self.shaped.layers, params, self.x, self.support_size)[:, self.support_size :]


class _RowsToOutputs(Function):
    """(rows, tasks) → the last values [t, n, pixels, channels]."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, tasks: _Tasks) -> Tensor:
        result, kept = tasks.outputs(row, keep=True)
        ctx.save_for_backward(row, kept, *tasks.read)
        ctx.tasks = tasks
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        row, kept, *_ = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative follows, which the kernels of outputs do not have
            at = row.view_as(row)
            outputs, direction = ctx.tasks.by_layers(at), ctx.tasks.flattened(grads[0])
            (gradient,) = torch.autograd.grad(outputs, at, direction, create_graph=True)
            return gradient, None
        gradient = row.new_empty(row.shape)
        ctx.tasks.compute("outputs_gradient", row, kept=kept, result=grads[0].contiguous(), gradient=gradient)
        return gradient, None


class _RowsToLoss(Function):
    """(rows, tasks) → loss and score [t]."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, tasks: _Tasks) -> tuple[Tensor, Tensor]:
        # The gradient is computed at once, while a task's numbers are in the cache.
        loss, score, gradient, kept = tasks.loss(row, gradient=True)
        ctx.save_for_backward(row, gradient, kept, *tasks.read)
        ctx.tasks = tasks
        ctx.mark_non_differentiable(score)
        return loss, score

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        row, gradient, kept, *_ = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradient = _WithDerivative.apply(row, gradient, kept, ctx.tasks)
        return _times(grads[0], gradient), None


class _WithDerivative(Function):
    """(rows, their gradient or the rows after a step) → the same [t, P], with its derivative: H v of a gradient, and
    v − rate · H v of a step; v alone where nothing was kept for it, since the gradient of the step is a constant."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, value: Tensor, kept: Tensor | None, tasks: _Tasks) -> Tensor:
        ctx.save_for_backward(row, kept, *tasks.read)
        ctx.tasks = tasks
        return value.view_as(value)  # autograd takes no input for an output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        row, kept, *_ = ctx.saved_tensors
        direction, rate = grads[0], ctx.tasks.rate
        if rate is not None and kept is None:
            return direction, None, None, None
        if kept is None or torch.is_grad_enabled():  # third derivatives are those of the layers
            product = _product_by_layers(ctx.tasks, row, direction if rate is None else -rate * direction)
            return product if rate is None else direction + product, None, None, None
        direction = direction.contiguous()
        product = torch.empty_like(direction)
        ctx.tasks.compute("product", row, kept=kept, direction=direction, product=product)
        return product, None, None, None


_ones: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def one_for_each(losses: Tensor) -> Tensor:
    """A factor 1 for each of the losses [t]: as `grad_outputs` of `torch.autograd.grad` it stands for their sum."""
    # Always the same tensor, so that `_times` knows it by its address. A look at the value would wait for the GPU.
    key = losses.device, losses.dtype
    if key not in _ones:
        _ones[key] = torch.ones((), device=losses.device, dtype=losses.dtype)
    return _ones[key].expand(losses.shape)


def _times(factors: Tensor, gradient: Tensor) -> Tensor:
    """Each task's gradient times its factor; the gradient itself if all factors are one constant 1, as for a sum."""
    if factors.requires_grad or factors.stride(0) != 0:
        return factors.unsqueeze(1) * gradient
    one = _ones.get((factors.device, factors.dtype))
    is_one = one is not None and one.data_ptr() == factors.data_ptr()
    if is_one or (not factors.is_cuda and factors[0].item() == 1):
        return gradient
    return factors.unsqueeze(1) * gradient


def _product_by_layers(tasks: _Tasks, row: Tensor, direction: Tensor) -> Tensor:
    """The Hessian's product with `direction`, with a graph of its own if one is wanted."""
    assert tasks.y is not None
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        at = row.view_as(row) if row.requires_grad else row.detach().requires_grad_()
        loss = usual_metrics(tasks.by_layers(at)[..., : tasks.outputs_read], tasks.y)["loss"].sum()
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        (product,) = torch.autograd.grad(slope, at, direction, create_graph=keep)
    return product
