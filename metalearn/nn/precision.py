"""How exactly products are computed: as float32 is, unless a run asks for less.

`tf32` keeps ten bits of float32's mantissa where an NVIDIA GPU multiplies, `bf16` seven, on any device. Sums, norms,
losses and parameters stay float32 either way.

What `bf16` rounds, to nearest even: the operands of products, and by torch's operations the results, too. On CPUs with
AMX the compiled kernels convolve: they round the operands only, sum in float32 in an order that no number of threads
changes, and leave numbers of channels that are no multiples of 16 (so the windows of a first layer) to the float32
kernels, which round nothing.
"""

import torch

_rounds = False


def compute_with(precision: str) -> None:
    """Sets the precision of this process: `float32`, `float64`, `tf32` or `bf16`."""
    global _rounds
    _rounds = precision == "bf16"
    products = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = products  # type: ignore[attr-defined]  # torch has no type for it


def type_of(precision: str) -> torch.dtype:
    """The type of parameters, inputs and all that is not a product."""
    return torch.float64 if precision == "float64" else torch.float32


def rounds_products() -> bool:
    """Whether the operands of products are rounded to bfloat16."""
    return _rounds
