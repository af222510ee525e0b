"""How exactly products are computed: as float32 is, unless a run asks for less.

`tf32` keeps ten bits of float32's mantissa where an NVIDIA GPU multiplies, `bf16` seven, on any device. Sums, norms,
losses and parameters stay float32 either way.
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
    """Whether the operands and the results of products are rounded to bfloat16."""
    return _rounds
