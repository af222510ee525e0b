"""Trainings on the device in one process: every algorithm for some steps; and the paper's recipe, with its memory."""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.agreement import ALLOWED, error_of_all
from benchmarks.gpu_check.learners import ALGORITHMS, training_of
from benchmarks.gpu_check.rows import CheckRow, at_most, row_of
from benchmarks.machine import finish
from benchmarks.processes import STEPS_A_RUN
from benchmarks.steps import take_step, train_tasks, trainer_of
from benchmarks.ways import PLAIN, RECIPES, algorithm_of, character_source, chunk_of, episodes_of
from metalearn.training.chunks import DATA_SECONDS
from metalearn.training.trainer import TrainState, figures

STEPS = 5

PARTED = ALLOWED[torch.float64]
"""The allowed difference of the float64 parameters from those of the CPU after all steps."""

RECIPE = "5w1s"
"""5-way 1-shot MAML on 32 tasks a step, Finn et al. 2017 (arXiv 1703.03400), appendix A.1."""

RECIPE_STEPS = 500

GROWTH = 64 * 2**20
"""The bytes by which memory may grow after the first tenth of the steps: 0.15 MB a step are noticed."""


def algorithms(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Every algorithm: finite steps in float32; and in float64 the CPU's parameters after them."""
    for name in ALGORITHMS:
        yield row_of("algorithms", name, partial(_algorithm, name, device, 2 if short else STEPS))


def _algorithm(name: str, device: str, steps: int) -> dict[str, Any]:
    losses, _ = _trained(name, device, torch.float32, steps)
    (_, ours), (_, exact) = (_trained(name, where, torch.float64, steps) for where in (device, "cpu"))
    names = sorted(exact.params)
    parted = error_of_all([ours.params[key].detach() for key in names], [exact.params[key].detach() for key in names])
    return {
        "steps": steps,
        "first loss": losses[0],
        "last loss": losses[-1],
        "float64 parameters part by": at_most("float64 parameters part by", parted, PARTED),
    }


def _trained(name: str, device: str, dtype: torch.dtype, steps: int) -> tuple[list[float], TrainState]:
    """The loss of every step, and the learner. The loop raises DivergedError for a loss that is not finite."""
    algorithm, source, batch = training_of(name)
    trainer = trainer_of(algorithm, source, batch, batch // 2, torch.device(device), dtype)
    return [figures(take_step(trainer, step))["loss"] for step in range(1, steps + 1)], trainer.state


def recipe(device: str, *, short: bool) -> Iterator[CheckRow]:
    """The speed of the paper's recipe with the hours of a whole run, and memory after a tenth and after all steps."""
    steps, batch = (10, 2) if short else (RECIPE_STEPS, 32)
    held: list[dict[str, int]] = []
    yield row_of("recipe", f"{steps} steps", partial(_recipe_steps, device, steps, batch, held))
    if len(held) == 2:  # all steps are done
        for what, early in held[0].items():
            yield row_of("recipe", f"memory of the {what}", partial(growth, early, held[1][what]))


def _recipe_steps(device: str, steps: int, batch: int, held: list[dict[str, int]]) -> dict[str, Any]:
    (chosen,) = (one._replace(tasks=batch) for one in RECIPES if one.name == RECIPE)
    algorithm, where = algorithm_of(chosen, PLAIN[chosen.kind]), torch.device(device)
    trainer = trainer_of(algorithm, train_tasks(episodes_of(chosen)), batch, chunk_of(chosen, where), where)
    rows, seconds = [], []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        rows.append(figures(take_step(trainer, step)))
        finish(device)
        seconds.append(time.perf_counter() - began)
        if step in (steps // 10, steps):
            held.append(_held(device))
    steady = slice(steps // 10, None)
    a_step = statistics.mean(seconds[steady])
    return {
        "characters": character_source(ways=5, queries=1)[0],
        "tasks a step": batch,
        "ms a step": 1000 * a_step,
        "ms of episodes": 1000 * statistics.mean(row[DATA_SECONDS] for row in rows[steady]),
        "tasks a second": batch / a_step,
        f"hours of {STEPS_A_RUN} steps": STEPS_A_RUN * a_step / 3600,
        "last accuracy": statistics.mean(row["accuracy"] for row in rows[-steps // 10 :]),
    }


def _held(device: str) -> dict[str, int]:
    """Bytes of the process's own memory, and of its tensors on a GPU."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    held = {"process": int(status["RssAnon"].split()[0]) * 1024}
    return held | ({"GPU": torch.cuda.memory_allocated()} if device == "cuda" else {})


def growth(early: int, late: int) -> dict[str, Any]:
    """The figures of a memory that had so many bytes.

    Raises:
        WrongError: it has grown by more than `GROWTH`.
    """
    grown = at_most("bytes by which it grows", late - early, GROWTH)
    return {"MiB after a tenth": early / 2**20, "MiB at the end": late / 2**20, "MiB grown": grown / 2**20}
