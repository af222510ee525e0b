"""Layers for per-task weights: every task of a chunk runs through its own network, in one call.

Images travel as [n, tasks × channels, height, width], the tasks as channel groups; weights carry a
leading task dimension.
"""

from metalearn.nn.conv import conv2d
from metalearn.nn.linear import linear
from metalearn.nn.norm import batch_norm

__all__ = ["batch_norm", "conv2d", "from_groups", "linear", "to_groups"]

from torch import Tensor


def to_groups(x: Tensor) -> Tensor:
    """[t, n, c, h, w] → [n, t × c, h, w], contiguous."""
    return x.transpose(0, 1).flatten(1, 2).contiguous()


def from_groups(x: Tensor, tasks: int) -> Tensor:
    """[n, t × c, …] → [t, n, c, …]."""
    return x.view(x.shape[0], tasks, -1, *x.shape[2:]).transpose(0, 1)
