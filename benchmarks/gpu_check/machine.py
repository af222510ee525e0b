"""What is measured on: the processor, the GPUs, and the versions."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.environment import versions
from benchmarks.gpu_check.rows import CheckRow, row_of
from metalearn.reporting.provenance import cpu_name


def machine(device: str, *, short: bool) -> Iterator[CheckRow]:
    """What is measured on."""
    yield row_of("machine", "CPU", lambda: {"name": cpu_name(), "cores": os.cpu_count(), **versions()})
    if device == "cuda":
        for number in range(max(1, torch.cuda.device_count())):
            yield row_of("machine", f"GPU {number}", partial(_gpu, number))


def _gpu(number: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(number)
    return {
        "name": found.name,
        "GiB": found.total_memory / 2**30,
        "capability": f"{found.major}.{found.minor}",
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }
