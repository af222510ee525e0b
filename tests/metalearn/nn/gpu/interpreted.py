"""Networks by the GPU's kernels in Triton's interpreter, beside float64 on the CPU; prints one JSON line.

TRITON_INTERPRET=1 METALEARN_KERNELS=triton python -m tests.metalearn.nn.gpu.interpreted NAME
"""

import json
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from metalearn.nn.backends import triton_ops as launch
from metalearn.nn.backends.triton_ops import gathered
from metalearn.nn.layers import (
    Activation,
    ChannelsLast,
    Convolution,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    Mean,
    Norm,
    Residual,
)
from metalearn.nn.network import CompiledNetwork

TASKS, KNOWN = 2, 2

LARGE = "large "
"""Before the name of a network: it is computed as large ones are."""


class Case(NamedTuple):
    """A network with the shapes of its parameters, the shape and number of a task's inputs, and its classes (0: it
    predicts a number). The statistics of norms are those of all inputs, or with `known` those of a support set."""

    layers: tuple[Layer, ...]
    shapes: dict[str, tuple[int, ...]]
    inputs: tuple[int, ...]
    samples: int
    classes: int
    known: bool = False


def norms(*channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{kind}{number}": (count,) for number, count in enumerate(channels) for kind in ("scale", "shift")}


CASES = {
    # stride 2, 24 channels that fill no tile, statistics of a support set
    "strided": Case(
        (
            ChannelsLast(), Convolution("w0", 2, 1), Norm("scale0", "shift0", 0.0), Convolution("w1", 2, 1),
            Norm("scale1", "shift1", 0.1), Mean(), Flatten(channels_last=True), Linear("w", "b"),
        ),
        {"w0": (16, 1, 3, 3), "w1": (24, 16, 3, 3), "w": (5, 24), "b": (5,), **norms(16, 24)},
        (1, 7, 7), 3, 5, known=True,
    ),
    # so many rows that programs share a norm, and the gradient of the first kernels; colours, pooling, softplus
    "pooled": Case(
        (
            ChannelsLast(), Convolution("w0", 1, 1), Norm("scale0", "shift0"), Activation("softplus"), MaxPool(),
            MaxPool(), Flatten(channels_last=True), Linear("w", "b"),
        ),
        {"w0": (16, 3, 3, 3), "w": (3, 256), "b": (3,), **norms(16)},
        (3, 16, 17), 2, 3,
    ),
    "residual": Case(
        (
            ChannelsLast(),
            Residual(
                (Convolution("w0", 1, 1), Norm("scale0", "shift0", 0.1)), (Convolution("w1"), Norm("scale1", "shift1"))
            ),
            Residual((Convolution("w2", 1, 1), Norm("scale2", "shift2")), ()), Activation("leaky_relu", 0.1), Mean(),
            Flatten(channels_last=True), Linear("w", "b"),
        ),
        {"w0": (16, 1, 3, 3), "w1": (16, 1, 1, 1), "w2": (16, 16, 3, 3), "w": (5, 16), "b": (5,), **norms(16, 16, 16)},
        (1, 4, 4), 3, 5,
    ),
    "dense": Case(
        (Linear("w0", "b0"), Activation("tanh"), Linear("w1", "b1"), Activation("leaky_relu", 0.0), Linear("w", "b")),
        {"w0": (20, 1), "b0": (20,), "w1": (20, 20), "b1": (20,), "w": (1, 20), "b": (1,)},
        (1,), 5, 0,
    ),
}  # fmt: skip


class Problem(NamedTuple):
    rows: Tensor
    direction: Tensor
    x: Tensor
    y: Tensor
    support_x: Tensor | None


def problem_of(case: Case, network: CompiledNetwork, dtype: torch.dtype) -> tuple[str, Problem]:
    """The same numbers in every type; and the name of the packed parameters."""
    generator = Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    names = network._names
    params = {name: random(TASKS, *case.shapes[name]) / 4 + name.startswith("scale") for name in names}
    shaped = network._of([params[name][0] for name in names])
    assert shaped.refused is None, shaped.refused

    def packed(values: dict[str, Tensor]) -> Tensor:
        return torch.stack([shaped.layout.pack([values[name][task] for name in names]) for task in range(TASKS)])

    direction = packed({name: random(TASKS, *case.shapes[name]) for name in names})
    x = random(TASKS, case.samples, *case.inputs)
    y = torch.randint(0, case.classes, (TASKS, case.samples), generator=generator) if case.classes else random(*x.shape)
    return shaped.key, Problem(
        packed(params), direction, x, y, random(TASKS, KNOWN, *case.inputs) if case.known else None
    )


def results(case: Case, dtype: torch.dtype, tasks: slice = slice(None)) -> dict[str, Tensor]:
    """Of some of the tasks: the loss and the score, the gradient and its derivative along a direction, a step and its
    derivative, the outputs and theirs."""
    network = CompiledNetwork(case.layers)
    key, whole = problem_of(case, network, dtype)
    rows, direction, x, y, support_x = (None if part is None else part[tasks] for part in whole)
    assert rows is not None and direction is not None and x is not None and y is not None
    row = rows.clone().requires_grad_()
    metrics = network.metrics({key: row}, x, y, support_x, twice=True)
    (gradient,) = torch.autograd.grad(metrics["loss"].sum(), row, create_graph=True)
    (product,) = torch.autograd.grad((gradient * direction).sum(), row)
    outputs = network.outputs({key: row}, x, support_x)
    (slope,) = torch.autograd.grad(torch.sin(outputs).sum(), row)
    found = {**metrics, "gradient": gradient, "product": product, "outputs": outputs, "slope": slope}
    if not case.known:
        stepped = network.stepped({key: row}, x, y, 0.3, twice=True)[key]
        found |= {"step": stepped, "step's": torch.autograd.grad((stepped * direction).sum(), row)[0]}
    return {name: value.detach() for name, value in found.items()}


def main(name: str) -> dict[str, Any]:
    case, kernels = CASES[name.removeprefix(LARGE)], os.environ["METALEARN_KERNELS"]
    if name.startswith(LARGE):
        launch.MANY_ROWS = 16
    ours, first = results(case, torch.float32), results(case, torch.float32, slice(0, 1))
    os.environ["METALEARN_KERNELS"] = "native"
    exact, on_cpu = results(case, torch.float64), results(case, torch.float32)

    def errors(found: dict[str, Tensor]) -> dict[str, float]:
        return {k: ((found[k] - value).norm() / value.norm().clamp(min=1e-30)).item() for k, value in exact.items()}

    alone = {key: value.equal(ours[key][:1]) for key, value in first.items()}
    return {"kernels": kernels, "errors": errors(ours), "of C": errors(on_cpu), "one task alone": alone}


def pictures_alike(side: int, channels: int) -> bool:
    """Whether the pictures of an episode are those that the host turns and divides."""
    generator = Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (9, side * side * channels), dtype=torch.uint8, generator=generator)
    places = torch.arange(side * side).view(side, side)
    turns = torch.stack([torch.rot90(places, quarters).flatten() for quarters in range(4)])
    numbers = torch.tensor([[[1, 3, 5, 7], [2, 0, 1, 8]], [[0, 4, 4, 6], [3, 2, 2, 1]]])
    support, query = gathered(pictures, turns, torch.arange(256) / 255, numbers, 1, (side, side, channels))

    def turned(number: int, quarters: int) -> Tensor:
        picture = pictures[number].view(side, side, channels)
        return torch.rot90(picture, quarters, (0, 1)).permute(2, 0, 1).float() / 255

    wanted = torch.stack([
        torch.stack([torch.stack([turned(number, quarters) for number in rest]) for quarters, *rest in task])
        for task in numbers.tolist()
    ])  # fmt: skip
    return support.equal(wanted[:, :, 0]) and query.equal(wanted[:, :, 1:].flatten(1, 2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main(sys.argv[1]) if sys.argv[1] != "pictures" else [pictures_alike(12, 1), pictures_alike(36, 3)]
    print(json.dumps(found))
