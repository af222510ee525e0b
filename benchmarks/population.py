"""Population based training beside plain runs of as many steps, and its bits after kills.

    python benchmarks/population.py FOLDER                  on two cores 25 minutes
    python benchmarks/population.py FOLDER --seeds 1        one population, killed five times

FOLDER gets all runs; the same command goes on with what is there. Each population of 4 members and 5 rounds is compared
with 4 plain runs that keep its first parameters throughout. The first population is trained once more with other
numbers of slots and five kills, and its winner's lineage alone: the bits must be equal.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
TRAINING = ("experiment=maml_glyphs", "trainer.steps=500", "logger.tensorboard=false", "logger.report=false")
SPACE = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "algorithm.inner_lr=tag(log,interval(0.03,3.0))")
KILLS, SLOTS = 5, (1, 3, 2, 1, 4)


class Best(NamedTuple):
    """The best run by its validation, and its test accuracy."""

    name: str
    val: float
    test: float


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3, help="populations, each with another seed of the sweeper")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print("| seed | population: val | test | best of 4 plain runs: val | test |\n| --- | --- | --- | --- | --- |")
    for seed in range(options.seeds):
        sweep(folder / f"population{seed}", seed, 2)
        population, plain = winner(folder / f"population{seed}"), best_plain(folder, seed)
        print(f"| {seed} | {population.val:.2%} | {population.test:.2%} | {plain.val:.2%} | {plain.test:.2%} |")
    killed = kill_and_resume(folder / "killed", 0)
    same = fingerprint(folder / "killed") == fingerprint(folder / "population0")
    slots = ", ".join(map(str, SLOTS))
    print(f"killed {killed} times, with {slots} slots: lineage and bits {'equal' if same else 'NOT equal'}")
    sweep(folder / "replay", 0, 1, f"hydra.sweeper.replay={folder / 'population0'}")
    alone = params_of(folder / "replay" / winner(folder / "replay").name)
    replayed = alone == params_of(folder / "population0" / winner(folder / "population0").name)
    print(f"the winner's lineage alone: bits {'equal' if replayed else 'NOT equal'}")
    return 0 if same and replayed else 1


def command(folder: Path, seed: int, slots: int, *overrides: str) -> list[str]:
    """The command of a population."""
    return [
        sys.executable, str(ROOT / "train.py"), "-m", *TRAINING, *SPACE, "hydra/sweeper=pbt", "hydra.sweeper.members=4",
        "hydra.sweeper.rounds=5", f"hydra.sweeper.seed={seed}", f"hydra.sweeper.n_jobs={slots}",
        f"hydra.sweep.dir={folder}", *overrides,
    ]  # fmt: skip


def sweep(folder: Path, seed: int, slots: int, *overrides: str) -> None:
    """Trains a population to its end."""
    subprocess.run(
        command(folder, seed, slots, *overrides), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def kill_and_resume(folder: Path, seed: int) -> int:
    """Trains a population with a kill of the controller, its parent process or a trial at random moments; returns how
    many there were."""
    rng = random.Random(7)
    kills = 0
    for slots in SLOTS:
        process = subprocess.Popen(command(folder, seed, slots), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(rng.uniform(15, 40))
            below = children(process.pid)
            victims = [process.pid, *below, *(child for pid in below for child in children(pid))]
            if process.poll() is None:
                victim = rng.choice(victims)
                kills += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            time.sleep(1)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
    sweep(folder, seed, 2)
    return kills


def children(pid: int) -> list[int]:
    """The processes below one."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]


def best_plain(folder: Path, seed: int) -> Best:
    """The best of the runs that keep a population's first parameters."""
    rows = trials(folder / f"population{seed}")
    runs = []
    for row in (row for row in rows if row["round"] == "0"):
        place = folder / f"plain{seed}_{row['member']}"
        params = [f"{key}={row[key]}" for key in (text.partition("=")[0] for text in SPACE)]
        own = [sys.executable, str(ROOT / "train.py"), *TRAINING, *params, f"hydra.run.dir={place}"]
        if subprocess.run(own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            runs.append(best_of(place))
    return max(runs, key=lambda run: run.val)


def winner(folder: Path) -> Best:
    """A population's best run of the last round."""
    results = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    return best_of(folder / results["best_folder"])


def best_of(run: Path) -> Best:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    return Best(run.name, result["val"]["accuracy"], result["test"]["accuracy"])


def trials(folder: Path) -> list[dict[str, str]]:
    """The lines of trials.csv."""
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def fingerprint(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Of each trial: the one that it goes on from, its value, and the digest of its parameters."""
    return {
        row["number"]: (row["parent"], row["val.accuracy"], params_of(folder / f"trial_{int(row['number']):04d}"))
        for row in trials(folder)
    }


def params_of(run: Path) -> str:
    return hashlib.sha256((run / "checkpoints/last/params.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
