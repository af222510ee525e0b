"""Where the time of our meta-step goes: in the kernels, between them, and outside the gradient.

What is measured are steps of the training loop in one process, which makes the episodes, computes the chunks, adds up
the gradients and updates the parameters.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.ways import PLAIN, SEED, Recipe, algorithm_of, chunk_of, episodes_of
from distributed.partition import dim_partitioner
from distributed.reduce import mean
from distributed.strategies.common.work import Plan, Work
from distributed.strategies.local import local
from metalearn.nn.native import Kernels, compiled
from metalearn.runs.checkpoint import NO_CHECKPOINTS
from metalearn.runs.logging import SILENT
from metalearn.runs.signals import NEVER
from metalearn.training.chunks import chunk_functions
from metalearn.training.loop import Run, Units, advance, new_learner, tasks_in_chunks
from metalearn.training.optimizers import adam
from metalearn.training.settings import Settings

PARTS = ("kernels", "between", "outside")
"""The parts of a step: inside the compiled functions; in Python and torch between them; and outside the gradient."""

CALLS = ("network_loss", "network_product", "product", "input_gradient", "weight_gradient", "norm")
"""The methods of `Kernels` that compute."""

RATE = 0.001


def budget_of(recipe: Recipe, steps: int) -> dict[str, float] | None:
    """Milliseconds of each of the `PARTS`: medians of so many steps, after one that is not measured. None where there
    are no compiled kernels."""
    if compiled(torch.float32) is None:
        return None
    in_gradient = [0.0]
    run, learner = _run(recipe, in_gradient)
    rows = []
    with _kernels_timed() as in_kernels:
        for step in range(1, steps + 2):
            tasks = tasks_in_chunks((step - 1) * recipe.tasks, recipe.tasks, run.training.chunk)
            in_gradient[0] = in_kernels[0] = 0.0
            began = time.perf_counter()
            advance(run, learner, tasks, step, RATE)
            whole = time.perf_counter() - began
            rows.append((in_kernels[0], in_gradient[0] - in_kernels[0], whole - in_gradient[0]))
    return {name: 1000 * statistics.median(values) for name, *values in zip(PARTS, *rows[1:], strict=True)}


def _run(recipe: Recipe, in_gradient: list[float]) -> tuple[Run, Any]:
    """A run of the recipe that adds the seconds of its gradients to `in_gradient`, and its learner."""
    device = torch.device("cpu")
    algorithm = algorithm_of(recipe, PLAIN[recipe.kind])
    episodes = episodes_of(recipe)
    source: Any = SimpleNamespace(episodes=lambda split, indices: episodes(indices))
    timed = algorithm._replace(meta_grad=_timed(algorithm.meta_grad, in_gradient))
    work = Work(*chunk_functions(timed, source, device, torch.float32), device)
    plan = Plan(work, 1, dim_partitioner(), mean())
    outer = adam(
        lr=RATE, beta1=0.9, beta2=0.999, eps=1e-8, schedule="constant", min_lr=0, decay=0.5, decay_every=1, warmup=0
    )
    units = Units(chunk_of(recipe, device), "tasks")
    settings = Settings(
        steps=1, meta_batch_size=recipe.tasks, task_chunk="auto", val_every=1, val_tasks=2, test_tasks=2
    )
    run = Run(
        settings, local(plan=plan, timeout=60)(), outer, plan.reduce, units, units, NO_CHECKPOINTS, SILENT, {}, NEVER
    )
    return run, new_learner(algorithm.init(torch.Generator().manual_seed(SEED)), outer.start)


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same function, which adds the seconds of every call to `seconds`."""

    @wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - began

    return timed


@contextmanager
def _kernels_timed() -> Iterator[list[float]]:
    """Within it, the seconds of every call of a compiled function are added to the list that it gives. The program
    itself has no clock there, which would cost it time."""
    seconds = [0.0]
    originals = {name: getattr(Kernels, name) for name in CALLS}
    for name, call in originals.items():
        setattr(Kernels, name, _timed(call, seconds))
    try:
        yield seconds
    finally:
        for name, call in originals.items():
            setattr(Kernels, name, call)
