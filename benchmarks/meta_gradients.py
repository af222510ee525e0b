"""Our meta-gradients beside other ways to compute them: times, errors, and the fraction of the machine's limit."""

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.machine import flops_of, rates, timed
from benchmarks.ways import PLAIN, SMOOTH, Make, Recipe, chunk_of, error, loop, problem, ways_there
from metalearn.nn.backends import describe

Numbers = Sequence[float]

IN_A_ROW = 0.1
"""Seconds for which a way is called again and again in its turn, as in training; a longer call comes once."""


def measure(recipes: Sequence[Recipe], rounds: int, device: str, threads: int, seconds: float) -> dict[str, Any]:
    """Measures all recipes, and before and after them the machine's rates, every kernel for so many seconds."""
    before = rates(device, seconds)
    results = [of_recipe(recipe, rounds, device, threads) for recipe in recipes]
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
    """Milliseconds of a call of every way in every round. Before them, every way runs once without being measured."""
    given = problem(recipe, PLAIN[recipe.kind]).to(torch.device(device))
    runs = {name: make(given) for name, make in makes.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        for name in order:
            times[name].append(1000 * mean_of_calls(runs[name], device))
        order = [*order[1:], order[0]]
    return times


def mean_of_calls(run: Callable[[], object], device: str) -> float:
    """The mean seconds of a call, of as many calls as `IN_A_ROW` has time for; at least one."""
    seconds = [timed(run, device)]
    while sum(seconds) < IN_A_ROW:
        seconds.append(timed(run, device))
    return statistics.mean(seconds)


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
