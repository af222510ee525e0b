"""Measures what each strategy costs, with train.py on the real Omniglot; prints one table.

    METALEARN_DATA=/path/to/data python benchmarks/strategies.py

Every row is a run of train.py in its own folder. Seconds and bytes come from its metrics.jsonl, without the first
steps: for remote calls the packed bytes, for process groups the bytes that the kernel has sent over TCP. A round runs
every row once; the table has medians over the rounds. `--beside FOLDER` also runs every row with another version of the
program, in turn.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    """A way to run it: the strategy, its workers, how many such runs there are at once, and the program's folder."""

    name: str
    overrides: tuple[str, ...]
    workers: int
    at_once: int = 1
    program: Path = ROOT


CASES = (
    Workload("supervised, 128 samples", ("experiment=supervised_omniglot",), 120),
    Workload("supervised, 512 samples", ("experiment=supervised_omniglot", "trainer.meta_batch_size=512"), 50),
    Workload("MAML, 32 tasks", ("experiment=maml_omniglot",), 50),
)
WAYS = (
    RunWay("local", ("strategy=local",), 1),
    RunWay("local, twice at once", ("strategy=local",), 1, at_once=2),
    RunWay("rpc", ("strategy=rpc",), 2),
    RunWay("rpc_autograd", ("strategy=rpc_autograd",), 2),
    RunWay("ddp", ("strategy=ddp",), 2),
    RunWay("ddp, added in order", ("strategy=ddp", "strategy.overlap=false"), 2),
    RunWay("split", ("strategy=split",), 2),
)


class RunFigures(NamedTuple):
    """The figures of a run: samples or tasks a second, and the mean of every figure of its steps."""

    speed: float
    means: dict[str, float]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of every row")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="only these")
    parser.add_argument("--workers", nargs="+", type=int, default=[2], help="of the ways that have several")
    parser.add_argument("--beside", type=Path, help="a folder with another version of the program")
    options = parser.parse_args()
    wanted = chosen_ways(options.ways, options.workers, options.beside)
    print(
        "| what | strategy | workers | a second | of one | ms compute | ms waiting | ms communication | bytes sent |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for case in CASES:
        if options.case not in (None, case.name):
            continue
        ways = [way for way in wanted if suits(case, way)]
        rounds = [[run(case, way) for way in ways] for _ in range(options.rounds)]
        for i, way in enumerate(ways):
            print(row(case, way, [figures[i] for figures in rounds], [figures[0].speed for figures in rounds]))
    return 0


def chosen_ways(names: Sequence[str] | None, workers: Sequence[int], beside: Path | None) -> list[RunWay]:
    """The ways with these names for these numbers of workers, each also with the program in `beside`."""
    ways = []
    for way in WAYS:
        if names is None or way.name in names:
            for count in workers if way.workers > 1 else (1,):
                ways.append(way._replace(workers=count))
                if beside is not None:
                    ways.append(ways[-1]._replace(name=f"{way.name}, beside", program=beside.resolve()))
    return ways


def suits(case: Workload, way: RunWay) -> bool:
    plain = case.name.startswith("supervised")
    return plain or not (way.name.startswith("split") or "strategy.overlap=false" in way.overrides)


def run(case: Workload, way: RunWay) -> RunFigures:
    """One run, or several at once; their speeds are added."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(i) for i in range(way.at_once)]
        processes = [
            subprocess.Popen(
                command(case, way, path), cwd=way.program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
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
        sys.executable, str(way.program / "train.py"), *case.overrides, *SHORT, *way.overrides,
        f"workers={way.workers}", f"trainer.steps={case.steps}", f"hydra.run.dir={folder}",
    ]  # fmt: skip


def figures_of(folder: Path) -> RunFigures:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = [row for row in rows if row["split"] == "train" and row["step"] > WARM_UP]
    means = {name: statistics.mean(row[name] for row in steady) for name in steady[0] if name != "split"}
    unit = "samples_per_second" if "samples_per_second" in means else "tasks_per_second"
    batch = steady[0][unit] * steady[0]["step_seconds"]
    return RunFigures(batch / means["step_seconds"], means)


def row(case: Workload, way: RunWay, runs: Sequence[RunFigures], alone: Sequence[float]) -> str:
    """A line of the table: medians over the rounds, with the figures of all workers side by side."""

    def workers(name: str, scale: float) -> list[float]:
        return [
            scale * statistics.median(figures.means[f"worker{rank}/{name}"] for figures in runs)
            for rank in range(way.workers)
        ]

    seconds = (workers(f"{part}_seconds", 1000) for part in ("compute", "waiting", "communication"))
    cells = [" / ".join(f"{value:.1f}" for value in values) for values in seconds]
    ratio = statistics.median(figures.speed / one for figures, one in zip(runs, alone, strict=True))
    sent = " / ".join(f"{value:,.0f}" for value in workers("bytes_sent", 1))
    speed = statistics.median(figures.speed for figures in runs)
    columns = [case.name, way.name, str(way.workers * way.at_once), f"{speed:.0f}", f"{ratio:.2f}×", *cells, sent]
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    sys.exit(main())
