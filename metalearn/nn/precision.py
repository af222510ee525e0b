"""The precision of products: that of float32, unless the config asks for less.

`tf32` keeps ten bits of float32's mantissa in the products of an NVIDIA GPU; `bf16` keeps seven, on any device. Sums,
norms, losses and parameters stay float32.

`bf16` rounds the operands of products to nearest even, and their results, by torch's operations. The compiled kernels
round nothing, so that a CPU computes products in bf16 layer by layer: it shows what a run on a GPU would learn.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_rounds = False

_convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch has no type for it


def compute_with(precision: str) -> None:
    """Sets the precision of this process: `float32`, `float64`, `tf32` or `bf16`."""
    products = "tf32" if precision == "tf32" else "ieee"
    _set(precision == "bf16", products, products)


@contextlib.contextmanager
def computing_with(precision: str) -> Iterator[None]:
    """As `compute_with`, for a block of code. After it, the precision is the one before."""
    before = _rounds, torch.backends.cuda.matmul.fp32_precision, _convolutions.fp32_precision
    compute_with(precision)
    try:
        yield
    finally:
        _set(*before)


def _set(rounds: bool, matmul: str, conv: str) -> None:
    global _rounds
    _rounds = rounds
    torch.backends.cuda.matmul.fp32_precision = matmul
    _convolutions.fp32_precision = conv


def type_of(precision: str) -> torch.dtype:
    """The type of parameters, inputs, and everything but products."""
    return torch.float64 if precision == "float64" else torch.float32


def rounds_products() -> bool:
    """Whether the operands of products are rounded to bfloat16."""
    return _rounds
