"""The affine map, with a separate weight for every task."""

import torch
from torch import Tensor

from metalearn.nn.precision import rounds_products


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x` [t, n, i] · `weight` [t, o, i] + `bias` [t, o] → [t, n, o]."""
    if rounds_products():
        return torch.bmm(x.bfloat16(), weight.bfloat16().transpose(1, 2)).to(x.dtype) + bias.unsqueeze(1)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
