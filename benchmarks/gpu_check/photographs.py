"""Steps of MAML on ResNet-12 that stay on the GPU: their speed in each precision, beside the GPU's own rates."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.rows import CheckRow, row_of
from benchmarks.machine import best_time, finish, flops_of
from benchmarks.steps import advance_on_device, on_device, train_tasks
from benchmarks.ways import PLAIN, Recipe, algorithm_of, chunk_of, episodes_of, shortened
from metalearn.nn.precision import computing_with

RECIPE = Recipe("resnet12-5w5s-15queries", "resnet12", 5, 5, 15, 1, 4, 0.01, 84, (64, 160, 320, 640))
"""5-way 5-shot with 15 queries of each class, 84×84 pixels: 100 images a task, as few-shot papers train ResNet-12."""

PRECISIONS = ("float32", "tf32", "bf16")
STEPS = 10


def photographs(device: str, *, short: bool) -> Iterator[CheckRow]:
    """A row for each precision."""
    recipe = shortened(RECIPE)._replace(shots=1, queries=1) if short else RECIPE
    for precision in PRECISIONS[: 1 if short else None]:
        yield row_of("photographs", f"{recipe.name}, {precision}", partial(_measured, recipe, precision, device, short))


def _measured(recipe: Recipe, precision: str, device: str, short: bool) -> dict[str, Any]:
    steps, where = 2 if short else STEPS, torch.device(device)
    with computing_with(precision):
        rate = _rate(256 if short else 8192, device, torch.bfloat16 if precision == "bf16" else torch.float32)
        algorithm, chunk = algorithm_of(recipe, PLAIN[recipe.kind]), chunk_of(recipe, where)
        source = train_tasks(episodes_of(recipe))
        began = time.perf_counter()
        trainer, updater = on_device(algorithm, source, recipe.tasks, chunk, where, steps=3 * steps, every=steps)
        made = time.perf_counter() - began
        advance_on_device(trainer, updater, 1, steps)
        finish(device)
        began = time.perf_counter()
        loss = advance_on_device(trainer, updater, steps + 1, steps)
        finish(device)
        a_step = (time.perf_counter() - began) / steps
    flops = flops_of(recipe, PLAIN[recipe.kind], device)
    return {
        "tasks": recipe.tasks,
        "tasks together": chunk,
        "seconds until the first step": made,
        "ms a step": 1000 * a_step,
        "TFLOP a step": flops / 1e12,
        "TFLOP/s": flops / a_step / 1e12,
        "TFLOP/s of a product 8192³": rate / 1e12,
        "of it": flops / a_step / rate,
        "last loss": loss,
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }


def _rate(size: int, device: str, dtype: torch.dtype) -> float:
    """The operations a second of a product of two square matrices in the precision that is set."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    with torch.no_grad():
        return 2 * size**3 / best_time(lambda: a @ b, device, 0.2)
