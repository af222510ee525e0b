"""The order of images and kernels in memory: channels last, as the layers read them."""

from typing import Any

from torch import Tensor
from torch.autograd import Function


def channels_last(x: Tensor) -> Tensor:
    """Images [t, n, c, h, w] from a data source → [t, n, h, w, c] for the layers."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


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


def dense(parameter: Tensor) -> tuple[Tensor, int]:
    """[t, …] dense, and the distance from one task's part to the next task's. If all tasks share one part (an expanded
    tensor), the result is [1, …], and the distance is 0."""
    if parameter.stride(0) == 0 and parameter.shape[0] > 1:
        return parameter[:1].contiguous(), 0
    return parameter.contiguous(), parameter.shape[1:].numel()


class _LaidOut(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
