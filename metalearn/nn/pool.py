"""Pooling of images whose channels come last."""

import torch.nn.functional as F
from torch import Tensor


def max_pool2d(x: Tensor, size: int) -> Tensor:
    """The largest of every `size` × `size` pixels: [t, n, h, w, c] → [t, n, h // size, w // size, c]."""
    pooled: Tensor = F.max_pool2d(x.flatten(0, 1).permute(0, 3, 1, 2), size)
    return pooled.permute(0, 2, 3, 1).view(*x.shape[:2], *pooled.shape[2:], -1)
