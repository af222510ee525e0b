"""Trainings on the device: every algorithm for some steps; the paper's recipe, with its memory; and train.py in worlds
of one and, where each worker can have a GPU of its own, two workers, which must give one process's parameters."""

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu_check.agreement import ALLOWED, error_of_all
from benchmarks.gpu_check.check import CheckRow, LeftOutError, WrongError, at_most, last_lines, row_of
from benchmarks.gpu_check.learners import ALGORITHMS, training_of
from benchmarks.meta_gradients import finish
from benchmarks.processes import STEPS_A_RUN
from benchmarks.steps import take_step, train_tasks, trainer_of
from benchmarks.ways import PLAIN, RECIPES, ROOT, algorithm_of, character_source, chunk_of, episodes_of
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
    (paper,) = (one._replace(tasks=batch) for one in RECIPES if one.name == RECIPE)
    algorithm, where = algorithm_of(paper, PLAIN[paper.kind]), torch.device(device)
    trainer = trainer_of(algorithm, train_tasks(episodes_of(paper)), batch, chunk_of(paper, where), where)
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
    """The figures of a memory that had `early` and `late` bytes.

    Raises:
        WrongError: it has grown by more than `GROWTH`.
    """
    grown = at_most("bytes by which it grows", late - early, GROWTH)
    return {"MiB after a tenth": early / 2**20, "MiB at the end": late / 2**20, "MiB grown": grown / 2**20}


# train.py in worlds

WORLD_STEPS, LIMIT = 20, 60

LOCAL = "local"
"""The folder of the run that the others are compared with."""

OVERRIDES = (
    "experiment=maml_glyphs", "precision=float64", "model.filters=16", "trainer.meta_batch_size=8",
    "trainer.task_chunk=2", "trainer.val_tasks=8", "trainer.test_tasks=8", "logger.plots=false", "logger.report=false",
)  # fmt: skip


def worlds(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Remote calls, and all-reduce (NCCL on GPUs), beside `strategy=local`."""
    steps = 2 if short else WORLD_STEPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield row_of("worlds", "local, 1 worker", partial(_local, folder, device, steps))
        for strategy in ("rpc", "ddp"):
            for workers in (1, 2):
                work = partial(_beside_local, folder, strategy, workers, device, steps)
                yield row_of("worlds", f"{strategy}, {workers} worker{'s' * (workers > 1)}", work)
        if device == "cuda" and torch.cuda.is_available():
            shared = partial(_beside_local, folder, "rpc", 2, "auto", steps)
            yield row_of("worlds", "rpc, 2 workers on the GPUs that there are", shared)
            resident = "steps stay on the GPU: {}".format
            yield row_of("worlds", resident("local"), partial(_resident, folder, "local", 1, device, steps))
            for workers, where in ((1, device), (2, "auto")):
                backend = "NCCL" if torch.cuda.device_count() >= workers else "gloo, on one GPU"
                work = partial(_resident, folder, "ddp", workers, where, steps)
                yield row_of("worlds", resident(f"ddp, ranks: {workers}, {backend}"), work)


def _beside_local(folder: Path, strategy: str, workers: int, device: str, steps: int) -> dict[str, Any]:
    gpus = torch.cuda.device_count() if device == "cuda" else workers
    if gpus < workers:
        raise LeftOutError(f"needs a GPU for each worker; workers: {workers}, GPUs: {gpus}")
    run = folder / f"{strategy}{workers}-{device}"
    log = _train(run, strategy, workers, device, steps)
    ours, exact = (load_file(one / "checkpoints/last/params.safetensors") for one in (run, folder / LOCAL))
    names = sorted(exact)
    parted = error_of_all([ours[name] for name in names], [exact[name] for name in names])
    equal = all(ours[name].equal(exact[name]) for name in names)
    return {
        "parameters part by": at_most("parameters part by", parted, PARTED),
        "equal bits": "yes" if equal else "no",
        "backend": _backend(log, device) if strategy == "ddp" else "remote calls",
    }


def _resident(folder: Path, strategy: str, workers: int, device: str, steps: int) -> dict[str, Any]:
    """A run in float32, whose steps stay on the GPU; beside that of `local`, which comes first, its bits and speed."""
    run, first = folder / f"resident-{strategy}{workers}", folder / "resident-local1"
    log = _train(run, strategy, workers, device, 10 * steps, "precision=float32", "logger.every=10")
    line = re.search(r"a step is one CUDA graph|parameters and optimiser stay on the device", log)
    if line is None:
        raise WrongError(f"the steps do not stay on the GPU\n{last_lines(log)}")
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = statistics.median(row["step_seconds"] for row in rows if "step_seconds" in row)
    ours, theirs = (load_file(one / "checkpoints/last/params.safetensors") for one in (run, first))
    equal = all(ours[name].equal(value) for name, value in theirs.items())
    return {"a step": line[0], "ms a step": 1000 * seconds, "equal bits": "yes" if equal else "no"}


def _backend(log: str, device: str) -> str:
    """The backend of the process group, as the run's log has it."""
    match = re.search(r"(\w+) over \d+ ranks", log)
    name, expected = match[1] if match else "none", {"cuda": "nccl", "cpu": "gloo"}[device]
    if name != expected:
        raise WrongError(f"the backend is {name}, and must be {expected}")
    return name


def _local(folder: Path, device: str, steps: int) -> dict[str, Any]:
    _train(folder / LOCAL, "local", 1, device, steps)
    return {}


def _train(run: Path, strategy: str, workers: int, device: str, steps: int, *more: str) -> str:
    """Runs train.py in the folder `run`; returns what it says.

    Raises:
        WrongError: Hydra is not installed, or the run has failed.
    """
    if importlib.util.find_spec("hydra") is None:
        raise WrongError("train.py needs Hydra, which is not installed; type pip install hydra-core")
    command = [
        sys.executable, str(ROOT / "train.py"), *OVERRIDES, f"strategy={strategy}", f"workers={workers}",
        f"device={device}", f"trainer.steps={steps}", f"hydra.run.dir={run}", *more,
    ]  # fmt: skip
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, cwd=run.parent, env=outside, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    if done.returncode:
        raise WrongError(f"{' '.join(command)}\nexit code {done.returncode}\n{last_lines(done.stdout + done.stderr)}")
    return done.stdout + done.stderr
