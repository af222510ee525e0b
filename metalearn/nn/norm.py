"""Batch normalisation by the statistics of the current batch; there are no running statistics.

Ioffe and Szegedy 2015 (arXiv 1502.03167), Algorithm 1. Nothing here runs under `torch.func.vmap`: there the second
derivative of torch's own batch norm in training mode is wrong (pytorch/functorch#534). Called directly, it is right.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from metalearn.nn.conv import dense
from metalearn.nn.native import compiled_for

EPSILON = 1e-5

LINEAR = 1.0
"""The slope that stands for no activation."""


class NormSettings(NamedTuple):
    """The slope behind a norm, the number of samples for its statistics, and what is added to the variance."""

    slope: float
    measured: int
    epsilon: float


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    slope: float = LINEAR,
    statistics_of: int | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Normalises each channel of each task, scales and shifts it, and multiplies what is below 0 by `slope`.

    Args:
        x: [t, n, h, w, c].
        weight: scale [t, c].
        bias: shift [t, c].
        slope: the slope of the leaky ReLU behind the norm: 0 is the ReLU, 1 is no activation.
        statistics_of: how many samples, the first of the n, mean and variance are taken of; None: all.
        epsilon: what is added to the variance.

    Returns:
        [t, n, h, w, c].

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
    native, settings = compiled_for(x), NormSettings(slope, measured, epsilon)
    if native is None or x.shape[-1] % native.lanes:
        return _written_out(x, weight, bias, settings)
    result: Tensor = _Norm.apply(x.contiguous(), weight, bias, settings)
    return result


def _written_out(x: Tensor, weight: Tensor, bias: Tensor, settings: NormSettings) -> Tensor:
    """The definition, in torch's operations: differentiable any number of times, on any device."""
    slope, measured, epsilon = settings
    variance, mean = torch.var_mean(x[:, :measured], dim=(1, 2, 3), correction=0, keepdim=True)
    scale = weight[:, None, None, None] * torch.rsqrt(variance + epsilon)
    z = (x - mean) * scale + bias[:, None, None, None]
    return z if slope == LINEAR else F.leaky_relu(z, slope)


def _call(name: str, x: Tensor, weight: Tensor, bias: Tensor, settings: NormSettings, **tensors: Tensor) -> None:
    """Calls one of the three functions of norm.c, where their tensors are explained."""
    (scale, step), (shift, shift_step) = dense(weight), dense(bias)
    if step != shift_step:
        scale, shift, step = weight.contiguous(), bias.contiguous(), weight.shape[1]
    (slope, measured, epsilon), pixels = settings, x.shape[2] * x.shape[3]
    sizes = (x.shape[0], x.shape[1] * pixels, measured * pixels, x.shape[4], step)
    kernels = compiled_for(x)
    assert kernels is not None
    kernels.norm(name, sizes, epsilon, slope, x=x, scale=scale, shift=shift, **tensors)


class _Norm(Function):
    """(x, weight, bias) → y. This function and the next two must get dense tensors: a copy made inside would be saved
    without its graph."""

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
        given = {"gy": gy, "v": v, "v_scale": v_scale, "v_shift": v_shift, "mean": mean, "rstd": rstd}
        sums = {"scale_gradient": g_scale, "shift_gradient": g_shift}
        results = {"ggy": ggy, "hx": hx, "h_scale": h_scale}
        _call("norm_second", x, weight, bias, settings, **given, **sums, **results)
        ctx.save_for_backward(v, v_scale, v_shift, gy, x, weight, bias)
        ctx.settings = settings
        return ggy, hx, h_scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Third and higher derivatives, by the definition: they need not be fast."""
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [  # views, so that none of them lies upstream of another
                saved.view_as(saved) if saved.requires_grad else saved.detach().requires_grad_()
                for saved in ctx.saved_tensors
            ]
            v, v_scale, v_shift, gy, x, weight, bias = inputs
            y = _written_out(x, weight, bias, ctx.settings)
            first = torch.autograd.grad(y, (x, weight, bias), gy, create_graph=True)
            second = torch.autograd.grad(first, (gy, x, weight), (v, v_scale, v_shift), create_graph=True)
            third = torch.autograd.grad(
                second, inputs, grads, create_graph=keep, allow_unused=True, materialize_grads=True
            )
        return (*third, *(None,) * 5)
