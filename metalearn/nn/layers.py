"""Layers for per-task weights: every task of a chunk runs through its own network, in one call.

Networks are sequences of layers that name their parameters, and say everything about the network. So they can be
applied one by one, as here, or compiled as a whole (`metalearn.nn.network`). Images are [tasks, samples, height, width,
channels]; parameters have a leading task dimension, and may be expanded over it. Every layer can be differentiated any
number of times.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.backends import kernels_for, kernels_of_products, torch_ops
from metalearn.nn.backends.c import GEOMETRY
from metalearn.nn.backends.torch_ops import Geometry, dense
from metalearn.nn.surroundings import rounds_products

Params: TypeAlias = dict[str, Tensor]

# If the inputs of a convolution have fewer channels, their windows are gathered first: then the products fill vectors.
FEW_CHANNELS = 16
EPSILON = 1e-5
LINEAR = 1.0  # the slope behind a norm that stands for no activation


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


def apply_layers(layers: Sequence[Layer], params: Params, x: Tensor, support_size: int = 0) -> Tensor:
    """Applies the layers one by one; per-task parameters have a leading task dimension. If `support_size` is above 0,
    the statistics of norms are those of the first `support_size` samples."""
    for layer in layers:
        match layer:
            case ChannelsLast():
                x = x.permute(0, 1, 3, 4, 2).contiguous()
            case Convolution(weight, stride, padding):
                x = conv2d(x, params[weight], stride=stride, padding=padding)
            case Norm(scale, shift, slope):
                x = batch_norm(x, params[scale], params[shift], slope=slope, statistics_of=support_size or None)
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
                x = apply_layers(main, params, x, support_size) + apply_layers(around, params, x, support_size)
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


# Convolutions. ⟨gy, x ∗ w⟩ is linear in each of gy, x and w: its derivative by one of them is a product of the other
# two, whose derivatives are again such products. So one `autograd.Function` is closed under differentiation. torch's
# own double backward builds convolutions of odd shapes instead, which run slowly.


def conv2d(x: Tensor, weight: Tensor, *, stride: int = 1, padding: int = 0) -> Tensor:
    """Cross-correlates each task's images `x` [t, n, h, w, i] with its kernels `weight` [t, o, i, kh, kw], which may be
    expanded over the tasks, to [t, n, h', w', o]. Raises ValueError if they do not fit each other."""

    def shapes() -> str:  # no text is made on the way of every call
        return f"images [tasks, samples, height, width, channels] {list(x.shape)} and kernels {list(weight.shape)}"

    # Compiled kernels would read beyond the memory of images and kernels that do not fit.
    if x.dim() != 5 or weight.dim() != 5 or not x.numel() or not weight.numel():
        raise ValueError(f"{shapes()}: must both have five dimensions, none of them 0")
    if (x.shape[0], x.shape[-1], x.dtype, x.device) != (weight.shape[0], weight.shape[2], weight.dtype, weight.device):
        raise ValueError(
            f"{shapes()} ({x.dtype}, {x.device}; {weight.dtype}, {weight.device}): kernels [tasks, outputs, channels, "
            "height, width] must have as many tasks and channels, the same type and the same device"
        )
    if stride < 1 or padding < 0:
        raise ValueError(f"stride={stride}, padding={padding}: must be at least 1 and 0")
    geometry = Geometry(weight.shape[3], weight.shape[4], stride, padding)
    if min(geometry.out(*x.shape[2:4])) < 1:
        raise ValueError(
            f"images of {x.shape[2]}×{x.shape[3]} pixels are smaller than kernels of {weight.shape[3]}×"
            f"{weight.shape[4]}; type a larger dataset.image_size"
        )
    if torch.compiler.is_exporting():  # one operation that every runtime has
        return torch.stack([
            F.conv2d(images.permute(0, 3, 1, 2), kernels, stride=stride, padding=padding).permute(0, 2, 3, 1)
            for images, kernels in zip(x, weight, strict=True)
        ])  # fmt: skip
    if x.shape[-1] < FEW_CHANNELS and geometry != (1, 1, 1, 0):
        x = torch_ops.windows(x, geometry).flatten(4)
        weight = weight.permute(0, 1, 3, 4, 2).flatten(2)[..., None, None]
        geometry = Geometry(1, 1, 1, 0)
    result: Tensor = _Product.apply("gy", None, x, weight, x.shape, geometry)
    return result


@lru_cache(maxsize=1024)
def _numbers(x: tuple[int, ...], outputs: int, g: Geometry) -> Any:
    """The geometry in the form that convolution.c takes, for images of shape `x`."""
    tasks, samples, height, width, inputs = x
    return GEOMETRY(tasks, samples, height, width, inputs, *g.out(height, width), outputs, *g)


class _Product(Function):
    """The derivative of ⟨gy, x ∗ w⟩ by the one of "gy", "x" and "w" that `by` names, from the other two; None stands in
    its place. `shape` is that of x."""

    @staticmethod
    def forward(ctx: Any, by: str, gy: Any, x: Any, weight: Any, shape: tuple[int, ...], g: Geometry) -> Tensor:
        ctx.save_for_backward(gy, x, weight)
        ctx.settings = by, shape, g
        outputs, like = (weight.shape[1], x) if gy is None else (gy.shape[-1], gy)
        kernels = kernels_of_products(like.device, like.dtype)
        # Their vectors run over the channels that a sum does not run over: the outputs, and for the gradient of the
        # inputs these, too.
        if kernels is None or outputs % kernels.lanes or (by == "x" and shape[-1] % kernels.lanes):
            if by == "gy":
                return torch_ops.product(x, weight, g)
            return torch_ops.input_gradient(gy, weight, shape, g) if by == "x" else torch_ops.weight_gradient(gy, x, g)
        if by == "w":
            weight, step = gy.new_empty(shape[0], g.height, g.width, shape[-1], outputs), 0
        else:
            weight, step = rows_of_kernels(weight)
        gy = gy.contiguous() if by != "gy" else x.new_empty(*shape[:2], *g.out(*shape[2:4]), outputs)
        x = x.contiguous() if by != "x" else gy.new_empty(shape)
        kernels.convolution(by, _numbers(shape, outputs, g), gy, x, weight, step)
        result: Tensor = gy if by == "gy" else x if by == "x" else weight.permute(0, 4, 3, 1, 2)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by, shape, g = ctx.settings
        gy, x, weight = ctx.saved_tensors
        if by == "gy":
            (gy,) = grads
        elif by == "x":
            (x,) = grads
        else:
            (weight,) = grads
        _, needs_gy, needs_x, needs_w, _, _ = ctx.needs_input_grad
        of_gy = _Product.apply("gy", None, x, weight, shape, g) if needs_gy else None
        of_x = _Product.apply("x", gy, None, weight, shape, g) if needs_x else None
        of_w = _Product.apply("w", gy, x, None, shape, g) if needs_w else None
        return None, of_gy, of_x, of_w, None, None


# The order of kernels in memory


def laid_out(parameter: Tensor) -> Tensor:
    """The same values; the memory order of a convolution's kernels [o, i, kh, kw] becomes [kh, kw, i, o].

    Elementwise operations keep that order, so that no kernel is rearranged at every use. Derivatives have the usual
    order.
    """
    if parameter.dim() != 4:
        return parameter
    result: Tensor = _LaidOut.apply(parameter)
    return result


def rows_of_kernels(weight: Tensor) -> tuple[Tensor, int]:
    """Kernels [t, o, i, kh, kw] as dense [t or 1, kh, kw, i, o], and the distance from one task's kernels to the next
    task's: 0 if all tasks share one set (an expanded tensor)."""
    return dense(weight.permute(0, 3, 4, 2, 1))


class _LaidOut(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


# Batch norm by the statistics of the current batch; there are no running statistics (Ioffe and Szegedy 2015, arXiv
# 1502.03167, Algorithm 1). Nothing here runs under `torch.func.vmap`: there the second derivative of torch's own batch
# norm in training mode is wrong (pytorch/functorch#534). Called directly, it is right.

NormSettings = tuple[float, int, float]  # the slope behind the norm, the samples that are measured, and epsilon


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, slope: float = LINEAR, statistics_of: int | None = None,
    epsilon: float = EPSILON,
) -> Tensor:  # fmt: skip
    """Normalises each channel of each task of `x` [t, n, h, w, c], scales it by `weight` [t, c] and shifts it by `bias`
    [t, c].

    Args:
        slope: the slope of the leaky ReLU behind the norm: 0 is the ReLU, 1 is no activation.
        statistics_of: how many samples, the first of the n, mean and variance are taken of; None: all.
        epsilon: what is added to the variance.

    Raises:
        ValueError: parameters or `statistics_of` do not fit the images, or statistics would be of a single number.
    """
    if x.dim() != 5 or not x.numel():
        raise ValueError(f"images [tasks, samples, height, width, channels] {list(x.shape)}: must have five dimensions")
    measured = x.shape[1] if statistics_of is None else statistics_of
    if not 1 <= measured <= x.shape[1]:
        raise ValueError(f"statistics_of={statistics_of}: must be from 1 to the number of samples, {x.shape[1]}")
    if measured * x.shape[2] * x.shape[3] == 1:
        raise ValueError("batch norm of one sample of one pixel: a single number has no variance")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if (parameter.shape, parameter.dtype, parameter.device) != ((x.shape[0], x.shape[-1]), x.dtype, x.device):
            raise ValueError(
                f"{name} [tasks, channels] {list(parameter.shape)} ({parameter.dtype}, {parameter.device}) does not "
                f"fit images [tasks, samples, height, width, channels] {list(x.shape)} ({x.dtype}, {x.device})"
            )
    native = kernels_for(x)
    if native is None or x.shape[-1] % native.lanes:
        return torch_ops.norm(x, weight, bias, slope, measured, epsilon)
    result: Tensor = _Norm.apply(x.contiguous(), weight, bias, (slope, measured, epsilon))
    return result


def _call(name: str, x: Tensor, weight: Tensor, bias: Tensor, settings: NormSettings, **tensors: Tensor) -> None:
    """Calls one of the three functions of norm.c, where their tensors are explained."""
    (scale, step), (shift, shift_step) = dense(weight), dense(bias)
    if step != shift_step:
        scale, shift, step = weight.contiguous(), bias.contiguous(), weight.shape[1]
    (slope, measured, epsilon), pixels = settings, x.shape[2] * x.shape[3]
    sizes = (x.shape[0], x.shape[1] * pixels, measured * pixels, x.shape[4], step)
    kernels = kernels_for(x)
    assert kernels is not None
    kernels.norm(name, sizes, epsilon, slope, x=x, scale=scale, shift=shift, **tensors)


class _Norm(Function):
    """(x, weight, bias) → y."""

    # This function and the next two must get dense tensors: a copy made inside would be saved without its graph.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, settings: NormSettings) -> Tensor:
        y, mean, rstd = torch.empty_like(x), x.new_empty(x.shape[0], x.shape[4]), x.new_empty(x.shape[0], x.shape[4])
        _call("norm", x, weight, bias, settings, y=y, mean=mean, rstd=rstd)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_NormBackward.apply(grads[0].contiguous(), *ctx.saved_tensors, ctx.settings), None)


class _NormBackward(Function):
    """(gy, x, weight, bias) → the gradients of x, weight and bias; mean and rstd are those of x."""

    @staticmethod
    def forward(
        ctx: Any, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor,
        settings: NormSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        gx, g_scale, g_shift = torch.empty_like(x), torch.empty_like(mean), torch.empty_like(mean)
        results = {"gx": gx, "g_scale": g_scale, "g_shift": g_shift}
        _call("norm_backward", x, weight, bias, settings, gy=gy, mean=mean, rstd=rstd, **results)
        ctx.save_for_backward(gy, x, weight, bias, mean, rstd, g_scale, g_shift)
        ctx.settings = settings
        return gx, g_scale, g_shift

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cotangents, saved = (grad.contiguous() for grad in grads), ctx.saved_tensors
        of_gy, of_x, of_weight = _NormSecond.apply(*cotangents, *saved, ctx.settings)
        of_bias = torch.zeros_like(saved[3]) if ctx.needs_input_grad[3] else None  # it moves only the kink
        return (of_gy, of_x, of_weight, of_bias, None, None, None)


class _NormSecond(Function):
    """The backward pass of `_NormBackward`: from the cotangents of its results to those of gy, x and weight."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, v_scale: Tensor, v_shift: Tensor, gy: Tensor, x: Tensor, weight: Tensor, bias: Tensor,
        mean: Tensor, rstd: Tensor, g_scale: Tensor, g_shift: Tensor, settings: NormSettings,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ggy, hx, h_scale = torch.empty_like(x), torch.empty_like(x), torch.empty_like(mean)
        cotangents = {"gy": gy, "v": v, "v_scale": v_scale, "v_shift": v_shift, "mean": mean, "rstd": rstd}
        sums = {"scale_gradient": g_scale, "shift_gradient": g_shift}
        results = {"ggy": ggy, "hx": hx, "h_scale": h_scale}
        _call("norm_second", x, weight, bias, settings, **cotangents, **sums, **results)
        ctx.save_for_backward(v, v_scale, v_shift, gy, x, weight, bias)
        ctx.settings = settings
        return ggy, hx, h_scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Third and higher derivatives, by the definition: they need not be fast."""
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, so that none of them lies upstream of another.
            inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in ctx.saved_tensors]
            v, v_scale, v_shift, gy, x, weight, bias = inputs
            y = torch_ops.norm(x, weight, bias, *ctx.settings)
            first = torch.autograd.grad(y, (x, weight, bias), gy, create_graph=True)
            second = torch.autograd.grad(first, (gy, x, weight), (v, v_scale, v_shift), create_graph=True)
            third = torch.autograd.grad(
                second, inputs, grads, create_graph=keep, allow_unused=True, materialize_grads=True
            )
        return (*third, *(None,) * 5)
