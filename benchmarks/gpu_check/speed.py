"""What is measured on; the meta-gradients of `scripts/bench.py`: times, and the fraction of the device's own rate."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.environment import versions
from benchmarks.gpu_check.rows import CheckRow, row_of
from benchmarks.meta_gradients import measure
from benchmarks.ways import RECIPES, Recipe, shortened
from metalearn.reporting.provenance import cpu_name

MEASURED = ("5w1s", "5w1s-5steps", "20w1s")


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


def speed(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Our meta-gradient of every recipe beside a loop over tasks and vmap."""
    for recipe in RECIPES:
        if recipe.name in (("sinusoid",) if short else MEASURED):
            yield row_of(
                "speed", recipe.name, partial(_measured, shortened(recipe) if short else recipe, device, short)
            )


def _measured(recipe: Recipe, device: str, short: bool) -> dict[str, Any]:
    rounds, seconds = (1, 0.005) if short else (5, 0.1)
    measured = measure([recipe], rounds, device, torch.get_num_threads(), seconds)
    (found,), by_way = measured["recipes"], measured["recipes"][0]["by_way"]
    ours = by_way["ours"]
    return {
        "tasks": recipe.tasks,
        "ms": ours["median_ms"],
        **{f"ms, {name}": row["median_ms"] for name, row in by_way.items() if name != "ours"},
        "limit ms": found["limit_ms"],
        "of the limit": ours["fraction_of_limit"],
        "best GFLOP/s": measured["limit"]["gflops"],
        "reached by": measured["limit"]["kernel"],
        "error": ours["error"],
    }
