"""What the outputs of a network say of a real number: a normal distribution, bars, or quantiles; and their losses."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.nn.surroundings import constant
from metalearn.types import Loss, Metrics, Predictive

FLOOR = 1e-3
"""The least standard deviation of a normal distribution, in standard deviations of the known targets."""

TAIL = 0.5
"""The standard deviation of the half normal distributions beyond the outer borders of bars."""

_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)

Scaled = Callable[[Tensor, Tensor, Tensor], Tensor]


class NumberHead(NamedTuple):
    """`width` raw numbers [t, n, width] of a network, in standard units; `outputs(raw, centre, scale)` are what they
    say in units of the targets, for `centre` and `scale` [t, 1, 1]. `loss` and `predictive` read these outputs."""

    width: int
    outputs: Scaled
    loss: Loss
    predictive: Predictive


def gaussian() -> NumberHead:
    """A normal distribution; the outputs are its mean and the logarithm of its standard deviation. The loss is the
    negative log-likelihood."""

    def outputs(raw: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        mean, spread = raw.split(1, dim=2)
        return torch.cat([centre + scale * mean, (scale * (F.softplus(spread) + FLOOR)).log()], dim=2)

    def surprise(outputs: Tensor, y: Tensor) -> Tensor:
        mean, log_sd = outputs.unbind(2)
        return 0.5 * ((y[..., 0] - mean) * (-log_sd).exp()).square() + log_sd + _HALF_LOG_2_PI

    def quantiles(outputs: Tensor, levels: Tensor) -> Tensor:
        standard: Tensor = torch.special.ndtri(levels)
        return outputs[..., :1] + outputs[..., 1:].exp() * standard

    return _head("gaussian", 2, outputs, surprise, Predictive(lambda outputs: outputs[..., :1], quantiles))


def bars(count: int) -> NumberHead:
    """A density that is constant within each bar (the Riemann distribution of Müller et al. 2022, arXiv 2112.10510,
    section 4). A standard normal variable falls into each of the `count` bars with equal probability; beyond the outer
    borders the density is half a normal one. The loss is the negative log-likelihood.

    The outputs are the logits of the bars; then the centre and the logarithm of the scale of the targets.
    """
    borders = constant(torch.special.ndtri(torch.arange(1, count, dtype=torch.float64) / count))

    def outputs(raw: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        return torch.cat([raw, *(value.expand(*raw.shape[:2], 1) for value in (centre, scale.log()))], dim=2)

    def surprise(outputs: Tensor, y: Tensor) -> Tensor:
        logits, centre, log_scale = outputs.split([count, 1, 1], dim=2)
        z, edges = (y - centre) * (-log_scale).exp(), borders(y.device, y.dtype)
        bar = torch.bucketize(z.detach().contiguous(), edges)
        densities = F.pad(-edges.diff().log(), (1, 1))[bar]
        beyond = torch.where(bar == 0, edges[0] - z, z - edges[-1])
        tail = math.log(2 / TAIL) - _HALF_LOG_2_PI - 0.5 * (beyond / TAIL).square()
        density = torch.where((bar == 0) | (bar == count - 1), tail, densities)
        likelihood: Tensor = logits.log_softmax(dim=2).gather(2, bar) + density - log_scale
        return -likelihood[..., 0]

    def mean(outputs: Tensor) -> Tensor:
        logits, centre, log_scale = outputs.split([count, 1, 1], dim=2)
        edges, tail = borders(outputs.device, outputs.dtype), TAIL * math.sqrt(2 / math.pi)
        middles = torch.cat([edges[:1] - tail, (edges[1:] + edges[:-1]) / 2, edges[-1:] + tail])
        z: Tensor = (logits.softmax(dim=2) @ middles).unsqueeze(2)
        found: Tensor = centre + log_scale.exp() * z
        return found

    def quantiles(outputs: Tensor, levels: Tensor) -> Tensor:
        logits, centre, log_scale = outputs.split([count, 1, 1], dim=2)
        below = logits.double().softmax(dim=2).cumsum(dim=2)
        asked = levels.to(below).expand(*below.shape[:2], -1).contiguous()
        bar = torch.searchsorted(below, asked).clamp(max=count - 1)
        start = F.pad(below, (1, 0)).gather(2, bar)
        part = ((asked - start) / (below.gather(2, bar) - start).clamp(min=1e-300)).clamp(1e-12, 1 - 1e-12)
        edges = borders(below.device, below.dtype)
        left, right = F.pad(edges, (1, 0))[bar], F.pad(edges, (0, 1))[bar]
        z = left + part * (right - left)
        z = torch.where(bar == 0, edges[0] + TAIL * torch.special.ndtri(part / 2), z)
        z = torch.where(bar == count - 1, edges[-1] + TAIL * torch.special.ndtri((1 + part) / 2), z)
        found: Tensor = (centre + log_scale.exp() * z).to(outputs)
        return found

    return _head("bars", count, outputs, surprise, Predictive(mean, quantiles))


def quantiles(count: int) -> NumberHead:
    """The quantiles at `count` levels, (i − ½) / count, as the outputs, in rising order (Chernozhukov et al. 2010,
    arXiv 0704.3649). The loss is twice the mean of the pinball losses, the continuous ranked probability score."""
    levels = constant((torch.arange(count, dtype=torch.float64) + 0.5) / count)

    def outputs(raw: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        return centre + scale * raw.sort(dim=2).values

    def pinball(outputs: Tensor, y: Tensor) -> Tensor:
        over, at = y - outputs, levels(y.device, y.dtype)
        return 2 * torch.maximum(at * over, (at - 1) * over).mean(dim=2)

    def between(outputs: Tensor, asked: Tensor) -> Tensor:
        place = (asked.to(outputs) * count - 0.5).clamp(0, count - 1)
        low = place.floor().long()
        high = (low + 1).clamp(max=count - 1)
        return torch.lerp(outputs[..., low], outputs[..., high], place - low)

    return _head("quantiles", count, outputs, pinball, Predictive(lambda out: out.mean(dim=2, keepdim=True), between))


def _head(
    name: str, width: int, outputs: Scaled, losses: Callable[[Tensor, Tensor], Tensor], predictive: Predictive
) -> NumberHead:
    def of_samples(outputs: Tensor, y: Tensor) -> Metrics:
        errors = (predictive.mean(outputs.detach()) - y).square()
        return {"loss": losses(outputs, y), "mse": errors[..., 0]}

    def of_tasks(outputs: Tensor, y: Tensor) -> Metrics:
        return {key: values.mean(dim=1) for key, values in of_samples(outputs, y).items()}

    return NumberHead(width, outputs, Loss(name, ("numbers",), "mse", of_tasks, of_samples), predictive)
