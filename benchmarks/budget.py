"""Where the time of our meta-step goes: in the kernels, between them, and outside the gradient.

What is measured are steps of the training loop in one process, which makes the episodes, computes the chunks, adds up
the gradients and updates the parameters.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from benchmarks.steps import run_of, take_step, train_tasks
from benchmarks.ways import PLAIN, Recipe, algorithm_of, chunk_of, episodes_of
from metalearn.nn.native import Kernels, compiled
from metalearn.training.loop import Run, TrainState

PARTS = ("kernels", "between", "outside")
"""The parts of a step: inside the compiled functions; in Python and torch between them; and outside the gradient."""

CALLS = (
    "network_loss", "network_product", "network_outputs", "network_outputs_gradient", "product", "input_gradient",
    "weight_gradient", "norm",
)  # fmt: skip
"""The methods of `Kernels` that compute."""


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
            in_gradient[0] = in_kernels[0] = 0.0
            began = time.perf_counter()
            take_step(run, learner, step)
            whole = time.perf_counter() - began
            rows.append((in_kernels[0], in_gradient[0] - in_kernels[0], whole - in_gradient[0]))
    return {name: 1000 * statistics.median(values) for name, *values in zip(PARTS, *rows[1:], strict=True)}


def _run(recipe: Recipe, in_gradient: list[float]) -> tuple[Run, TrainState]:
    """A run of the recipe that adds the seconds of its gradients to `in_gradient`, and its learner."""
    algorithm = algorithm_of(recipe, PLAIN[recipe.kind])
    timed = algorithm._replace(meta_grad=_timed(algorithm.meta_grad, in_gradient))
    device = torch.device("cpu")
    return run_of(timed, train_tasks(episodes_of(recipe)), recipe.tasks, chunk_of(recipe, device), device)


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
