"""The speed of several processes: train.py on one recipe under the strategies, in turns."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

WARM_UP = 20
"""The first steps, which do not count."""

SHORT = ("trainer.val_every=100000", "trainer.val_tasks=64", "trainer.test_tasks=64", "checkpoint.every=100000",
         "logger.every=10", "logger.tensorboard=false", "logger.report=false")  # fmt: skip


class Workload(NamedTuple):
    """A training: its overrides, and the number of steps."""

    name: str
    overrides: tuple[str, ...]
    steps: int


class RunWay(NamedTuple):
    """A way to run it: the strategy, its workers, and how many such runs there are at once."""

    name: str
    overrides: tuple[str, ...]
    workers: int
    at_once: int = 1


WAYS = (
    RunWay("local", ("strategy=local",), 1),
    RunWay("local, two independent at once", ("strategy=local",), 1, at_once=2),
    RunWay("rpc", ("strategy=rpc",), 1),
    RunWay("rpc", ("strategy=rpc",), 2),
    RunWay("ddp", ("strategy=ddp",), 2),
)
"""The speeds of two independent processes are added: two workers can reach this at best."""

STEPS_A_RUN = 60_000
"""The number of steps in the published recipe."""

FEW = ("trainer.meta_batch_size=4", "trainer.val_tasks=2", "trainer.test_tasks=2")


class RunFigures(NamedTuple):
    """The figures of a run: samples or tasks a second, and the mean of every figure of its steps."""

    speed: float
    means: dict[str, float]


def measure(experiment: str, rounds: int, *, short: bool) -> dict[str, Any]:
    """Tasks a second of every way.

    Args:
        experiment: train.py's experiment, measured with its own recipe.
        rounds: runs of every way.
        short: few tasks, and two of the ways only.
    """
    case = Workload(experiment, (f"experiment={experiment}",), WARM_UP + (10 if short else 60))
    ways = [way._replace(overrides=(*way.overrides, *FEW)) for way in WAYS[1:4:2]] if short else list(WAYS)
    speeds = [[run(case, way).speed for way in ways] for _ in range(rounds)]
    by_way = [
        {"strategy": way.name, "workers": way.workers, "at_once": way.at_once, "tasks_per_second": list(values)}
        for way, values in zip(ways, zip(*speeds, strict=True), strict=True)
    ]
    return {"experiment": experiment, "rows": by_way}


def ratios(rows: Sequence[dict[str, Any]], row: dict[str, Any], *, at_once: int) -> list[float]:
    """A row's speed divided by a reference, round by round: one worker of the same strategy (for `ddp`: of `local`);
    with `at_once` 2, two independent processes. Empty if the reference was not measured."""
    name = "rpc" if row["strategy"] == "rpc" and at_once == 1 else "local"
    for other in rows:
        if other["strategy"].startswith(name) and other["workers"] == 1 and other["at_once"] == at_once:
            pairs = zip(row["tasks_per_second"], other["tasks_per_second"], strict=True)
            return [speed / reference for speed, reference in pairs]
    return []


def project(experiment: str) -> dict[str, Any]:
    """The hours of the published number of steps on a GPU, from 500 measured steps after the warm-up."""
    steps = 500
    case = Workload(experiment, (f"experiment={experiment}", "device=cuda"), WARM_UP + steps)
    figures = run(case, RunWay("local", ("strategy=local", "logger.every=1"), 1))
    seconds = STEPS_A_RUN * figures.means["step_seconds"]
    return {"experiment": experiment, "measured_steps": steps, "steps": STEPS_A_RUN, "hours": seconds / 3600}


def run(case: Workload, way: RunWay) -> RunFigures:
    """One run, or several at once; their speeds are added."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(i) for i in range(way.at_once)]
        processes = [
            subprocess.Popen(command(case, way, path), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for path in paths
        ]
        try:
            for process, path in zip(processes, paths, strict=True):
                if process.wait(600):
                    raise SystemExit(f"error: {' '.join(command(case, way, path))}: exit code {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        figures = [figures_of(path) for path in paths]
    return RunFigures(sum(figure.speed for figure in figures), figures[0].means)


def command(case: Workload, way: RunWay, folder: Path) -> list[str]:
    return [
        sys.executable, str(ROOT / "train.py"), *case.overrides, *SHORT, *way.overrides,
        f"workers={way.workers}", f"trainer.steps={case.steps}", f"hydra.run.dir={folder}",
    ]  # fmt: skip


def figures_of(folder: Path) -> RunFigures:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if row["split"] == "train" and row["step"] > WARM_UP]
    means = {name: statistics.mean(row[name] for row in steady) for name in steady[0] if name != "split"}
    unit = "samples_per_second" if "samples_per_second" in means else "tasks_per_second"
    batch = steady[0][unit] * steady[0]["step_seconds"]
    return RunFigures(batch / means["step_seconds"], means)
