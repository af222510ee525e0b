"""What tests of the compiled kernels need."""

import pytest
import torch

from metalearn.nn import backends
from metalearn.storage import cache


def require_kernels(dtype: torch.dtype = torch.float32) -> backends.c.Kernels:
    """The kernels for a type. Skips the test where there is no compiler; kernels that do not compile are a failure."""
    if cache.compiler_of_machine() is None:
        pytest.skip("no C compiler")
    kernels = backends.compiled(dtype)
    assert kernels is not None, "the kernels do not compile here; the log says why"
    return kernels
