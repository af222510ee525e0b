"""Speed on the device: meta-gradients as in `metalearn bench`, beside the device's own rate; whole steps that stay on
it, as in a run of train.py, with their bits and the waits of the host; MAML on ResNet-12 in each precision."""

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.bench import versions
from benchmarks.gpu_check.check import CheckRow, WrongError, row_of
from benchmarks.meta_gradients import best_time, finish, flops_of, measure
from benchmarks.steps import advance_on_device, on_device, train_tasks
from benchmarks.ways import PLAIN, RECIPES, Recipe, algorithm_of, character_source, chunk_of, episodes_of, shortened
from metalearn.nn.surroundings import computing_with
from metalearn.reporting.provenance import cpu_name
from metalearn.training.on_device import DeviceUpdater, without_waits
from metalearn.training.trainer import Trainer
from metalearn.types import Params

GRADIENTS = ("5w1s", "5w1s-5steps", "20w1s")


def machine(device: str, *, short: bool) -> Iterator[CheckRow]:
    """What is measured on."""
    yield row_of("machine", "CPU", lambda: {"name": cpu_name(), "cores": os.cpu_count(), **versions()})
    if device == "cuda":
        for number in range(max(1, torch.cuda.device_count())):
            yield row_of("machine", f"GPU {number}", partial(_gpu, number))


def _gpu(number: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(number)
    return {
        "name": gpu.name,
        "GiB": gpu.total_memory / 2**30,
        "capability": f"{gpu.major}.{gpu.minor}",
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def speed(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Our meta-gradient of every recipe beside a loop over tasks and vmap."""
    for recipe in RECIPES:
        if recipe.name in (("sinusoid",) if short else GRADIENTS):
            yield row_of(
                "speed", recipe.name, partial(_gradient, shortened(recipe) if short else recipe, device, short)
            )


def _gradient(recipe: Recipe, device: str, short: bool) -> dict[str, Any]:
    rounds, seconds = (1, 0.005) if short else (5, 0.1)
    measured = measure([recipe], rounds, device, torch.get_num_threads(), seconds)
    (result,), by_way = measured["recipes"], measured["recipes"][0]["by_way"]
    ours = by_way["ours"]
    return {
        "tasks": recipe.tasks,
        "ms": ours["median_ms"],
        **{f"ms, {name}": row["median_ms"] for name, row in by_way.items() if name != "ours"},
        "limit ms": result["limit_ms"],
        "of the limit": ours["fraction_of_limit"],
        "best GFLOP/s": measured["limit"]["gflops"],
        "reached by": measured["limit"]["kernel"],
        "error": ours["error"],
    }


# Whole steps that stay on the GPU

RESIDENT = ("5w1s", "5w1s-5steps", "20w1s", "20w1s-5steps")
STEPS, EVERY = 600, 100


def resident(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Steps of the recipes, then the bits of the first one in chunks of other sizes."""
    for recipe in RECIPES:
        if recipe.name in (RESIDENT[:1] if short else RESIDENT):
            small = recipe._replace(tasks=2) if short else recipe
            yield row_of("resident", recipe.name, partial(_resident, small, device, 8 if short else STEPS))
    first = next(recipe for recipe in RECIPES if recipe.name == RESIDENT[0])
    yield row_of("resident", "chunks of 1 and 8 tasks", partial(_in_chunks, first, device, short))


def _resident(recipe: Recipe, device: str, steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    trainer, updater = _started(recipe, device, recipe.tasks, 2 * steps + EVERY)
    made = time.perf_counter() - began
    advance_on_device(trainer, updater, 1, steps)
    finish(device)
    first = _params(trainer, updater)
    began = time.perf_counter()
    batch = recipe.tasks
    with without_waits(torch.device(device)):  # between two readings of figures
        for step in range(steps + 1, steps + 1 + updater.every):
            updater.advance([torch.arange((step - 1) * batch, step * batch)], step, 0.001)
    updater.settle()
    whole = (time.perf_counter() - began) / updater.every
    again, twin = _started(recipe, device, recipe.tasks, steps)
    advance_on_device(again, twin, 1, steps)
    _same("another run", first, _params(again, twin))
    return {
        "seconds until the first step": made,
        "ms a step": 1000 * whole,
        "steps a second": 1 / whole,
        "ms of the graph": _graph_ms(updater),
        "waits of the host in 100 steps": 0,
        "another run has equal bits": "yes",
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }


def _started(recipe: Recipe, device: str, chunk: int, steps: int) -> tuple[Trainer, DeviceUpdater]:
    algorithm, source = algorithm_of(recipe, PLAIN[recipe.kind]), character_source(recipe.ways, recipe.queries)[1]
    every = min(EVERY, steps)
    return on_device(algorithm, source, recipe.tasks, chunk, torch.device(device), steps=steps, every=every)


def _params(trainer: Trainer, updater: DeviceUpdater) -> Params:
    updater.fetch()
    return {name: value.detach().clone() for name, value in trainer.state.params.items()}


def _same(what: str, ours: Params, other: Params) -> None:
    differing = [name for name in ours if not ours[name].equal(other[name])]
    if differing:
        raise WrongError(f"{what} has other bits of {', '.join(differing)}")


def _graph_ms(updater: DeviceUpdater) -> float:
    """The milliseconds of a step on the device alone; it is done at the end, since it takes the same tasks again."""
    if updater.graph is None:
        return 0.0
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(100):
        updater.graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 100


def _in_chunks(recipe: Recipe, device: str, short: bool) -> dict[str, Any]:
    if short:
        recipe = recipe._replace(tasks=8)
    runs = []
    for chunk in (recipe.tasks, 8, 1):
        trainer, updater = _started(recipe, device, chunk, 5)
        advance_on_device(trainer, updater, 1, 2 if short else 5)
        runs.append(_params(trainer, updater))
    for chunk, params in zip((8, 1), runs[1:], strict=True):
        _same(f"a run in chunks of {chunk}", params, runs[0])
    return {"another run has equal bits": "yes"}


# MAML on ResNet-12 in each precision

PHOTOGRAPHS = Recipe("resnet12-5w5s-15queries", "resnet12", 5, 5, 15, 1, 4, 0.01, 84, (64, 160, 320, 640))
"""5-way 5-shot with 15 queries of each class, 84×84 pixels: 100 images a task, as few-shot papers train ResNet-12."""

PRECISIONS = ("float32", "tf32", "bf16")
PHOTOGRAPH_STEPS = 10


def photographs(device: str, *, short: bool) -> Iterator[CheckRow]:
    """A row for each precision."""
    recipe = shortened(PHOTOGRAPHS)._replace(shots=1, queries=1) if short else PHOTOGRAPHS
    for precision in PRECISIONS[: 1 if short else None]:
        yield row_of(
            "photographs", f"{recipe.name}, {precision}", partial(_photographs, recipe, precision, device, short)
        )


def _photographs(recipe: Recipe, precision: str, device: str, short: bool) -> dict[str, Any]:
    steps, where = 2 if short else PHOTOGRAPH_STEPS, torch.device(device)
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
