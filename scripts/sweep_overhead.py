"""Measures what a trial of a sweep costs that trains next to nothing: CPU seconds of a cold run and of a warm trial.

    python scripts/sweep_overhead.py

A cold run is a process of its own: `python train.py`. A warm trial is forked by hydra/sweeper=async. All train 20 steps
of maml_sinusoid, two tenths of a second. A warm trial is the difference between a sweep with many trials and one with
few, so that what a sweep costs once is left out. Prints a Markdown table of medians, with the smallest and the largest
of all repetitions.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
TRAINING = (
    "experiment=maml_sinusoid", "trainer.steps=20", "trainer.val_tasks=20", "trainer.test_tasks=20",
    "logger.tensorboard=false",
    "logger.report=false",
)  # fmt: skip
FEW, MANY = 2, 8
"""Trials of the two sweeps whose difference is measured."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each kind, one after the other in turn")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: must be at least 1; type --repeat 5")
    print("| ranks | cold run, CPU s | warm trial, CPU s | warm of cold |\n| --- | --- | --- | --- |")
    for ranks in (1, 2):
        cold, warm = [], []
        for _ in range(options.repeat):
            cold.append(cold_run(ranks))
            warm.append(warm_trial(ranks))
        print(f"| {ranks} | {_range(cold)} | {_range(warm)} | {median(warm) / median(cold):.2f} |", flush=True)
    return 0


def cold_run(ranks: int) -> float:
    """CPU seconds of one run."""
    with tempfile.TemporaryDirectory() as folder:
        return cpu_seconds([f"workers={ranks}", f"hydra.run.dir={folder}/run"])


def warm_trial(ranks: int) -> float:
    """CPU seconds of one trial."""
    totals = []
    for trials in (FEW, MANY):
        with tempfile.TemporaryDirectory() as folder:
            search = ["-m", "hydra/sweeper=async", "algorithm.inner_lr=interval(0.01,0.02)", f"workers={ranks}",
                      f"hydra.sweeper.n_trials={trials}", f"hydra.sweep.dir={folder}"]  # fmt: skip
            totals.append(cpu_seconds(search))
    return (totals[1] - totals[0]) / (MANY - FEW)


def cpu_seconds(overrides: Sequence[str]) -> float:
    """CPU seconds of train.py and all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *overrides, *TRAINING], check=True, capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
