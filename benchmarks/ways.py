"""The recipes of bench.py, and the ways to compute the same meta-gradient of the same episodes.

A way is a function without arguments that returns the gradient of the summed query losses of a meta-batch, one
tensor for each parameter, in the order of the parameters.
"""

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.own_networks import NETWORKS
from metalearn.algorithms.maml import maml
from metalearn.errors import DataError
from metalearn.models.common.adapter import model_of as adapted
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.models.resnet12 import resnet12
from metalearn.nn.surroundings import of_reals
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.common.stored import DataPlace
from metalearn.tasks.glyphs import glyphs
from metalearn.tasks.omniglot import omniglot
from metalearn.tasks.sinusoid import sinusoid
from metalearn.training.settings import TrainerSettings, chunk_size
from metalearn.types import Algorithm, Batch, Episode, Model, Params, TaskSource

ROOT = Path(__file__).resolve().parent.parent
SEED = 0

PLAIN = {"conv4": "relu", "sinusoid": "relu", "resnet12": "leaky_relu"} | dict.fromkeys(NETWORKS, "relu")
"""The activation in the measured times, by kind of recipe."""

SMOOTH = {"conv4": "softplus", "sinusoid": "tanh", "resnet12": "softplus"} | dict.fromkeys(NETWORKS, "softplus")
"""The activation for comparing gradients: at a kink, two correct float32 programs may differ."""

INNER_LR = {1: 2.0, 5: 0.1}
"""The inner rates of Conv4 by inner steps: the published one, and that of TorchOpt's example. Five steps of 0.4 would
magnify rounding a hundredfold, in every way."""

VMAP_IMAGES = 160
"""The support and query images that vmap takes at once on a CPU. With it, every recipe runs within a tenth of the
fastest of 1, 2, 4, … and 32 tasks at once. Sine waves, and what own networks take, go all at once."""

GradientWay = Callable[[], list[Tensor]]
Make = Callable[["MetaBatch"], GradientWay]


class Recipe(NamedTuple):
    """Second-order MAML of one kind of network: `conv4` (stride 2), `sinusoid` (two layers), `resnet12`, or a module of
    `benchmarks.own_networks`.

    `shots` and `queries` count images of each class, or points of a sine wave. `image_size` is in pixels. `widths` are
    the channels of the blocks, or the features of the hidden layers.
    """

    name: str
    kind: str
    ways: int
    shots: int
    queries: int
    inner_steps: int
    tasks: int
    inner_lr: float
    image_size: int = 28
    widths: tuple[int, ...] = (64, 64, 64, 64)

    @property
    def images(self) -> int:
        """Support and query examples of a task."""
        return self.ways * (self.shots + self.queries)


def _conv4_recipe(ways: int, inner_steps: int, queries: int, tasks: int) -> Recipe:
    parts = [f"{ways}w1s", *["5steps"] * (inner_steps == 5), *["15queries"] * (queries == 15)]
    return Recipe("-".join(parts), "conv4", ways, 1, queries, inner_steps, tasks, INNER_LR[inner_steps])


RECIPES = (
    *(
        _conv4_recipe(ways, inner_steps, queries, tasks)
        for ways, tasks in ((5, 32), (20, 16))
        for queries in (1, 15)
        for inner_steps in (1, 5)
    ),
    Recipe("sinusoid", "sinusoid", 1, 10, 10, 1, 25, 0.01, widths=(40, 40)),
    Recipe("resnet12", "resnet12", 5, 1, 1, 1, 2, 0.01, 84, (64, 160, 320, 640)),
    *(Recipe(kind, kind, 5, 1, 5, 3, 16, 0.1) for kind in NETWORKS),
)


def shortened(recipe: Recipe) -> Recipe:
    """The recipe with two tasks; for ResNet-12 with one task, few channels and the smallest images that it takes."""
    if recipe.kind == "resnet12":
        return recipe._replace(tasks=1, image_size=16, widths=(8, 16, 32, 64))
    return recipe._replace(tasks=2)


class MetaBatch(NamedTuple):
    """The input of every way: the parameters, the meta-batch, and the activation of the network."""

    recipe: Recipe
    params: Params
    episode: Episode
    activation: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.params)

    def to(self, where: torch.dtype | torch.device) -> "MetaBatch":
        """The problem on another device, or in another precision; classes stay integers."""

        def moved(value: Tensor) -> Tensor:
            keeps = isinstance(where, torch.dtype) and not value.is_floating_point()
            return value if keeps else value.to(where)

        episode = Episode(*(Batch(*map(moved, batch)) for batch in self.episode))
        return self._replace(params={name: moved(p) for name, p in self.params.items()}, episode=episode)

    def part(self, first: int, last: int) -> "MetaBatch":
        """The tasks from `first` to `last` - 1."""
        episode = Episode(*(Batch(*(value[first:last] for value in batch)) for batch in self.episode))
        return self._replace(episode=episode)

    def per_task(self) -> list[tuple[Tensor, ...]]:
        """Support x, support y, query x and query y of each task."""
        (support, query) = self.episode
        return list(zip(*support, *query, strict=True))


def model_of(recipe: Recipe, activation: str) -> Model:
    """Our network of a recipe; of an own one, what `model=module` makes of it."""
    if recipe.kind in NETWORKS:
        make, shape = NETWORKS[recipe.kind]
        return adapted(
            lambda: make(getattr(F, activation)), name=recipe.kind, inputs=of_reals(shape), transductive=True,
            advice="", vectorize="auto",
        )  # fmt: skip
    if recipe.kind == "sinusoid":
        return mlp(inputs=1, outputs=1, hidden=recipe.widths, activation=activation)
    if recipe.kind == "resnet12":
        return resnet12(
            ways=recipe.ways, channels=3, image_size=recipe.image_size, widths=recipe.widths, activation=activation
        )
    (filters,) = set(recipe.widths)
    return conv4(ways=recipe.ways, channels=1, image_size=recipe.image_size, filters=filters, activation=activation)


def algorithm_of(recipe: Recipe, activation: str) -> Algorithm:
    """Our MAML of a recipe."""
    return maml(
        model=model_of(recipe, activation), inner_lr=recipe.inner_lr, inner_steps=recipe.inner_steps,
        eval_steps=recipe.inner_steps,
    )  # fmt: skip


def chunk_of(recipe: Recipe, device: torch.device) -> int:
    """The tasks that we compute together with `task_chunk=auto`."""
    settings = TrainerSettings(
        steps=1, meta_batch_size=recipe.tasks, task_chunk="auto", val_every=1, val_tasks=2, test_tasks=2
    )
    return chunk_size(settings, model_of(recipe, PLAIN[recipe.kind]), recipe.images, device)


def character_source(ways: int, queries: int) -> tuple[str, TaskSource]:
    """The name and the source of the characters: Omniglot if METALEARN_DATA has it, else glyphs, which need no data."""
    episode, seeds = EpisodeSpec(ways, shots=1, queries=queries), Seeds(SEED, SEED)
    place = DataPlace(os.environ.get("METALEARN_DATA", str(ROOT / "data")), download=False)
    real = omniglot(place=place, split="paper", episode=episode, image_size=28, channels=1, rotations=True, seeds=seeds)
    try:
        real.episodes("train", torch.tensor([0]))
    except DataError:
        return "glyphs", glyphs(episode=episode, image_size=28, channels=1, rotations=True, seeds=seeds)
    return "omniglot", real


def problem(recipe: Recipe, activation: str) -> MetaBatch:
    """Parameters and meta-batch of a recipe: the same at every call, in float32 on the CPU."""
    params = model_of(recipe, activation).init(torch.Generator().manual_seed(SEED))
    return MetaBatch(recipe, params, episodes_of(recipe)(torch.arange(recipe.tasks)), activation)


def episodes_of(recipe: Recipe) -> Callable[[Tensor], Episode]:
    """From numbers of tasks to these tasks. Random inputs, of ResNet-12 and of own networks, are made once."""
    if recipe.kind == "resnet12" or recipe.kind in NETWORKS:
        images = _random_images(recipe)
        return lambda indices: Episode(*(Batch(*(v[indices % recipe.tasks] for v in batch)) for batch in images))
    if recipe.kind == "sinusoid":
        source = sinusoid(
            shots=recipe.shots, queries=recipe.queries, eval_queries=recipe.queries, seeds=Seeds(SEED, SEED)
        )
    else:
        source = character_source(recipe.ways, recipe.queries)[1]
    return partial(source.episodes, "train")


def _random_images(recipe: Recipe) -> Episode:
    generator = torch.Generator().manual_seed(SEED)
    _, shape = NETWORKS.get(recipe.kind, (None, (3, recipe.image_size, recipe.image_size)))

    def batch(each: int) -> Batch:
        x = torch.randn(recipe.tasks, recipe.ways * each, *shape, generator=generator)
        return Batch(x, torch.arange(recipe.ways).repeat_interleave(each).expand(recipe.tasks, -1).contiguous())

    return Episode(batch(recipe.shots), batch(recipe.queries))


def added(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sum of the parts, tensor by tensor, in the order of the parts."""
    total = list(parts[0])
    for part in parts[1:]:
        total = [a + b for a, b in zip(total, part, strict=True)]
    return total


# The networks of the recipes written again, for one task at a time, as users of torch would write them: functions of
# parameters by name and a batch [n, …]. They share nothing with `metalearn` except the names of the parameters.

EPSILON = 1e-5
"""Batch norm adds it to the variance."""

SLOPE = 0.1
"""The slope of leaky ReLU for negative inputs."""

Named = dict[str, Any]
"""Parameters of one task by name."""

Network = Callable[[Named, Any], Any]
"""From parameters and a batch [n, …] to outputs [n, d]."""

Loss = Callable[[Any, Any], Any]
"""The mean loss of outputs [n, d] and targets: classes [n], or values [n, d]."""


class Ops(NamedTuple):
    """The operations of a library that the networks below use; images are [n, c, h, w].

    `conv(x, weight, stride)` keeps or halves the size of a map; `norm(x, scale, shift)` is batch norm with the
    statistics of the batch; `pool(x)` is 2×2 max pooling; `linear(x, weight, bias)` takes [n, i].
    """

    conv: Callable[[Any, Any, int], Any]
    norm: Callable[[Any, Any, Any], Any]
    act: Callable[[Any], Any]
    pool: Callable[[Any], Any]
    linear: Callable[[Any, Any, Any], Any]
    loss: Loss


def network(kind: str, ops: Ops) -> Network:
    """The network of a kind of recipe: `conv4`, `sinusoid`, `resnet12`, or a module of one's own."""
    if kind in NETWORKS:
        module = NETWORKS[kind][0](ops.act)

        def net(params: Named, x: Tensor) -> Any:
            with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
                return functional_call(module, params, (x,))

        return net
    return partial({"conv4": _conv4, "sinusoid": _mlp, "resnet12": _resnet12}[kind], ops)


def _conv4(ops: Ops, params: Named, x: Any) -> Any:
    for block in range(1, 5):
        h = ops.conv(x, params[f"conv{block}.weight"], 2)
        x = ops.act(ops.norm(h, params[f"norm{block}.weight"], params[f"norm{block}.bias"]))
    return ops.linear(x.mean((2, 3)), params["head.weight"], params["head.bias"])


def _mlp(ops: Ops, params: Named, x: Any) -> Any:
    last = len(params) // 2
    for layer in range(1, last):
        x = ops.act(ops.linear(x, params[f"layer{layer}.weight"], params[f"layer{layer}.bias"]))
    return ops.linear(x, params[f"layer{last}.weight"], params[f"layer{last}.bias"])


def _resnet12(ops: Ops, params: Named, x: Any) -> Any:
    def normed(x: Any, layer: str) -> Any:
        h = ops.conv(x, params[f"{layer}.conv.weight"], 1)
        return ops.norm(h, params[f"{layer}.norm.weight"], params[f"{layer}.norm.bias"])

    for block in (f"block{number}" for number in range(1, 5)):
        h = ops.act(normed(x, f"{block}.layer1"))
        h = ops.act(normed(h, f"{block}.layer2"))
        x = ops.pool(ops.act(normed(h, f"{block}.layer3") + normed(x, f"{block}.shortcut")))
    return ops.linear(x.mean((2, 3)), params["head.weight"], params["head.bias"])


def torch_ops(activation: str, *, written_out: bool = False) -> Ops:
    """torch's operations. `written_out` computes batch norm from mean and variance, as `torch.func.vmap` needs it."""
    act: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu,
        "leaky_relu": partial(F.leaky_relu, negative_slope=SLOPE),
        "softplus": F.softplus,
        "tanh": torch.tanh,
    }
    return Ops(
        conv=lambda x, weight, stride: F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2),
        norm=_written_out_norm if written_out else _fused_norm,
        act=act[activation],
        pool=lambda x: F.max_pool2d(x, 2),
        linear=F.linear,
        loss=lambda outputs, y: (F.mse_loss if y.is_floating_point() else F.cross_entropy)(outputs, y),
    )


def _fused_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, scale, shift, training=True, eps=EPSILON)


def _written_out_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean((0, 2, 3), keepdim=True)
    variance = centred.square().mean((0, 2, 3), keepdim=True)
    factor = scale[:, None, None] * torch.rsqrt(variance + EPSILON)
    return centred * factor + shift[:, None, None]


# The ways


def ours(batch: MetaBatch) -> GradientWay:
    """Our algorithm, on chunks of the size of `task_chunk=auto`."""
    recipe = batch.recipe
    algorithm = algorithm_of(recipe, batch.activation)
    size = chunk_of(recipe, batch.episode.query.y.device)
    chunks = [part.episode for part in in_chunks(batch, size)]

    def gradient() -> list[Tensor]:
        results = [algorithm.meta_grad(batch.params, chunk, 1).grads for chunk in chunks]
        return added([[grads[name] for name in batch.names] for grads in results])

    return gradient


def recording(way: GradientWay) -> GradientWay:
    """What a way computes as one CUDA graph, without the host, as in the steps of a run on one GPU.

    Raises:
        RuntimeError: there is no GPU.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries take their memory, and kernels are compiled
            way()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = way()

    def gradient(kept: GradientWay = way) -> list[Tensor]:  # it holds tensors that the graph reads
        graph.replay()
        return results

    return gradient


def in_chunks(batch: MetaBatch, size: int) -> list[MetaBatch]:
    return [batch.part(first, first + size) for first in range(0, len(batch.episode.query.y), size)]


def loop(batch: MetaBatch) -> GradientWay:
    """`torch.autograd.grad` for one task after the other, with `create_graph` in the inner steps."""
    recipe, names = batch.recipe, batch.names
    ops = torch_ops(batch.activation)
    net, loss = network(recipe.kind, ops), ops.loss
    theta = {name: p.detach().clone().requires_grad_() for name, p in batch.params.items()}
    tasks = batch.per_task()

    def one(support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> tuple[Tensor, ...]:
        params = theta
        for _ in range(recipe.inner_steps):
            inner = loss(net(params, support_x), support_y)
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            params = {name: params[name] - recipe.inner_lr * g for name, g in zip(names, grads, strict=True)}
        return torch.autograd.grad(loss(net(params, query_x), query_y), list(theta.values()))

    def gradient() -> list[Tensor]:
        total = [torch.zeros_like(p) for p in theta.values()]
        for task in tasks:
            for sum_, g in zip(total, one(*task), strict=True):
                sum_ += g
        return total

    return gradient


def _maml_loss(recipe: Recipe, ops: Ops) -> Callable[..., Any]:
    """MAML's query loss of one task: of parameters, support x, support y, query x and query y, by `torch.func`."""
    net = network(recipe.kind, ops)

    def of_one_task(params: Named, support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> Any:
        inner = torch.func.grad(lambda params: ops.loss(net(params, support_x), support_y))
        for _ in range(recipe.inner_steps):
            grads = inner(params)
            params = {name: params[name] - recipe.inner_lr * grads[name] for name in params}
        return ops.loss(net(params, query_x), query_y)

    return of_one_task


def vmap(batch: MetaBatch) -> GradientWay:
    """`torch.func.vmap` of `torch.func.grad`, over some tasks at once; on a GPU, over all tasks."""
    ops = torch_ops(batch.activation, written_out=True)
    of_one_task = _maml_loss(batch.recipe, ops)
    mapped = torch.func.vmap(torch.func.grad(of_one_task), in_dims=(None, 0, 0, 0, 0))
    at_once = (
        batch.recipe.kind == "sinusoid" or batch.recipe.kind in NETWORKS or batch.episode.query.y.device.type == "cuda"
    )
    size = batch.recipe.tasks if at_once else max(1, VMAP_IMAGES // batch.recipe.images)
    chunks = [(*part.episode.support, *part.episode.query) for part in in_chunks(batch, size)]

    def gradient() -> list[Tensor]:
        results = [mapped(batch.params, *chunk) for chunk in chunks]
        return added([[grads[name].sum(0) for name in batch.names] for grads in results])

    return gradient


class _Module(nn.Module):
    """A network as a module for TorchOpt, which exchanges its parameters in place at every inner step."""

    def __init__(self, params: Params, net: Network) -> None:
        super().__init__()
        self._names, self._net = tuple(params), net
        for name, p in params.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(p.detach().clone()))

    def forward(self, x: Tensor) -> Any:
        return self._net(dict(zip(self._names, self._parameters.values(), strict=True)), x)


def torchopt_loop(batch: MetaBatch) -> GradientWay:
    """The loop of TorchOpt's few-shot example: `MetaSGD`, with its state restored for each task, and one backward pass.

    Raises:
        ImportError: TorchOpt is not installed.
    """
    torchopt = importlib.import_module("torchopt")
    ops = torch_ops(batch.activation)
    module = _Module(batch.params, network(batch.recipe.kind, ops))
    inner = torchopt.MetaSGD(module, lr=batch.recipe.inner_lr)
    leaves = list(module.parameters())
    tasks = batch.per_task()

    def gradient() -> list[Tensor]:
        start = torchopt.extract_state_dict(module, by="reference", detach_buffers=True)
        inner_start = torchopt.extract_state_dict(inner, by="reference")
        losses = []
        for support_x, support_y, query_x, query_y in tasks:
            for _ in range(batch.recipe.inner_steps):
                inner.step(ops.loss(module(support_x), support_y))
            losses.append(ops.loss(module(query_x), query_y))
            torchopt.recover_state_dict(module, start)
            torchopt.recover_state_dict(inner, inner_start)
        return list(torch.autograd.grad(torch.stack(losses).sum(), leaves))

    return gradient


WAYS: dict[str, Make] = {
    "ours": ours,
    "ours, one graph": lambda batch: recording(ours(batch)),
    "loop": loop,
    "vmap": vmap,
    "vmap, one graph": lambda batch: recording(vmap(batch)),
    "TorchOpt": torchopt_loop,
}
"""All ways; the others are compared with `loop`."""

GRAPHS = ("ours, one graph", "vmap, one graph")
"""The ways that need a GPU."""

OPTIONAL = ("TorchOpt",)
"""The ways of other libraries, which are measured on a CPU."""


def ways_there(device: str, kind: str) -> dict[str, Make]:
    """The ways that can be measured on a device with the installed libraries, for a kind of recipe."""
    no_rule = [name for name in WAYS if kind == "own-lstm" and "vmap" in name]  # torch has none for its LSTM
    if device == "cuda":
        return {name: make for name, make in WAYS.items() if name not in (*OPTIONAL, *no_rule)}
    absent = [name for name in OPTIONAL if importlib.util.find_spec(name.lower()) is None]
    return {name: make for name, make in WAYS.items() if name not in (*GRAPHS, *absent, *no_rule)}


def error(computed: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, for each tensor relative to its largest exact entry."""
    pairs = zip(computed, exact, strict=True)
    worst = [((a.double().cpu() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return max(worst, key=lambda value: math.inf if math.isnan(value) else value)
