"""The precision of products: that of float32, unless the config asks for less.

`tf32` keeps ten bits of float32's mantissa in the products of an NVIDIA GPU; `bf16` keeps seven, on any device. Sums,
norms, losses and parameters stay float32.

`bf16` rounds the operands of products to nearest even. Torch's operations round the results, too. On CPUs with AMX,
the compiled kernels convolve: they round the operands only, and sum in float32, in an order that does not depend on
the number of threads. They need multiples of 16 channels. For other numbers (the windows of a first layer) the float32
kernels convolve, and round nothing.
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
    """The type of parameters, inputs, and everything but products."""
    return torch.float64 if precision == "float64" else torch.float32


def rounds_products() -> bool:
    """Whether the operands of products are rounded to bfloat16."""
    return _rounds
