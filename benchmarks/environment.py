"""What is measured on: the processor, the GPUs, the versions. Imports no torch."""

import os
import platform
from pathlib import Path

from metalearn.reporting.provenance import cpu_name, version_of

_GPUS = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver describes its GPUs, each in a folder of its own."""


def versions() -> dict[str, str | None]:
    """The versions of Python and of the libraries; None: not installed."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in ("torch", "numpy", "torchopt")}


def gpu_names() -> list[str]:
    """The names of NVIDIA's GPUs, if their driver is loaded."""
    lines = [line for path in sorted(_GPUS.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]


def machine_name() -> str:
    """The processor, its cores, the GPUs, and the version of torch, in one line."""
    cores = os.cpu_count() or 1
    return ", ".join([cpu_name(), f"{cores} core{'s' * (cores > 1)}", *gpu_names(), f"torch {versions()['torch']}"])
