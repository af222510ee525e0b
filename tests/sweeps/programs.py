"""Sweeps of the real program, and kills of their processes."""

import csv
import os
import signal
import sys
import time
from pathlib import Path

from tests.runs import ROOT, Program, alive, until

FIXED = (
    "experiment=maml_sinusoid", "trainer.meta_batch_size=8", "trainer.val_every=40", "trainer.val_tasks=20",
    "trainer.test_tasks=20", "checkpoint.every=10", "logger.tensorboard=false",
    "logger.plots=false", "logger.report=false",
)  # fmt: skip


PLOTS = "hydra.sweeper.plots=true"


def sweep(folder: Path, *overrides: str, **extra: str) -> Program:
    """Starts a sweep, which draws no plots unless it is told to."""
    searches = any(text.startswith("hydra/sweeper=") for text in overrides)
    if searches and PLOTS not in overrides:
        overrides = (*overrides, "hydra.sweeper.plots=false")
    command = [sys.executable, str(ROOT / "train.py"), "-m", *FIXED, *overrides, f"hydra.sweep.dir={folder}"]
    return Program(command, folder.parent, extra)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def params(folder: Path) -> dict[str, bytes]:
    """The parameters of every trial."""
    return {
        path.name: (path / "checkpoints/last/params.safetensors").read_bytes()
        for path in sorted(folder.glob("trial_*"))
    }


def completed(folder: Path, *overrides: str, **extra: str) -> str:
    outcome = sweep(folder, *overrides, **extra).wait()
    assert outcome.code == 0, outcome.text
    return outcome.text


def tree(pid: int) -> list[int]:
    """All processes below one, by generation."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *tree(child)]
    return found


def kill_some(program: Program, kind: str) -> None:
    """SIGKILL to the controller, the nursery, or a trial's process."""
    controller = program.process.pid
    below = tree(controller)
    victim = {"controller": [controller], "nursery": below[:1], "trial": below[1:2]}[kind]
    everyone = [controller, *below]
    for pid in victim:
        os.kill(pid, signal.SIGKILL)
    if kind != "trial":
        deadline = time.monotonic() + 2
        while any(alive(pid) for pid in everyone if pid != controller or kind == "controller"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        program.process.wait(20) if kind == "controller" else None
        assert not [pid for pid in below if alive(pid)], "orphans"


def run_until_killed(program: Program, kind: str, seconds: float) -> None:
    """Kills a process so many seconds after the first trial has started, if the sweep lasts that long."""
    try:
        until(lambda: program.process.poll() is not None or "starts with" in program.said(), "a trial")
        time.sleep(seconds)
        if program.process.poll() is None and len(tree(program.process.pid)) > 1:
            kill_some(program, kind)
        outcome = program.wait()
        assert outcome.code in (0, {"trial": 0, "nursery": 1, "controller": -signal.SIGKILL}[kind]), outcome.text
        assert "Traceback" not in outcome.text
    finally:
        program.kill()
