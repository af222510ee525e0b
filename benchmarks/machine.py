"""The best float32 rates of the machine."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ways import Recipe, loop, problem

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
    """The best GFLOP/s that each kernel reaches in so many seconds."""
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
