"""The affine map, with a separate weight for every task or one that all tasks share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.nn.precision import rounds_products


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
