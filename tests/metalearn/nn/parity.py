"""Networks and attention by one back end, beside their definition in float64; prints the errors as one JSON line.

METALEARN_KERNELS=native|torch|triton [TRITON_INTERPRET=1] python -m tests.metalearn.nn.parity NAME PRECISION
"""

import json
import os
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metalearn.models.common.stages import stage_of, staged_model
from metalearn.nn import layers
from metalearn.nn.attention import attention
from metalearn.nn.backends import torch_ops
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
from metalearn.nn.surroundings import compute_with, rounds_products, type_of
from metalearn.types import Batch, Model, Params

TASKS, SUPPORT, RATE = 2, 3, 0.3

LARGE = "large "
"""Before the name of a network: it is computed as large ones are."""


class Case(NamedTuple):
    """A network with the shapes of its parameters, the shape and number of a task's queries, and its classes (0: it
    predicts a number). If it is `inductive`, the statistics of norms are those of the support set."""

    layers: tuple[Layer, ...]
    shapes: dict[str, tuple[int, ...]]
    inputs: tuple[int, ...]
    samples: int
    classes: int
    inductive: bool = False


def norms(*channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{kind}{number}": (count,) for number, count in enumerate(channels) for kind in ("scale", "shift")}


CASES = {
    # stride 2, 32 channels that fill a tile and 24 that fill none, statistics of a support set
    "strided": Case(
        (
            ChannelsLast(), Convolution("w0", 2, 1), Norm("scale0", "shift0", 0.0), Convolution("w1", 2, 1),
            Norm("scale1", "shift1", 0.1), Mean(), Linear("w", "b"),
        ),
        {"w0": (32, 1, 3, 3), "w1": (24, 32, 3, 3), "w": (5, 24), "b": (5,), **norms(32, 24)},
        (1, 7, 7), 3, 5, inductive=True,
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
            Linear("w", "b"),
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
    """Meta-parameters, a support set and a query set, and a direction for each output of a query."""

    params: Params
    support: Batch
    query: Batch
    along: Tensor


def problem_of(case: Case, dtype: torch.dtype) -> Problem:
    """The same numbers in every type."""
    generator = Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def batch(count: int) -> Batch:
        x = random(TASKS, count, *case.inputs)
        if not case.classes:
            return Batch(x, random(*x.shape))
        return Batch(x, torch.randint(0, case.classes, (TASKS, count), generator=generator))

    params = {name: random(*shape) / 4 + name.startswith("scale") for name, shape in case.shapes.items()}
    return Problem(params, batch(SUPPORT), batch(case.samples), random(TASKS, case.samples, case.classes or 1))


def model_of(case: Case) -> Model:
    def init(generator: Generator) -> Params:
        return {name: torch.zeros(shape) for name, shape in case.shapes.items()}

    norms = [name for name in case.shapes if name.startswith(("scale", "shift"))]
    stages = [stage_of("body", *case.layers[:-1]), stage_of("head", case.layers[-1])]
    return staged_model(init, stages, transductive=not case.inductive, activations=1, norms=norms)


def figures(case: Case, dtype: torch.dtype, tasks: slice = slice(None)) -> dict[str, Tensor]:
    """What algorithms ask of a model: loss, metric, outputs and gradient of each task after an inner step, the
    meta-gradients of the first and of the second order, and features with their derivative."""
    model = model_of(case)
    params, *batches, along = problem_of(case, dtype)
    support, query = (Batch(batch.x[tasks], batch.y[tasks]) for batch in batches)
    theta = {name: value.requires_grad_() for name, value in params.items()}
    found: dict[str, Tensor] = {}
    for order in (1, 2):
        start = model.start(theta, len(query.x))
        adapted = model.step(start, support, RATE, twice=order == 2)
        metrics = model.metrics(adapted, query, support.x)
        grads = torch.autograd.grad(metrics["loss"].sum(), list(theta.values()), retain_graph=True)
        found |= {f"meta-gradient {order} {name}": grad for name, grad in zip(theta, grads, strict=True)} | metrics
    with torch.no_grad():
        found |= {f"gradient {key}": value for key, value in model.by_name(model.gradient(adapted, query)).items()}
    found["outputs"] = outputs = model.apply(adapted, query.x, support.x)
    slopes = torch.autograd.grad((outputs.sin() * along[tasks]).sum(), list(theta.values()))
    found |= {f"slope {name}": slope for name, slope in zip(theta, slopes, strict=True)}
    found["features"] = features = model.features_of(theta, len(query.x))(query.x, support.x)
    body = [value for name, value in theta.items() if name not in ("w", "b")]
    for place, slope in enumerate(torch.autograd.grad(features.sin().sum(), body)):
        found[f"features' slope {place}"] = slope
    return {name: value.detach() for name, value in found.items()}


# The definition: one task after the other, in float64, by torch's own convolution and the formula of batch norm


def written_out(layers: tuple[Layer, ...], params: Params, h: Tensor, measured: int) -> Tensor:
    """One task; images are [n, c, h, w], and the statistics of norms are those of the first `measured` samples."""
    for layer in layers:
        match layer:
            case Convolution(weight, stride, padding):
                h = F.conv2d(h, params[weight], None, stride, padding)
            case Norm(scale, shift, slope):
                mean = h[:measured].mean(dim=(0, 2, 3), keepdim=True)
                variance = (h[:measured] - mean).square().mean(dim=(0, 2, 3), keepdim=True)
                h = (h - mean) / (variance + 1e-5).sqrt() * params[scale][:, None, None] + params[shift][:, None, None]
                h = torch.where(h > 0, h, slope * h)
            case Activation(name, slope):
                h = {"leaky_relu": torch.where(h > 0, h, slope * h), "softplus": F.softplus(h), "tanh": h.tanh()}[name]
            case MaxPool():
                h = F.max_pool2d(h, 2)
            case Mean():
                h = h.mean(dim=(2, 3))
            case Flatten():
                h = h.flatten(1)
            case Linear(weight, bias):
                h = h @ params[weight].T + params[bias]
            case Residual(main, around):
                h = written_out(main, params, h, measured) + written_out(around, params, h, measured)
    return h


def exact(case: Case) -> dict[str, Tensor]:
    """The same figures, by the definition."""
    params, support, query, along = problem_of(case, torch.float64)
    theta = {name: value.requires_grad_() for name, value in params.items()}

    def outputs(of: Params, x: Tensor, support_x: Tensor | None, layers: tuple[Layer, ...] = case.layers) -> Tensor:
        if not case.inductive or support_x is None:
            return written_out(layers, of, x, len(x))
        return written_out(layers, of, torch.cat([support_x, x]), len(support_x))[len(support_x) :]

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y) if case.classes else (logits - y).square().mean()

    def sums(values: list[Tensor], names: list[str]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.stack(values).sum(), [theta[name] for name in names], retain_graph=True)

    found: dict[str, Tensor] = {}
    names = list(theta)
    for order in (1, 2):
        losses, slopes, logits, features, grads = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor](), []
        for task in range(TASKS):
            x, known = query.x[task], support.x[task]
            first = torch.autograd.grad(
                loss(outputs(theta, known, None), support.y[task]), list(theta.values()), create_graph=order == 2
            )
            adapted = {name: theta[name] - RATE * slope for name, slope in zip(names, first, strict=True)}
            logits.append(outputs(adapted, x, known))
            losses.append(loss(logits[-1], query.y[task]))
            slopes.append((logits[-1].sin() * along[task]).sum())
            features.append(outputs(theta, x, known, case.layers[:-1]).flatten(1))
            own = loss(outputs(adapted, x, None), query.y[task])
            grads.append(torch.autograd.grad(own, list(adapted.values()), retain_graph=True))
        found |= {f"meta-gradient {order} {name}": grad for name, grad in zip(names, sums(losses, names), strict=True)}
    found |= {f"gradient {name}": torch.stack(each) for name, *each in zip(names, *grads, strict=True)}
    found |= {f"slope {name}": slope for name, slope in zip(names, sums(slopes, names), strict=True)}
    body = [name for name in names if name not in ("w", "b")]
    for place, slope in enumerate(sums([each.sin().sum() for each in features], body)):
        found[f"features' slope {place}"] = slope
    found |= {"loss": torch.stack(losses), "outputs": torch.stack(logits), "features": torch.stack(features)}
    if case.classes:
        found["accuracy"] = (found["outputs"].argmax(dim=2) == query.y).double().mean(dim=1)
    else:
        found["mse"] = found["loss"]
    return {name: value.detach() for name, value in found.items()}


def rounded_alike(case: Case) -> dict[str, Tensor]:
    """The same figures by torch's operations in float32, of products whose operands are rounded to bfloat16, but not
    their results."""

    def times(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.bfloat16().float(), b.bfloat16().float())

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layers.conv2d(x[:, :, None, None], weight[..., None, None])[:, :, 0, 0] + bias[:, None]

    os.environ["METALEARN_KERNELS"] = "torch"
    torch_ops._times = times
    layers.linear = linear
    return figures(case, torch.float32)


# Attention, whose definition is torch's plain way

ATTENTION = "attention"
"""Its name in the table."""


class AttentionCase(NamedTuple):
    """Queries and keys of each of two heads, the width of queries and of values, and a mask; truth values hide the
    first row whole."""

    sizes: tuple[int, int, int, int]
    mask: tuple[int, ...] = ()
    truth: bool = False
    causal: bool = False


ATTENTIONS = {
    "none": AttentionCase((3, 5, 4, 3)),
    "blocks, causal": AttentionCase((33, 34, 20, 5), causal=True),
    "numbers of a head": AttentionCase((4, 5, 3, 3), mask=(2, 4, 5)),
    "numbers of a task": AttentionCase((4, 5, 3, 3), mask=(TASKS, 1, 1, 5)),
    "truth": AttentionCase((4, 5, 3, 3), mask=(4, 5), truth=True),
    "wider than a tile": AttentionCase((2, 3, 130, 2)),
}


def attention_figures(of: Any, dtype: torch.dtype, tasks: slice = slice(None)) -> dict[str, Tensor]:
    """Outputs and derivatives of the first and the second order."""
    results: dict[str, Tensor] = {}
    for name, (sizes, shape, truth, causal) in ATTENTIONS.items():
        n, m, width, values = sizes
        generator = Generator().manual_seed(n)
        shapes = ((n, width), (m, width), (m, values), (n, values), (n, width), (m, width), (m, values))
        drawn = [torch.randn(TASKS, 2, *each, generator=generator, dtype=torch.float64)[tasks] for each in shapes]
        q, k, v, *along = (value.to(dtype).requires_grad_() for value in drawn)
        mask = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) if shape else None
        if truth and mask is not None:
            mask = (mask > -0.3) & (torch.arange(n) > 0)[:, None]
        elif mask is not None and mask.dim() == 4:
            mask = mask[tasks]
        o = of(q, k, v, mask, is_causal=causal)
        first = torch.autograd.grad(o, (q, k, v), along[0], create_graph=True)
        second = torch.autograd.grad(first, (q, k, v, along[0]), along[1:])
        names = ("o", "gq", "gk", "gv", "hq", "hk", "hv", "hu")
        results |= {f"{name}, {part}": value.detach() for part, value in zip(names, (o, *first, *second), strict=True)}
    return results


def plain(*args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


def errors(name: str, dtype: torch.dtype) -> dict[str, float]:
    """The errors of all figures."""
    if name == ATTENTION:
        return distances(attention_figures(attention, dtype), attention_figures(plain, torch.float64))
    return distances(figures(CASES[name], dtype), exact(CASES[name]))


def distances(computed: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """The distance of each figure from its definition, in parts of its length; 1 for one without a definition."""
    return {
        name: float((computed[name] - value).norm() / value.norm().clamp(min=1e-3)) for name, value in right.items()
    } | dict.fromkeys(computed.keys() - right.keys(), 1.0)


def product_errors(inputs: int, outputs: int) -> dict[str, float]:
    """The errors of sums of two products, in tiles as for photographs, beside torch's convolution in float64, of
    operands rounded alike."""
    from metalearn.nn.backends import triton_ops

    generator = Generator().manual_seed(1)
    x, x2, gx = (torch.randn(TASKS, 2, 3, 3, inputs, generator=generator) for _ in range(3))
    w, w2, gw = (torch.randn(TASKS, 3, 3, inputs, outputs, generator=generator) for _ in range(3))
    y, gy, gy2 = (torch.randn(TASKS, 2, 3, 3, outputs, generator=generator) for _ in range(3))

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        each = [
            F.conv2d(images.permute(0, 3, 1, 2), kernels.permute(3, 2, 0, 1), padding=1).permute(0, 2, 3, 1)
            for images, kernels in zip(x, w, strict=True)
        ]
        return torch.stack(each)

    operands = [value.bfloat16() if rounds_products() else value for value in (x, x2, w, w2, gy, gy2)]
    a, a2, b, b2, c, c2, x0, w0 = (value.double().requires_grad_() for value in (*operands, gx, gw))
    by_x = (convolved(x0, b) * c + convolved(x0, b2) * c2).sum()
    by_w = (convolved(a, w0) * c + convolved(a2, w0) * c2).sum()
    right = {"y": convolved(a, b) + convolved(a2, b2), "gx": gx + torch.autograd.grad(by_x, x0)[0]}
    right["gw"] = torch.autograd.grad(by_w, w0)[0]

    triton_ops.MANY_ROWS = 1
    sizes = triton_ops.ConvolutionSizes(3, 3, inputs, 3, 3, outputs, 3, 3, 1, 1)
    x, x2, w, w2, gy, gy2 = (triton_ops.Tasks(value, value[0].numel()) for value in (x, x2, w, w2, gy, gy2))
    to = {name: triton_ops.Tasks(value, value[0].numel()) for name, value in {"y": y, "gx": gx, "gw": gw}.items()}
    triton_ops.product(TASKS, 2, sizes, sizes.dense, x, w, to["y"], second=(x2, w2))
    triton_ops.input_gradient(TASKS, 2, sizes, gy, w, to["gx"], second=(gy2, w2), add=True)
    triton_ops.weight_gradient(TASKS, 2, sizes, sizes.dense, x, gy, to["gw"], second=(x2, gy2))
    return distances({name: value.numbers for name, value in to.items()}, right)


def pictures_alike(side: int, channels: int) -> bool:
    """Whether the GPU's kernel gathers the pictures of an episode as the host turns and divides them."""
    from metalearn.nn.backends.triton_ops import gathered

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
    if sys.argv[1] == "pictures":
        print(json.dumps([pictures_alike(12, 1), pictures_alike(36, 3)]))
    elif sys.argv[1] == "products":
        compute_with(sys.argv[2])
        print(json.dumps([product_errors(32, 160), product_errors(160, 32)]))
    else:
        name, dtype = sys.argv[1], type_of(sys.argv[2])
        compute_with(sys.argv[2])
        if name.startswith(LARGE):
            from metalearn.nn.backends import triton_ops

            triton_ops.MANY_ROWS = 16
        both = slice(None), slice(0, 1)
        if name == ATTENTION:
            whole, first = (attention_figures(attention, dtype, tasks) for tasks in both)
            of_tasks, right = list(whole), attention_figures(plain, torch.float64)
        else:
            case = CASES[name.removeprefix(LARGE)]
            whole, first = (figures(case, dtype, tasks) for tasks in both)
            of_tasks = [key for key in whole if key[:5] in ("loss", "outpu", "featu", "gradi")]
            of_tasks = [key for key in of_tasks if len(whole[key]) == TASKS]
            right = rounded_alike(case) if rounds_products() else exact(case)
        alone = {key: first[key].equal(whole[key][:1]) for key in of_tasks}
        print(json.dumps({"errors": distances(whole, right), "alone": alone}))
