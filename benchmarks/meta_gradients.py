"""Our meta-gradients beside other ways to compute them: times, errors, and the fraction of the machine's limit."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ways import PLAIN, SMOOTH, Make, Recipe, chunk_of, error, loop, problem, ways_there
from metalearn.nn.backends import describe

Numbers = Sequence[float]

IN_A_ROW = 0.1
"""Seconds for which a way is called again and again in its turn, as in training; a longer call comes once."""


def measure(recipes: Sequence[Recipe], rounds: int, device: str, threads: int, seconds: float) -> dict[str, Any]:
    """Measures all recipes, and before and after them the machine's rates, every kernel for `seconds`."""
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
    makes = ways_there(device, recipe.kind)
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
    batch = problem(recipe, PLAIN[recipe.kind]).to(torch.device(device))
    runs = {name: make(batch) for name, make in makes.items()}
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
    batch = problem(recipe, SMOOTH[recipe.kind])
    precise = batch.to(torch.float64)
    exact = loop(precise)()
    errors = {name: error(make(batch.to(torch.device(device)))(), exact) for name, make in makes.items()}
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


# The best float32 rates of the machine

Kernel = Callable[[], Tensor]


def kernels(device: str) -> dict[str, tuple[Kernel, int]]:
    """The kernels by name, each with the floating-point operations of one call.

    They are matrix products and the 3×3 convolution from 64 to 64 channels. The batched products have the shapes of the
    second convolution of 5-way 1-shot episodes (8 tasks, 5 images of 7×7 positions).
    """
    size = 1024 if device == "cpu" else 8192
    square = torch.randn(size, size, device=device)
    patches = torch.randn(8, 245, 576, device=device)
    weights = torch.randn(8, 576, 64, device=device)
    back = patches.mT.contiguous()
    maps = torch.randn(8, 245, 64, device=device)
    by_name: dict[str, tuple[Kernel, int]] = {
        f"mm {size}×{size}×{size}": (lambda: square @ square, 2 * size**3),
        "bmm 8×245×576×64": (lambda: torch.bmm(patches, weights), 2 * 8 * 245 * 576 * 64),
        "bmm 8×576×245×64": (lambda: torch.bmm(back, maps), 2 * 8 * 245 * 576 * 64),
    }
    for batch in (8, 40, 160):
        for name, layout in (("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)):
            by_name[f"conv2d 3×3 64→64, {batch} of 14×14, {name}"] = convolution(batch, device, layout)
    return by_name


def convolution(batch: int, device: str, layout: torch.memory_format) -> tuple[Kernel, int]:
    x = torch.randn(batch, 64, 14, 14, device=device).to(memory_format=layout)
    weight = torch.randn(64, 64, 3, 3, device=device).to(memory_format=layout)
    return lambda: F.conv2d(x, weight, padding=1), 2 * batch * 64 * 64 * 9 * 14 * 14


def rates(device: str, seconds: float) -> dict[str, float]:
    """The best GFLOP/s that each kernel reaches in `seconds`."""
    with torch.no_grad():
        return {name: flops / best_time(run, device, seconds) / 1e9 for name, (run, flops) in kernels(device).items()}


def best_time(run: Callable[[], object], device: str, seconds: float) -> float:
    """The time of the fastest call within `seconds`, of at least three; a first call does not count."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(timed(run, device))
    return min(times)


def timed(run: Callable[[], object], device: str) -> float:
    """The seconds of a call, until the device has finished it."""
    finish(device)
    began = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - began


def finish(device: str) -> None:
    """Waits until a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def flops_of(recipe: Recipe, activation: str, device: str = "cpu") -> int:
    """The floating-point operations of a step: those of convolutions and matrix products in the loop over its tasks."""
    one = loop(problem(recipe, activation).part(0, 1).to(torch.device(device)))
    with FlopCounterMode(display=False) as counter:
        one()
    return int(counter.get_total_flops()) * recipe.tasks
