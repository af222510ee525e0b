"""Whole steps that stay on the GPU, as in a run of train.py: their speed, their bits, and whether the host waits."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.rows import CheckRow, WrongError, row_of
from benchmarks.machine import finish
from benchmarks.steps import advance_on_device, on_device
from benchmarks.ways import PLAIN, RECIPES, Recipe, algorithm_of, character_source
from metalearn.training.on_device import DeviceUpdater, without_waits
from metalearn.training.trainer import Trainer
from metalearn.types import Params

MEASURED = ("5w1s", "5w1s-5steps", "20w1s", "20w1s-5steps")
STEPS, EVERY = 600, 100


def resident(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Steps of the recipes, then the bits of the first one in chunks of other sizes."""
    for recipe in RECIPES:
        if recipe.name in (MEASURED[:1] if short else MEASURED):
            small = recipe._replace(tasks=2) if short else recipe
            yield row_of("resident", recipe.name, partial(_measured, small, device, 8 if short else STEPS))
    first = next(recipe for recipe in RECIPES if recipe.name == MEASURED[0])
    yield row_of("resident", "chunks of 1 and 8 tasks", partial(_in_chunks, first, device, short))


def _measured(recipe: Recipe, device: str, steps: int) -> dict[str, Any]:
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
    found = []
    for chunk in (recipe.tasks, 8, 1):
        trainer, updater = _started(recipe, device, chunk, 5)
        advance_on_device(trainer, updater, 1, 2 if short else 5)
        found.append(_params(trainer, updater))
    for chunk, params in zip((8, 1), found[1:], strict=True):
        _same(f"a run in chunks of {chunk}", params, found[0])
    return {"another run has equal bits": "yes"}
