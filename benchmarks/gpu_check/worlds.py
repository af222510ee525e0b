"""train.py in worlds of one and, where each worker can have a GPU of its own, two: the parameters of one process."""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu_check.agreement import error_of_all
from benchmarks.gpu_check.rows import CheckRow, LeftOutError, WrongError, at_most, last_lines, row_of
from benchmarks.gpu_check.training import PARTED
from benchmarks.ways import ROOT

STEPS, LIMIT = 20, 60

LOCAL = "local"
"""The folder of the run that the others are compared with."""

OVERRIDES = (
    "experiment=maml_glyphs", "precision=float64", "model.filters=16", "trainer.meta_batch_size=8",
    "trainer.task_chunk=2", "trainer.val_tasks=8", "trainer.test_tasks=8", "logger.plots=false", "logger.report=false",
)  # fmt: skip


def worlds(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Remote calls, and all-reduce (NCCL on GPUs), beside `strategy=local`."""
    steps = 2 if short else STEPS
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


def _beside_local(folder: Path, strategy: str, workers: int, device: str, steps: int) -> dict[str, Any]:
    gpus = torch.cuda.device_count() if device == "cuda" else workers
    if gpus < workers:
        raise LeftOutError(f"needs a GPU for each worker; workers: {workers}, GPUs: {gpus}")
    run = folder / f"{strategy}{workers}-{device}"
    said = _train(run, strategy, workers, device, steps)
    ours, exact = (load_file(one / "checkpoints/last/params.safetensors") for one in (run, folder / LOCAL))
    names = sorted(exact)
    parted = error_of_all([ours[name] for name in names], [exact[name] for name in names])
    equal = all(ours[name].equal(exact[name]) for name in names)
    return {
        "parameters part by": at_most("parameters part by", parted, PARTED),
        "equal bits": "yes" if equal else "no",
        "backend": _backend(said, device) if strategy == "ddp" else "remote calls",
    }


def _backend(said: str, device: str) -> str:
    """The backend of the process group, as the run's log has it."""
    found = re.search(r"(\w+) over \d+ ranks", said)
    name, wanted = found[1] if found else "none", {"cuda": "nccl", "cpu": "gloo"}[device]
    if name != wanted:
        raise WrongError(f"the backend is {name}, and must be {wanted}")
    return name


def _local(folder: Path, device: str, steps: int) -> dict[str, Any]:
    _train(folder / LOCAL, "local", 1, device, steps)
    return {}


def _train(run: Path, strategy: str, workers: int, device: str, steps: int) -> str:
    """Runs train.py in the folder `run`; returns what it says.

    Raises:
        WrongError: Hydra is not installed, or the run has failed.
    """
    if importlib.util.find_spec("hydra") is None:
        raise WrongError("train.py needs Hydra, which is not installed; type pip install hydra-core")
    command = [
        sys.executable, str(ROOT / "train.py"), *OVERRIDES, f"strategy={strategy}", f"workers={workers}",
        f"device={device}", f"trainer.steps={steps}", f"hydra.run.dir={run}",
    ]  # fmt: skip
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, cwd=run.parent, env=outside, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    if done.returncode:
        raise WrongError(f"{' '.join(command)}\nexit code {done.returncode}\n{last_lines(done.stdout + done.stderr)}")
    return done.stdout + done.stderr
