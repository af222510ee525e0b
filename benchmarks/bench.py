"""Measures how fast meta-gradients are, ours and those of other libraries, in one run; gives table, JSON and chart.

    METALEARN_DATA=/path/to/data metalearn bench
    metalearn bench --only 5w1s resnet12 --threads 1
    metalearn bench --short

Every way computes the same second-order gradient of the same episodes from the same parameters. Each number of threads
has its own process, which keeps freed memory as train.py does. There, every round runs every way in its turn: a call
that takes less than 0.1 s is repeated for that time, as in training, and its mean counts. The error of a way is the
largest difference of its float32 gradient from the loop's float64 gradient, with a smooth activation. The limit is the
time of the step's floating-point operations at the best rate that any matrix product or 3×3 convolution reaches in the
same process. TorchOpt is measured if it is installed. `processes` are runs of train.py under the strategies.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.meta_gradients import Numbers, quartiles, table
from benchmarks.meta_gradients import measure as measure_gradients
from benchmarks.processes import measure as measure_processes
from benchmarks.processes import project, ratios
from benchmarks.ways import RECIPES, ROOT, Recipe, character_source, shortened
from distributed.launch.processes import share_arena
from metalearn.app.process import keep_freed_memory
from metalearn.cli.arguments import command_parser, make_output, whole
from metalearn.nn.surroundings import compute_with
from metalearn.reporting.provenance import cpu_name, version_of

sys.path.append(str(ROOT / ".torchopt"))  # where `pip install --target=.torchopt torchopt` puts it

PROCESSES = "processes"
NAMES = (*(recipe.name for recipe in RECIPES), PROCESSES)
QUICK = ("5w1s", "5w1s-5steps", "5w1s-15queries", "sinusoid", "resnet12", PROCESSES)
"""The recipes of the short mode."""

NO_MEASUREMENT = "short mode: the times are no measurement"


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    options = options_of(arguments)
    if options.child is not None:
        options.child.write_text(json.dumps(measure(options)))
        return 0
    characters, _ = character_source(ways=5, queries=1)
    threads = options.threads if options.device == "cpu" else options.threads[:1]
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    measurements = [in_child(options, number) for number in threads] if recipes_of(options) else []
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "short": options.short, "characters": characters,
        "cpu": cpu_name(), "cores": os.cpu_count(), "gpu": gpu, "versions": versions(),
        "rounds": options.rounds, "measurements": measurements, **of_processes(options, characters),
    }  # fmt: skip
    (options.output / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(report(results)))
    if measurements:
        note = NO_MEASUREMENT if options.short else ""
        print(f"\n{chart(measurements, options.output / 'bench.png', note)}")
    print(options.output / "bench.json")
    return 0


def versions() -> dict[str, str | None]:
    """The versions of Python and of the libraries; None: not installed."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in ("torch", "numpy", "torchopt")}


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("bench", __doc__)
    parser.add_argument("--short", action="store_true", help="few tasks and rounds: checks that all works")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=whole(1), help="runs of every way (7; in short mode 2)")
    parser.add_argument("--threads", type=whole(1), nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ours, loop and vmap on a GPU")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="of ours; float32 if unset")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "bench", help="folder of the results")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU here; type --device cpu")
    if options.child is None:
        make_output(parser, options.output)
    options.only = options.only or (QUICK if options.short else NAMES)
    options.rounds = options.rounds or (2 if options.short else 7)
    return options


def recipes_of(options: argparse.Namespace) -> list[Recipe]:
    recipes = [recipe for recipe in RECIPES if recipe.name in options.only]
    return [shortened(recipe) for recipe in recipes] if options.short else recipes


def in_child(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The result of `measure` in a process that has `threads` threads from its start."""
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if options.short:
        environment["OMP_WAIT_POLICY"] = "passive"  # a waiting thread that spins would slow down other programs
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [
            sys.executable, str(ROOT / "scripts/bench.py"), "--child", str(path),
            "--threads", str(threads), "--device", options.device,
            "--rounds", str(options.rounds), "--precision", options.precision, "--only", *options.only,
            *["--short"] * options.short,
        ]  # fmt: skip
        if code := subprocess.run(command, env=os.environ | environment, check=False).returncode:
            raise SystemExit(f"error: {' '.join(command)}: exit code {code}")
        results: dict[str, Any] = json.loads(path.read_text())
    return results


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the meta-gradients with `options.threads` threads."""
    (threads,) = options.threads
    torch.set_num_threads(threads)
    keep_freed_memory()
    share_arena()
    compute_with(options.precision)
    seconds = 0.02 if options.short else 0.3
    return measure_gradients(recipes_of(options), options.rounds, options.device, threads, seconds)


def of_processes(options: argparse.Namespace, characters: str) -> dict[str, Any]:
    """Measures runs of train.py: the strategies on a CPU; on a GPU, the steps for a projection."""
    experiment = f"maml_{characters}"
    results: dict[str, Any] = {"processes": None, "projection": None}
    if PROCESSES in options.only and options.device == "cpu":
        rounds = 1 if options.short else min(options.rounds, 3)
        results["processes"] = measure_processes(experiment, rounds, short=options.short)
    elif PROCESSES in options.only:
        results["projection"] = project(experiment)
    return results


def report(results: dict[str, Any]) -> list[str]:
    """The lines of the tables, in Markdown."""
    libraries = ", ".join(f"{name} {version or 'not installed'}" for name, version in results["versions"].items())
    lines = [f"{results['cpu']}, {results['cores']} cores; {libraries}",
             f"characters: {results['characters']}; GPU: {results['gpu'] or 'not measured on a GPU'}"]  # fmt: skip
    lines += [NO_MEASUREMENT] * results["short"]
    for measured in results["measurements"]:
        lines += ["", *table(measured)]
    if results["processes"] is not None:
        lines += ["", *processes_table(results["processes"])]
    if results["projection"] is not None:
        projected = results["projection"]
        lines += ["", f"{projected['steps']} steps of {projected['experiment']} on this GPU: {projected['hours']:.2f} "
                  f"hours, from {projected['measured_steps']} measured steps"]  # fmt: skip
    return lines


def processes_table(measured: dict[str, Any]) -> list[str]:
    rows = measured["rows"]
    lines = [f"train.py experiment={measured['experiment']}, one thread a process", "",
             "| strategy | workers | tasks a second | quartiles | of one worker | of two independent |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in rows:
        speeds = row["tasks_per_second"]
        low, high = quartiles(speeds)
        of_one, of_two = (ratios(rows, row, at_once=number) for number in (1, 2))
        lines.append(
            f"| {row['strategy']} | {row['workers'] * row['at_once']} | {statistics.median(speeds):.0f} | "
            f"{low:.0f}–{high:.0f} | {median_or_dash(of_one, '.2f')} | {median_or_dash(of_two, '.0%')} |"
        )
    return lines


def median_or_dash(values: Numbers, style: str) -> str:
    return format(statistics.median(values), style) if values else "–"


COLORS = {"ours": "#0b6e99", "vmap": "#b8c4ca", "TorchOpt": "#e3b23c"}
LABELS = {"vmap": "vmap of grad over F.conv2d", "TorchOpt": "TorchOpt's MetaSGD"}


def chart(measurements: Sequence[dict[str, Any]], path: Path, note: str) -> Path:
    """Draws a row for each number of threads, with bars by recipe: medians and quartiles of the ratio to the loop. The
    note stands below."""
    import matplotlib  # not in the processes that measure

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = max(len(measured["recipes"]) for measured in measurements)
    size = max(7.0, 3.0 + 1.15 * count), 1.2 + 3.4 * len(measurements)
    figure, rows = plt.subplots(len(measurements), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, measured in zip(rows[:, 0], measurements, strict=True):
        recipes, threads = measured["recipes"], measured["threads"]
        ways = [way for way in COLORS if way in recipes[0]["by_way"]]
        width = 0.8 / len(ways)
        for i, way in enumerate(ways):
            measured_at = [at for at, recipe in enumerate(recipes) if way in recipe["by_way"]]
            rows_of_way = [recipes[at]["by_way"][way] for at in measured_at]
            middle = [row["ratio"] for row in rows_of_way]
            low, high = zip(*(row["ratio_quartiles"] for row in rows_of_way), strict=True)
            spread = [[max(0.0, m - a) for m, a in zip(middle, low, strict=True)],
                      [max(0.0, b - m) for m, b in zip(middle, high, strict=True)]]  # fmt: skip
            places = [at + (i - (len(ways) - 1) / 2) * width for at in measured_at]
            bars = axes.bar(places, middle, width * 0.92, yerr=spread, color=COLORS[way], label=LABELS.get(way, way))
            if way == "ours":
                axes.bar_label(bars, [f"{m:.2f}×" for m in middle], padding=3, fontsize=9, fontweight="bold")
        axes.axhline(1, color="#333333", linewidth=1, linestyle="--", label="per-task loop of torch.autograd.grad = 1")
        axes.set_title(f"{measured['device']}, {threads} thread{'s' * (threads > 1)}", loc="left", fontsize=11)
        axes.set_xticks(range(len(recipes)), [recipe["name"].replace("-", "\n") for recipe in recipes], fontsize=9)
        axes.set_ylabel("times as fast as the loop")
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel(note, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
