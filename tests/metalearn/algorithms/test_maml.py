"""MAML with its networks: finite differences, the network written out, memory and chunks. The tests of all algorithms
are in test_algorithms.py."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.autograd import gradcheck

from metalearn.algorithms.common.arithmetic import State
from metalearn.algorithms.common.inner import SGD, InnerOptimizer, last, support_descent
from metalearn.algorithms.maml import maml
from metalearn.algorithms.meta_curvature import meta_curvature
from metalearn.algorithms.meta_sgd import meta_sgd
from metalearn.algorithms.reptile import reptile
from metalearn.errors import ConfigError
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.nn.backends import compiled
from metalearn.training.settings import TrainerSettings, chunk_size
from metalearn.types import Algorithm, Batch, Episode, Params
from tests.metalearn import written_out
from tests.metalearn.learners import FLOAT64, close, network, random, start_of, tasks
from tests.runs import ROOT, slow


def images(tasks: int, ways: int, *, size: int = 12, seed: int = 0) -> Episode:
    y = torch.arange(ways).repeat(tasks, 1)
    x = [random(tasks, ways, 1, size, size, seed=seed + s).abs() for s in (0, 1)]
    return Episode(Batch(x[0], y), Batch(x[1], y))


def double(params: Params) -> Params:
    return {name: value.to(FLOAT64) for name, value in params.items()}


def spread_out(params: Params) -> Params:
    """Parameters away from the symmetric start, where many derivatives are zero."""
    return {name: value + 0.2 * random(*value.shape, seed=i) for i, (name, value) in enumerate(params.items())}


def test_gradcheck_of_the_whole_meta_loss() -> None:
    model = mlp(inputs=1, outputs=1, hidden=(3,), activation="tanh")
    learner = maml(model=model, inner_lr=0.1, inner_steps=2, eval_steps=1)
    episode = Episode(*(Batch(random(2, 4, 1, seed=s), random(2, 4, 1, seed=s + 1)) for s in (1, 3)))
    params = spread_out(double(learner.init(Generator().manual_seed(0))))
    loss = learner.loss
    assert loss is not None

    def meta_loss(*values: Tensor) -> Tensor:
        return loss(dict(zip(params, values, strict=True)), episode, 1)

    assert gradcheck(meta_loss, tuple(value.requires_grad_() for value in params.values()))


def meta_loss_of(learner: Algorithm, params: Params, episode: Episode) -> float:
    assert learner.loss is not None
    return learner.loss({name: value.requires_grad_() for name, value in params.items()}, episode, 1).item()


@pytest.mark.parametrize(("downsample", "transductive"), [("stride", True), ("stride", False), ("pool", True)])
def test_conv4_meta_gradient_along_a_direction(downsample: str, transductive: bool) -> None:
    size = 12 if downsample == "stride" else 16
    model = conv4(
        ways=3, channels=1, image_size=size, filters=8, downsample=downsample, activation="softplus",
        transductive=transductive,
    )  # fmt: skip
    learner = maml(model=model, inner_lr=0.4, inner_steps=2, eval_steps=1)
    episode = images(2, 3, size=size)
    params = spread_out(double(learner.init(Generator().manual_seed(0))))
    direction = {name: random(*value.shape, seed=50 + i) for i, (name, value) in enumerate(params.items())}
    grads = learner.meta_grad(params, episode, 1).grads
    slope = sum((grads[name] * direction[name]).sum().item() for name in params)

    def along(distance: float) -> float:
        return meta_loss_of(learner, {name: params[name] + distance * direction[name] for name in params}, episode)

    h = 1e-5
    fourth_order = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    assert slope == pytest.approx(fourth_order, rel=1e-6)


@pytest.mark.parametrize(
    ("transductive", "steps", "activation"), [(True, 1, "relu"), (True, 3, "leaky_relu"), (False, 2, "relu")]
)
def test_conv4_meta_gradient_is_the_one_written_out(transductive: bool, steps: int, activation: str) -> None:
    rate, act = 0.4, getattr(F, activation)
    model = conv4(ways=3, channels=1, image_size=12, filters=8, activation=activation, transductive=transductive)
    learner = maml(model=model, inner_lr=rate, inner_steps=steps, eval_steps=1)
    episode = images(3, 3)
    params = spread_out(double(learner.init(Generator().manual_seed(0))))

    theta = {name: value.clone().requires_grad_() for name, value in params.items()}
    total = torch.zeros((), dtype=FLOAT64)
    for task in range(3):
        sx, sy, qx, qy = episode.support.x[task], episode.support.y[task], episode.query.x[task], episode.query.y[task]
        adapted = dict(theta)
        for _ in range(steps):
            loss = F.cross_entropy(written_out.conv4(adapted, sx, sx, act), sy)
            grads = torch.autograd.grad(loss, list(adapted.values()), create_graph=True)
            adapted = {name: p - rate * g for (name, p), g in zip(adapted.items(), grads, strict=True)}
        total = total + F.cross_entropy(written_out.conv4(adapted, qx, qx if transductive else sx, act), qy)
    expected = dict(zip(theta, torch.autograd.grad(total, list(theta.values())), strict=True))

    result = learner.meta_grad(params, episode, 1)
    assert result.metrics["loss"].item() == pytest.approx(total.item(), abs=1e-11)
    for name in params:
        torch.testing.assert_close(result.grads[name], expected[name], rtol=1e-9, atol=1e-11)


MEMORY = """
import resource, sys, torch
from distributed.reduce import tree_sum
from distributed.partition import TensorDimensionPartitioner
from distributed.reduce import mean_of_sums
from distributed.strategies.local import local
from distributed.strategies.common.work import WorkPlan, Work
from metalearn.algorithms.maml import maml
from metalearn.training.chunks import chunk_functions
from metalearn.app.process import keep_freed_memory
from metalearn.models.conv4 import conv4
from metalearn.training.settings import TrainerSettings, chunk_size, tasks_in_chunks
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.glyphs import glyphs

keep_freed_memory()
torch.set_num_threads(1)
batch = int(sys.argv[1])
device = torch.device("cpu")
model = conv4(ways=5, channels=1, image_size=28)
algorithm = maml(model=model, inner_lr=0.4, inner_steps=1, eval_steps=1)
source = glyphs(episode=EpisodeSpec(5, 1, 1), image_size=28, channels=1, rotations=True, seeds=Seeds(0, 1))
work = Work(**chunk_functions(algorithm, source, device, torch.float32, tree_sum)._asdict(), device=device)
settings = TrainerSettings(
    steps=1, meta_batch_size=batch, task_chunk="auto", val_every=1, val_tasks=2, test_tasks=2, eval_seed=1
)
strategy = local(plan=WorkPlan(work, 1, TensorDimensionPartitioner(0), mean_of_sums), timeout=60.0)()
params = algorithm.init(torch.Generator().manual_seed(0))
for step in (1, 2):
    strategy.map(params, tasks_in_chunks(0, batch, chunk_size(settings, model, 10, device)), step)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@slow
@pytest.mark.thorough
def test_peak_memory_does_not_grow_with_the_meta_batch() -> None:
    """One chunk holds about 60 MB of graph; eight more chunks must cost much less."""
    peaks = []
    for batch in (16, 80):
        run = subprocess.run(
            [sys.executable, "-c", MEMORY, str(batch)], capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        assert run.returncode == 0, run.stderr
        peaks.append(int(run.stdout) / 1024)
    assert peaks[1] - peaks[0] < 10, peaks


@pytest.mark.parametrize("whole", (True, False))
def test_evaluation_keeps_no_graph(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Every inner step takes gradients by leaves only, and creates no graph; a compiled network needs no autograd."""
    model = conv4(ways=3, channels=1, image_size=12, filters=8)
    model = model if whole else model._replace(network=None)
    algorithm = maml(model=model, inner_lr=0.1, inner_steps=1, eval_steps=3)
    gradient, calls = torch.autograd.grad, []

    def watched(*args: Any, **options: Any) -> Any:
        calls.append(options.get("create_graph", False) or any(not p.is_leaf for p in args[1]))
        return gradient(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    values = algorithm.evaluate(double(model.init(Generator().manual_seed(0))), images(2, 3))
    assert calls == ([] if whole and compiled(torch.float64) else [False] * 3)
    assert not any(value.requires_grad for value in values.values())


TEN_IMAGES = [(10, 32, 8), (10, 30, 8), (10, 5, 5)]
EIGHTY_IMAGES = [(80, 32, 8), (80, 31, 7), (80, 16, 4), (80, 8, 2), (80, 4, 2), (80, 2, 2), (80, 1, 1)]


@pytest.mark.parametrize(
    ("images", "batch", "chunk"), [*TEN_IMAGES, *EIGHTY_IMAGES, (200, 32, 3), (400, 32, 2), (2400, 32, 1)]
)
def test_chunks_follow_the_formula(images: int, batch: int, chunk: int) -> None:
    """Conv4 keeps 64 · (14² + 7² + 4² + 2²) = 16,960 floats per image. A chunk may have 1,400,000; of eight
    tasks or fewer 12,000,000, of two 80,000,000; large tasks come in four chunks, if these can have two tasks."""
    settings = TrainerSettings(
        steps=1, meta_batch_size=batch, task_chunk="auto", val_every=1, val_tasks=2, test_tasks=2, eval_seed=1
    )
    model = conv4(ways=5, channels=1, image_size=28)
    assert model.activations == 16_960
    assert chunk_size(settings, model, images, torch.device("cpu")) == chunk


def by_layer() -> InnerOptimizer:
    """Directions of length 1 for every tensor, and a mean of the lengths that is carried from step to step."""

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        lengths = {name: grad.flatten(1).norm(dim=1) for name, grad in grads.items()}
        spread = {name: length.view(-1, *[1] * (grads[name].dim() - 1)) for name, length in lengths.items()}
        mean = {name: 0.5 * state["mean"][name] + 0.5 * spread[name].expand_as(grads[name]) for name in grads}
        return {name: grad / (spread[name] + mean[name]) for name, grad in grads.items()}, {"mean": mean}

    zeros = lambda params: {"mean": {name: torch.zeros_like(p) for name, p in params.items()}}  # noqa: E731
    return InnerOptimizer(zeros, direct, {"mean": 0.5})


@pytest.mark.parametrize("name", ["maml", "meta_sgd", "meta_curvature", "carried"])
def test_an_own_inner_optimiser_gets_each_tensor_by_itself(name: str) -> None:
    """Though compiled networks have all parameters of a task in one row."""
    rates = {"inner_lr": 0.1, "inner_steps": 2, "eval_steps": 2}
    make: Any = {
        "maml": partial(maml, **rates), "meta_sgd": partial(meta_sgd, **rates),
        "meta_curvature": partial(meta_curvature, **rates),
        "carried": partial(
            reptile, **rates, meta_batch=2, inner_batch=4, inner_state="carried", eval_batch=4
        ),
    }[name]  # fmt: skip
    compiled = network()
    ours, torchs = (make(model=model, inner=by_layer()) for model in (compiled, compiled._replace(network=None)))
    params = start_of(ours)
    got, expected = (learner.meta_grad(params, tasks(2), 1).grads for learner in (ours, torchs))
    close(got, expected, atol=1e-9)
    ours, plain = (make(model=compiled, inner=inner) for inner in (by_layer(), SGD))
    assert not torch.equal(
        ours.meta_grad(params, tasks(2), 1).grads["conv1.weight"],
        plain.meta_grad(params, tasks(2), 1).grads["conv1.weight"],
    )


def test_weights_without_a_rate_are_named() -> None:
    model = network()
    params = model.init(Generator().manual_seed(0))
    rates = {name: torch.tensor(0.1) for name in params if name != "conv1.weight"}
    with pytest.raises(ConfigError, match=r"inner rates have none for conv1\.weight; give one for each"):
        last(support_descent(model, params, tasks(1).support, inner=SGD, rate=rates, steps=1, order=2))
