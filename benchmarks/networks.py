"""The networks of the recipes written again, for one task at a time, as users of torch would write them.

A network here is a function of parameters by name and a batch [n, …]. It shares nothing with `metalearn` except the
names of the parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5
"""Batch norm adds it to the variance."""

SLOPE = 0.1
"""The slope of leaky ReLU for negative inputs."""

Named = dict[str, Any]
"""Parameters of one task by name."""

Network = Callable[[Named, Any], Any]
"""From parameters and a batch [n, …] to outputs [n, d]."""

Loss = Callable[[Any, Any], Any]
"""The mean loss of outputs [n, d] and targets: classes [n], or values [n, d]."""


class Ops(NamedTuple):
    """The operations of a library that the networks below use; images are [n, c, h, w].

    `conv(x, weight, stride)` keeps or halves the size of a map; `norm(x, scale, shift)` is batch norm with the
    statistics of the batch; `pool(x)` is 2×2 max pooling; `linear(x, weight, bias)` takes [n, i].
    """

    conv: Callable[[Any, Any, int], Any]
    norm: Callable[[Any, Any, Any], Any]
    act: Callable[[Any], Any]
    pool: Callable[[Any], Any]
    linear: Callable[[Any, Any, Any], Any]
    loss: Loss


def network(kind: str, ops: Ops) -> Network:
    """The network of a kind of recipe: `conv4`, `sinusoid` or `resnet12`."""
    return partial({"conv4": _conv4, "sinusoid": _mlp, "resnet12": _resnet12}[kind], ops)


def _conv4(ops: Ops, params: Named, x: Any) -> Any:
    for block in range(1, 5):
        h = ops.conv(x, params[f"conv{block}.weight"], 2)
        x = ops.act(ops.norm(h, params[f"norm{block}.weight"], params[f"norm{block}.bias"]))
    return ops.linear(x.mean((2, 3)), params["head.weight"], params["head.bias"])


def _mlp(ops: Ops, params: Named, x: Any) -> Any:
    last = len(params) // 2
    for layer in range(1, last):
        x = ops.act(ops.linear(x, params[f"layer{layer}.weight"], params[f"layer{layer}.bias"]))
    return ops.linear(x, params[f"layer{last}.weight"], params[f"layer{last}.bias"])


def _resnet12(ops: Ops, params: Named, x: Any) -> Any:
    def normed(x: Any, layer: str) -> Any:
        h = ops.conv(x, params[f"{layer}.conv.weight"], 1)
        return ops.norm(h, params[f"{layer}.norm.weight"], params[f"{layer}.norm.bias"])

    for block in (f"block{number}" for number in range(1, 5)):
        h = ops.act(normed(x, f"{block}.layer1"))
        h = ops.act(normed(h, f"{block}.layer2"))
        x = ops.pool(ops.act(normed(h, f"{block}.layer3") + normed(x, f"{block}.shortcut")))
    return ops.linear(x.mean((2, 3)), params["head.weight"], params["head.bias"])


def torch_ops(activation: str, *, written_out: bool = False) -> Ops:
    """torch's operations. `written_out` computes batch norm from mean and variance, as `torch.func.vmap` needs it."""
    act: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "leaky_relu": partial(F.leaky_relu, negative_slope=SLOPE),
        "softplus": F.softplus,
        "tanh": torch.tanh,
    }
    return Ops(
        conv=lambda x, weight, stride: F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2),
        norm=_written_out_norm if written_out else _fused_norm,
        act=act[activation],
        pool=lambda x: F.max_pool2d(x, 2),
        linear=F.linear,
        loss=lambda outputs, y: (F.mse_loss if y.is_floating_point() else F.cross_entropy)(outputs, y),
    )


def _fused_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, scale, shift, training=True, eps=EPSILON)


def _written_out_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean((0, 2, 3), keepdim=True)
    variance = centred.square().mean((0, 2, 3), keepdim=True)
    factor = scale[:, None, None] * torch.rsqrt(variance + EPSILON)
    return centred * factor + shift[:, None, None]
