"""The device beside the CPU: layers with their derivatives, and meta-gradients, in float64 and float32.

What is compared with is computed on the CPU in float64. An error is the largest difference of an entry, relative to the
largest entry of its tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from benchmarks.gpu_check.check import CheckRow, at_most, row_of
from benchmarks.gpu_check.learners import ALGORITHMS, training_of
from benchmarks.ways import RECIPES, SEED, SMOOTH, Recipe, error, loop, ours, problem, shortened
from distributed.reduce import tree_sum
from metalearn.nn.attention import attention
from metalearn.nn.layers import (
    ChannelsLast,
    Convolution,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    Mean,
    Norm,
    apply_layers,
)
from metalearn.training.chunks import chunk_functions

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The allowed errors. Products in TF32 or bfloat16, which `precision=float32` must not use, have larger ones."""

TASKS, SAMPLES, CHANNELS, SIZE = 2, 6, 8, 14
IMAGES = (TASKS, SAMPLES, CHANNELS, SIZE, SIZE)


class LayerCase(NamedTuple):
    """Layers on images, with the shapes of their parameters; norms use the statistics of `support` samples (0: all).
    Without layers it is causal attention of pixels, whose keys and values are the parameters."""

    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    support: int = 0


NORM = {"scale": (CHANNELS,), "shift": (CHANNELS,)}

CASES = {
    "convolution 3×3": LayerCase((ChannelsLast(), Convolution("w", padding=1)), {"w": (64, CHANNELS, 3, 3)}),
    "convolution 3×3, stride 2": LayerCase(
        (ChannelsLast(), Convolution("w", stride=2, padding=1)), {"w": (64, CHANNELS, 3, 3)}
    ),
    "convolution 1×1": LayerCase((ChannelsLast(), Convolution("w")), {"w": (64, CHANNELS, 1, 1)}),
    "batch norm, leaky ReLU": LayerCase((ChannelsLast(), Norm("scale", "shift", slope=0.1)), NORM),
    "batch norm by the support set": LayerCase((ChannelsLast(), Norm("scale", "shift")), NORM, support=4),
    "max pooling": LayerCase((ChannelsLast(), MaxPool())),
    "mean": LayerCase((ChannelsLast(), Mean())),
    "linear": LayerCase((Flatten(), Linear("w", "b")), {"w": (5, CHANNELS * SIZE * SIZE), "b": (5,)}),
    "attention, causal": LayerCase((), {"k": (SAMPLES, 100, SIZE), "v": (SAMPLES, 100, SIZE)}),
}


def layers(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Outputs, first and second derivatives of every kind of layer, with parameters of their own for every task."""
    for name, case in CASES.items():
        for dtype in ALLOWED:
            yield row_of("layers", f"{name}, {_short(dtype)}", partial(_layer_errors, case, device, dtype))


def _layer_errors(case: LayerCase, device: str, dtype: torch.dtype) -> dict[str, Any]:
    exact, computed = _derivatives(case, "cpu", torch.float64), _derivatives(case, device, dtype)
    allowed = ALLOWED[dtype]
    return {
        f"error of the {what}": at_most(f"error of the {what}", error(ours, right), allowed)
        for what, ours, right in zip(
            ("output", "first derivatives", "second derivatives"), computed, exact, strict=True
        )
    }


def _derivatives(case: LayerCase, device: str, dtype: torch.dtype) -> tuple[Sequence[Tensor], ...]:
    """The output; the gradient of a smooth function of it; and the gradient of the square of that gradient."""
    generator = Generator().manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)  # the same numbers in every precision

    x = random(*IMAGES).requires_grad_()
    params = {name: (random(TASKS, *shape) / 4).requires_grad_() for name, shape in case.shapes.items()}
    leaves = [x, *params.values()]
    if case.layers:
        output = apply_layers(case.layers, params, x, case.support)
    else:
        output = attention(x.flatten(2, 3), params["k"], params["v"], is_causal=True)
    first = torch.autograd.grad((random(*output.shape) * torch.tanh(output)).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([(value**2).sum() for value in first]).sum(), leaves)
    return [output.detach()], [value.detach() for value in first], second


def gradients(device: str, *, short: bool) -> Iterator[CheckRow]:
    """Our MAML beside a loop of `torch.autograd.grad` on networks of every kind; then every algorithm's meta-gradient
    beside its own on the CPU."""
    recipes = [shortened(recipe) for recipe in RECIPES if not short or recipe.name in ("5w1s-5steps", "sinusoid")]
    for recipe in recipes:
        for dtype in (torch.float64,) if recipe.kind == "resnet12" else ALLOWED:  # kinks of max pooling in float32
            name = f"MAML, {recipe.name}, {_short(dtype)}"
            yield row_of("gradients", name, partial(_recipe_error, recipe, device, dtype))
    for algorithm in ALGORITHMS:
        for dtype in ALLOWED:
            name = f"{algorithm}, {_short(dtype)}"
            yield row_of("gradients", name, partial(_algorithm_error, algorithm, device, dtype))


def _recipe_error(recipe: Recipe, device: str, dtype: torch.dtype) -> dict[str, Any]:
    batch = problem(recipe, SMOOTH[recipe.kind])
    exact = loop(batch.to(torch.float64))()
    computed = ours(batch.to(dtype).to(torch.device(device)))()
    return {"error": at_most("error", error(computed, exact), ALLOWED[dtype])}


def _algorithm_error(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    exact, computed = _meta_gradient(name, "cpu", torch.float64), _meta_gradient(name, device, dtype)
    return {"error": at_most("error", error_of_all(computed, exact), ALLOWED[dtype])}


def _meta_gradient(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The gradient of a chunk at the start, as a worker computes it; zero if the algorithm trains nothing."""
    algorithm, source, batch = training_of(name)
    functions = chunk_functions(algorithm, source, torch.device(device), dtype, tree_sum)
    start = algorithm.init(Generator().manual_seed(SEED))
    params = {key: value.to(dtype) for key, value in start.items()}
    grads = functions.map(params, torch.arange(batch), 1).grads
    return [grads[key] for key in sorted(grads)]


def error_of_all(computed: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest exact entry of all tensors: some of them may be zero."""
    difference = torch.cat([(a.double().cpu() - b).abs().flatten() for a, b in zip(computed, exact, strict=True)]).max()
    largest = torch.cat([value.abs().flatten() for value in exact]).max()
    return (difference / largest.clamp(min=torch.finfo(torch.float64).tiny)).item()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
