"""One door to what computes the layers: C on a CPU, Triton on a GPU, torch's operations everywhere.

`c.py` and `triton_ops.py` have the same functions, of dense tensors; `torch_ops.py` has the definitions.
METALEARN_KERNELS says `native` (the default), `torch`, or, to try the GPU's kernels on a CPU with TRITON_INTERPRET=1,
`triton`.
"""

import ctypes
import functools
import logging
import os
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from metalearn.nn.backends import c
from metalearn.nn.surroundings import rounds_products
from metalearn.storage.cache import compiler_of_machine, library_of, version_of

if TYPE_CHECKING:
    from metalearn.nn.backends.triton_ops import GpuKernels

log = logging.getLogger("metalearn")

AnyKernels: TypeAlias = "c.Kernels | GpuKernels"

# No module here is named torch or triton: once it were imported, its name would hide torch in this package.


def kernels_for(x: Tensor) -> "AnyKernels | None":
    """The kernels for the type and device of `x`, or None."""
    return kernels_on(x.device, x.dtype)


def kernels_on(device: torch.device, dtype: torch.dtype) -> "AnyKernels | None":
    """The kernels for a type on a device, or None."""
    if torch.compiler.is_exporting():
        return None  # a program for other machines has torch's operations
    if dtype == torch.float32 and (device.type == "cuda" or _asked_for() == "triton"):
        return None if _asked_for() == "torch" else on_gpu()
    return compiled(dtype) if device.type == "cpu" and dtype in c.REALS else None


def kernels_of_products(device: torch.device, dtype: torch.dtype) -> "AnyKernels | None":
    """As `kernels_on`, but no kernels in C where products are rounded to bfloat16, which these do not."""
    kernels = kernels_on(device, dtype)
    return None if rounds_products() and isinstance(kernels, c.Kernels) else kernels


def describe(device: torch.device, dtype: torch.dtype, refused: str | None = None) -> str:
    """A line for the log: what computes the layers. `refused` says why the network is not compiled as a whole."""
    one_by_one = "" if refused is None else f"; one by one, since {refused}"
    if device.type != "cpu":
        if kernels_on(device, dtype) is None:
            return f"torch's operations on {device.type}"
        return f"Triton's kernels on {device.type}{one_by_one}"
    kernels = compiled(dtype)
    if kernels is None:
        if _asked_for() != "native":
            why = f"METALEARN_KERNELS={_asked_for()} asks for them"
        elif compiler_of_machine() is None:
            why = "there is no C compiler: install gcc, or type pip install ziglang"
        else:
            why = "the C compiler failed, as the log says; please report its message"
        return f"torch's operations, several times slower than compiled kernels; {why}"
    line = f"compiled kernels, {kernels.lanes} numbers a vector"
    return f"{line}, but for products in bf16, which are torch's" if rounds_products() else f"{line}{one_by_one}"


def computed_by(device: torch.device, dtype: torch.dtype) -> str:
    """What computes the layers: where it is the same, and the processor too, so are the bits."""
    kernels, compiler = kernels_on(device, dtype), compiler_of_machine()
    if kernels is None:
        return f"torch on {device.type}"
    if device.type != "cpu" or compiler is None:
        return f"Triton on {device.type}"
    return f"C, {kernels.lanes} numbers a vector, {version_of(compiler).partition(chr(10))[0]}"


@functools.cache
def compiled(dtype: torch.dtype) -> c.Kernels | None:
    """The compiled kernels for `dtype`; None if `METALEARN_KERNELS=torch`, or if they cannot be compiled."""
    if _asked_for() != "native":
        return None
    real = c.REALS[dtype]
    library = library_of("the layers' kernels", f"kernels-{real}", c.SOURCES, [f"REAL={real}"])
    if library is None:
        return None
    return c.Kernels(library, ctypes.c_float if dtype == torch.float32 else ctypes.c_double)


@functools.cache
def on_gpu() -> "GpuKernels | None":
    """The kernels for a GPU; None where Triton is absent or cannot compile, which a line of the log says."""
    try:
        from metalearn.nn.backends.triton_ops import GpuKernels  # takes a second, and a CPU does not need it

        kernels = GpuKernels()
        if torch.cuda.is_available():  # the import shows little: a kernel needs a compiler and Python's headers
            kernels.sum_rows(torch.ones(2, 16, device="cuda"))
    except Exception as error:  # Triton raises many types
        log.warning(
            "torch's operations compute on the GPU, several times slower than our kernels: Triton cannot make them "
            "(%s: %s); it comes with torch on Linux, and needs gcc and python3-dev",
            type(error).__name__, str(error).strip().partition("\n")[0],
        )  # fmt: skip
        return None
    return kernels


def _asked_for() -> str:
    kernels = os.environ.get("METALEARN_KERNELS", "native")
    if kernels not in ("native", "torch", "triton"):
        allowed = "must be native, torch, or (to try the GPU's kernels on a CPU, with TRITON_INTERPRET=1) triton"
        raise ValueError(f"METALEARN_KERNELS={kernels}: {allowed}; type METALEARN_KERNELS=native")
    return kernels
