"""Batch normalisation by the statistics of the batch at hand; there are no running ones.

Ioffe and Szegedy 2015 (arXiv 1502.03167), Algorithm 1. torch's own, in training mode, is right to
second order when it is called directly; under `torch.func.vmap` its second derivative is wrong
(pytorch/functorch#534), so nothing here runs under vmap.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, *, statistics_of: int | None = None) -> Tensor:
    """Normalises each channel of each task, then scales and shifts it.

    Args:
        x: [n, t × c, h, w].
        weight: scale [t, c].
        bias: shift [t, c].
        statistics_of: take mean and variance of the first so many of the n samples only; None: of all.

    Returns:
        [n, t × c, h, w].
    """
    if statistics_of is None:
        return F.batch_norm(x, None, None, weight.flatten(), bias.flatten(), training=True, eps=EPSILON)
    measured = x[:statistics_of]
    mean = measured.mean(dim=(0, 2, 3), keepdim=True)
    variance = (measured - mean).square().mean(dim=(0, 2, 3), keepdim=True)
    scale = weight.view(1, -1, 1, 1) * torch.rsqrt(variance + EPSILON)
    return (x - mean) * scale + bias.view(1, -1, 1, 1)
