"""Networks as sequences of layers that name their parameters.

The layers of a network say everything about it. So they can be applied one by one, as here, or compiled as a whole
(`metalearn.nn.network`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.nn.conv import channels_last, conv2d, laid_out
from metalearn.nn.norm import LINEAR, batch_norm
from metalearn.nn.precision import rounds_products

Params: TypeAlias = dict[str, Tensor]


class ChannelsLast(NamedTuple):
    """Images [t, n, c, h, w] → [t, n, h, w, c]."""


class Convolution(NamedTuple):
    """Convolution without a bias. `weight` names the kernels [o, i, kh, kw]."""

    weight: str
    stride: int = 1
    padding: int = 0


class Norm(NamedTuple):
    """Batch norm with a leaky ReLU behind it. `scale` and `shift` name parameters [c]."""

    scale: str
    shift: str
    slope: float = LINEAR


class Activation(NamedTuple):
    """`leaky_relu` with its slope below 0, `softplus` or `tanh`."""

    name: str
    slope: float = 0.0


class MaxPool(NamedTuple):
    """The largest of every 2×2 pixels."""


class Mean(NamedTuple):
    """The mean over the pixels: [t, n, h, w, c] → [t, n, c]."""


class Flatten(NamedTuple):
    """[t, n, …] → [t, n, d] in the order of the dimensions; of maps that lie `channels_last`, [t, n, h, w, c] → [t, n,
    c h w]."""

    channels_last: bool = False


class Linear(NamedTuple):
    """The affine map; `weight` names [o, i], `bias` [o]."""

    weight: str
    bias: str


class Residual(NamedTuple):
    """The sum of two branches with the same input."""

    main: "tuple[Layer, ...]"
    around: "tuple[Layer, ...]"


Layer = ChannelsLast | Convolution | Norm | Activation | MaxPool | Mean | Flatten | Linear | Residual


def parameters_of(layers: Sequence[Layer]) -> Iterator[str]:
    """The names of the parameters, in the order of the layers."""
    for layer in layers:
        match layer:
            case Convolution(weight):
                yield weight
            case Norm(scale, shift):
                yield from (scale, shift)
            case Linear(weight, bias):
                yield from (weight, bias)
            case Residual(main, around):
                yield from parameters_of(main)
                yield from parameters_of(around)


def per_task(params: Params, tasks: int) -> Params:
    """Every parameter with a leading task dimension, sharing memory; gradients add up over the tasks."""
    return {name: laid_out(p).expand(tasks, *p.shape) for name, p in params.items()}


def apply_layers(layers: Sequence[Layer], params: Params, x: Tensor, known: int = 0) -> Tensor:
    """Applies the layers one by one; per-task parameters have a leading task dimension. If `known` is above 0, the
    statistics of norms are those of the first `known` samples."""
    for layer in layers:
        match layer:
            case ChannelsLast():
                x = channels_last(x)
            case Convolution(weight, stride, padding):
                x = conv2d(x, params[weight], stride=stride, padding=padding)
            case Norm(scale, shift, slope):
                x = batch_norm(x, params[scale], params[shift], slope=slope, statistics_of=known or None)
            case Activation("leaky_relu", slope):
                x = F.leaky_relu(x, slope) if slope else F.relu(x)
            case Activation(name):
                x = F.softplus(x) if name == "softplus" else torch.tanh(x)
            case MaxPool():
                x = max_pool2d(x, 2)
            case Mean():
                x = x.mean(dim=(2, 3))
            case Flatten(last):
                x = (x.permute(0, 1, 4, 2, 3) if last else x).flatten(2)
            case Linear(weight, bias):
                x = linear(x, params[weight], params[bias])
            case Residual(main, around):
                x = apply_layers(main, params, x, known) + apply_layers(around, params, x, known)
    return x


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x` [t, n, i] · `weight` [t, o, i] + `bias` [t, o] → [t, n, o]."""
    if rounds_products():
        return torch.bmm(x.bfloat16(), weight.bfloat16().transpose(1, 2)).to(x.dtype) + bias.unsqueeze(1)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def shared_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [t, n, i] · `weight` [o, i] + `bias` [o] → [t, n, o]."""
    if rounds_products():
        product = F.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)
        return product if bias is None else product + bias
    return F.linear(x, weight, bias)


def max_pool2d(x: Tensor, size: int) -> Tensor:
    """The largest of every `size` × `size` pixels: [t, n, h, w, c] → [t, n, h // size, w // size, c]."""
    pooled: Tensor = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), size)
    return pooled.permute(0, 2, 3, 1).view(*x.shape[:2], *pooled.shape[2:], -1)
