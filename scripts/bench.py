"""Measures how fast meta-gradients are, ours and those of other libraries, in one run; gives table, JSON and chart.

    METALEARN_DATA=/path/to/data python scripts/bench.py
    python scripts/bench.py --only 5w1s resnet12 --threads 1
    python scripts/bench.py --short

Every way computes the same second-order gradient of the same episodes from the same parameters. Each number of threads
has its own process, which keeps freed memory as train.py does. There, every round runs every way once. The error of a
way is the largest difference of its float32 gradient from the loop's float64 gradient, with a smooth activation. The
limit is the time of the step's floating-point operations at the best rate that any matrix product or 3×3 convolution
reaches in the same process. TorchOpt and JAX are measured if they are installed. `processes` are runs of train.py under
the strategies.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / ".torchopt"))  # where `pip install --target=.torchopt torchopt` puts it

import torch  # noqa: E402 (the path comes first, here and below)

from benchmarks.chart import chart  # noqa: E402
from benchmarks.machine import cpu_name, flops_of, rates, timed, versions  # noqa: E402
from benchmarks.processes import measure as measure_processes  # noqa: E402
from benchmarks.processes import project, ratios  # noqa: E402
from benchmarks.ways import (  # noqa: E402
    PLAIN,
    RECIPES,
    SMOOTH,
    Make,
    Recipe,
    character_source,
    chunk_of,
    error,
    loop,
    problem,
    shortened,
    ways_there,
)
from distributed.engine.memory import share_arena  # noqa: E402
from metalearn.nn.native import describe  # noqa: E402
from metalearn.nn.precision import compute_with  # noqa: E402
from metalearn.program.arguments import whole  # noqa: E402
from metalearn.program.process import keep_freed_memory  # noqa: E402

PROCESSES = "processes"
NAMES = (*(recipe.name for recipe in RECIPES), PROCESSES)
QUICK = ("5w1s", "5w1s-5steps", "5w1s-15queries", "sinusoid", "resnet12", PROCESSES)
"""The recipes of the short mode."""

NO_MEASUREMENT = "short mode: the times are no measurement"

Numbers = Sequence[float]


def main() -> int:
    """Returns the exit code."""
    options = arguments()
    if options.child is not None:
        options.child.write_text(json.dumps(measure(options)))
        return 0
    characters, _ = character_source(ways=5, queries=1)
    threads = options.threads if options.device == "cpu" else options.threads[:1]
    measurements = [in_child(options, number) for number in threads] if recipes_of(options) else []
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "short": options.short, "characters": characters,
        "cpu": cpu_name(), "cores": os.cpu_count(), "gpu": gpu_name(options.device), "versions": versions(),
        "rounds": options.rounds, "measurements": measurements, **of_processes(options, characters),
    }  # fmt: skip
    (options.output / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(report(results)))
    if measurements:
        note = NO_MEASUREMENT if options.short else ""
        print(f"\n{chart(measurements, options.output / 'bench.png', note)}")
    print(options.output / "bench.json")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few tasks and rounds: checks that all works")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=whole(1), help="runs of every way (7; in short mode 2)")
    parser.add_argument("--threads", type=whole(1), nargs="+", default=[1, 2], help="numbers of threads (1 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ours, loop and vmap on a GPU")
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32", help="of ours; float32 if unset")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "bench", help="folder of the results")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU here; type --device cpu")
    if options.child is None:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(
                f"argument --output: {options.output}: cannot be written ({error.strerror}); type another folder"
            )
    options.only = options.only or (QUICK if options.short else NAMES)
    options.rounds = options.rounds or (2 if options.short else 7)
    return options


def recipes_of(options: argparse.Namespace) -> list[Recipe]:
    chosen = [recipe for recipe in RECIPES if recipe.name in options.only]
    return [shortened(recipe) for recipe in chosen] if options.short else chosen


def in_child(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The result of `measure` in a process that has so many threads from its start."""
    environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC", "PJRT_NPROC")}
    if threads == 1:
        environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    if options.short:
        environment["OMP_WAIT_POLICY"] = "passive"  # a waiting thread that spins would slow down other programs
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [
            sys.executable, __file__, "--child", str(path), "--threads", str(threads), "--device", options.device,
            "--rounds", str(options.rounds), "--precision", options.precision, "--only", *options.only,
            *["--short"] * options.short,
        ]  # fmt: skip
        if code := subprocess.run(command, env=os.environ | environment, check=False).returncode:
            raise SystemExit(f"error: {' '.join(command)}: exit code {code}")
        results: dict[str, Any] = json.loads(path.read_text())
    return results


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all recipes on so many threads, and the machine's rates before and after."""
    (threads,), device = options.threads, options.device
    torch.set_num_threads(threads)
    keep_freed_memory()
    share_arena()
    compute_with(options.precision)
    seconds = 0.02 if options.short else 0.3
    before = rates(device, seconds)
    results = [of_recipe(recipe, options.rounds, device, threads) for recipe in recipes_of(options)]
    reached = {name: max(before[name], after) for name, after in rates(device, seconds).items()}
    kernel = max(reached, key=lambda name: reached[name])
    for result in results:
        result["limit_ms"] = result["gflop"] / reached[kernel] * 1000
        for row in result["by_way"].values():
            row["fraction_of_limit"] = result["limit_ms"] / row["median_ms"]
    limit = {"kernel": kernel, "gflops": reached[kernel], "kernels": reached}
    layers = describe(torch.device(device), torch.float32)
    return {"threads": threads, "device": device, "layers": layers, "limit": limit, "recipes": results}


def of_recipe(recipe: Recipe, rounds: int, device: str, threads: int) -> dict[str, Any]:
    print(f"threads={threads}: {recipe.name}, {rounds} rounds", file=sys.stderr, flush=True)
    makes = ways_there(device)
    times = rounds_of(recipe, makes, rounds, device)
    errors, errors64 = errors_of(recipe, makes, device)
    plain, smooth = PLAIN[recipe.kind], SMOOTH[recipe.kind]
    return {
        **recipe._asdict(), "chunk": chunk_of(recipe, torch.device(device)), "gflop": flops_of(recipe, plain) / 1e9,
        "activation": plain, "error_activation": smooth,
        "by_way": {name: figures(times[name], times["loop"]) | {"error": errors[name]} for name in makes},
        "float64_errors": errors64,
    }  # fmt: skip


def rounds_of(recipe: Recipe, makes: dict[str, Make], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of every way in every round. Before them, every way runs once without being measured."""
    given = problem(recipe, PLAIN[recipe.kind]).to(torch.device(device))
    runs = {name: make(given) for name, make in makes.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        for name in order:
            times[name].append(1000 * timed(runs[name], device))
        order = [*order[1:], order[0]]
    return times


def errors_of(recipe: Recipe, makes: dict[str, Make], device: str) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of every way's float32 gradient, against the loop in float64. At the kinks of max pooling two correct
    float32 programs may differ; for such a recipe also the errors of ours and vmap in float64."""
    given = problem(recipe, SMOOTH[recipe.kind])
    precise = given.to(torch.float64)
    exact = loop(precise)()
    errors = {name: error(make(given.to(torch.device(device)))(), exact) for name, make in makes.items()}
    kinks = ("ours", "vmap") if recipe.kind == "resnet12" else ()
    return errors, {name: error(makes[name](precise)(), exact) for name in kinks}


def figures(times: Numbers, reference: Numbers) -> dict[str, Any]:
    """Medians and quartiles of the times, and of the ratios to the reference, taken round by round."""
    speedups = [other / time for time, other in zip(times, reference, strict=True)]
    return {
        "ms": list(times), "median_ms": statistics.median(times), "quartiles_ms": quartiles(times),
        "ratio": statistics.median(speedups), "ratio_quartiles": quartiles(speedups),
    }  # fmt: skip


def quartiles(values: Numbers) -> tuple[float, float]:
    """The lower and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


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


def gpu_name(device: str) -> str | None:
    return torch.cuda.get_device_name() if device == "cuda" else None


def report(results: dict[str, Any]) -> list[str]:
    """The lines of the tables, in Markdown."""
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in results["versions"].items())
    lines = [f"{results['cpu']}, {results['cores']} cores; {versions}",
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


def table(measured: dict[str, Any]) -> list[str]:
    """The table of one number of threads."""
    limit = measured["limit"]
    lines = [
        f"threads: {measured['threads']}; device: {measured['device']}; best float32 rate: {limit['gflops']:.0f} "
        f"GFLOP/s ({limit['kernel']}); ours by {measured['layers']}", "",
        "| recipe | tasks | GFLOP | limit ms | way | ms | quartiles | × loop | of the limit | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for recipe in measured["recipes"]:
        start = f"| {recipe['name']} | {recipe['tasks']} | {recipe['gflop']:.3g} | {recipe['limit_ms']:.3g}"
        for way, row in recipe["by_way"].items():
            low, high = row["quartiles_ms"]
            lines.append(
                f"{start} | {way} | {row['median_ms']:.4g} | {low:.4g}–{high:.4g} | {row['ratio']:.2f} | "
                f"{row['fraction_of_limit']:.1%} | {row['error']:.0e} |"
            )
    smooth = ", ".join(f"{activation} in {kind}" for kind, activation in SMOOTH.items())
    lines += ["", f"errors: {smooth}; the max pooling of resnet12 stays, which is not smooth"]
    for recipe in measured["recipes"]:
        if errors := [f"{way} {worst:.0e}" for way, worst in recipe["float64_errors"].items()]:
            lines.append(f"errors of {recipe['name']} in float64: {', '.join(errors)}")
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


if __name__ == "__main__":
    sys.exit(main())
