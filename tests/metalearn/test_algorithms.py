"""The property table, which every algorithm passes, and a comparison of each algorithm with its paper."""

import copy
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Generator, Tensor

from distributed.reduce import mean_of_sums
from metalearn.algorithms.anil import anil
from metalearn.algorithms.cavia import cavia
from metalearn.algorithms.common import inner
from metalearn.algorithms.common.functional import conjugate_gradient
from metalearn.algorithms.common.inner import constant, descent, last
from metalearn.algorithms.imaml import imaml
from metalearn.algorithms.maml import maml
from metalearn.algorithms.maml_pp import maml_pp, step_weights
from metalearn.algorithms.meta_curvature import meta_curvature
from metalearn.algorithms.meta_sgd import meta_sgd
from metalearn.algorithms.protonet import protonet
from metalearn.algorithms.r2d2 import ridge
from metalearn.algorithms.reptile import mini_batches, reptile
from metalearn.algorithms.scratch import scratch
from metalearn.errors import ConfigError
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.glyphs import glyphs
from metalearn.training.loop import meta_gradient, new_learner, update
from metalearn.training.optimizers import sgd as outer_sgd
from metalearn.types import Algorithm, Batch, Episode, Model, Params
from tests.distributed.worlds import run_ranks
from tests.metalearn import written_out
from tests.metalearn.learners import (
    FLOAT64,
    LEARNERS,
    OPTIMIZERS,
    PP,
    STEPS,
    WAYS,
    evaluation_episode,
    network,
    random,
    start_of,
    tasks,
    training_episode,
)
from tests.runs import ROOT

every_learner = pytest.mark.parametrize("name", LEARNERS)


def copied(values: Params) -> Params:
    return {name: value.clone() for name, value in values.items()}


def part_of(learner: Algorithm, episode: Episode, chosen: list[int]) -> Episode:
    """The chosen tasks, or samples, in the chosen order."""
    if learner.trained_on == "tasks":
        return Episode(*(Batch(batch.x[chosen], batch.y[chosen]) for batch in episode))
    return Episode(episode.support, Batch(episode.query.x[:, chosen], episode.query.y[:, chosen]))


def close(ours: Params, expected: Params, *, atol: float, rtol: float = 0.0) -> None:
    assert ours.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# What holds for all


def test_the_table_has_every_algorithm() -> None:
    """Each file in the folder of algorithms is in the table, and a yaml names it."""
    files = {path.stem for path in (ROOT / "metalearn/algorithms").glob("*.py")} - {"__init__"}
    yamls = {path.stem: OmegaConf.load(path)._target_ for path in (ROOT / "conf/algorithm").glob("*.yaml")}
    assert files <= LEARNERS.keys() and yamls.keys() <= LEARNERS.keys()
    assert files == {target.split(".")[2] for target in yamls.values()}


@every_learner
def test_a_learner_is_pure(name: str) -> None:
    """Its arguments stay unchanged, equal arguments give equal bits, and results have no graph."""
    learner = LEARNERS[name](network())
    params, episode, evaluated = start_of(learner), training_episode(learner, 4), evaluation_episode(learner, 4)
    before = copied(params), [value.clone() for batch in (*episode, *evaluated) for value in batch]
    results = [learner.meta_grad(params, episode, 3) for _ in range(2)]
    values = [learner.evaluate(params, evaluated) for _ in range(2)]
    predictions = [learner.adapt(params, evaluated.support)(evaluated.query.x) for _ in range(2)]
    assert all(torch.equal(params[key], before[0][key]) and not params[key].requires_grad for key in params)
    after = [value for batch in (*episode, *evaluated) for value in batch]
    assert all(torch.equal(a, b) for a, b in zip(after, before[1], strict=True))
    assert results[0].grads.keys() == params.keys() and results[0].count == 4
    assert all(results[0].grads[key].shape == params[key].shape for key in params)
    for first, second in (
        (results[0].grads, results[1].grads), (results[0].metrics, results[1].metrics), (values[0], values[1]),
    ):  # fmt: skip
        assert all(torch.equal(first[key], second[key]) and not first[key].requires_grad for key in first)
    assert torch.equal(predictions[0], predictions[1]) and not predictions[0].requires_grad


@every_learner
def test_neither_order_nor_chunks_matter(name: str) -> None:
    """The sum over tasks in another order, and in two chunks, is the same but for rounding."""
    learner = LEARNERS[name](network())
    params, episode = start_of(learner), training_episode(learner, 4)
    whole = learner.meta_grad(params, episode, 3)
    turned = learner.meta_grad(params, part_of(learner, episode, [2, 0, 3, 1]), 3)
    close(turned.grads, whole.grads, atol=1e-12)
    if learner.trained_on == "samples":
        return  # a micro-batch is normalised by itself, so other micro-batches have other outputs
    halves = [learner.meta_grad(params, part_of(learner, episode, chosen), 3) for chosen in ([0], [1, 2, 3])]
    close({key: halves[0].grads[key] + halves[1].grads[key] for key in params}, whole.grads, atol=1e-12)
    for key, value in whole.metrics.items():
        assert halves[0].metrics[key] + halves[1].metrics[key] == pytest.approx(value.item(), abs=1e-12)


NO_DERIVATIVE = (
    "fomaml", "reptile", "reptile_carried", "imaml", "imaml_damped", "imaml_after", "scratch", "simpleshot_centred",
    "tim_centred", "laplacian_shot_rectified",
)  # fmt: skip
"""Their meta-gradient is not the gradient of a loss; they are compared with their formulas elsewhere."""


@pytest.mark.parametrize("name", [name for name in LEARNERS if name not in NO_DERIVATIVE])
def test_the_gradient_is_a_finite_difference(name: str) -> None:
    """A finite difference of the summed loss along a direction."""
    learner = LEARNERS[name](network())
    params, episode = start_of(learner), training_episode(learner, 3)
    direction = {key: random(*value.shape, seed=50 + i) for i, (key, value) in enumerate(params.items())}
    grads = learner.meta_grad(params, episode, 3).grads
    slope = sum((grads[key] * direction[key]).sum().item() for key in params)

    def along(distance: float) -> float:
        assert learner.loss is not None
        moved = {key: (params[key] + distance * direction[key]).requires_grad_() for key in params}
        return learner.loss(moved, episode, 3).item()

    h = 1e-5
    fourth_order = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    assert slope == pytest.approx(fourth_order, rel=1e-6)


ONE_COLUMN = (
    "protonet",
    "matching",
    "r2d2",
    "metaoptnet",
    "in_context",
    "simpleshot",
    "simpleshot_centred",
    "supervised",
)


@every_learner
def test_every_inner_step_is_evaluated(name: str) -> None:
    """Column i of an evaluation has the values of the predictor after i inner steps."""
    learner = LEARNERS[name](network())
    params, episode = start_of(learner), evaluation_episode(learner, 1 if learner.evaluated_on == "tasks" else 4)
    values = learner.evaluate(params, episode)
    columns = 1 if name in ONE_COLUMN else STEPS["eval_steps"] + 1
    assert {value.shape[1] for value in values.values()} == {columns}
    for step in range(int(columns)):
        logits = learner.adapt(params, episode.support, step)(episode.query.x)
        losses = F.cross_entropy(logits[0], episode.query.y[0], reduction="none")
        expected = losses if learner.evaluated_on == "samples" else losses.mean()
        torch.testing.assert_close(values["loss"][:, step].squeeze(), expected, rtol=0, atol=1e-12)
        right = (logits[0].argmax(dim=1) == episode.query.y[0]).double()
        assert values["accuracy"][:, step].mean() == pytest.approx(right.mean().item())


@every_learner
def test_queries_see_each_other_only_when_transductive(name: str) -> None:
    """The other queries are replaced: the logits of the first stay where neither model nor learner is transductive."""
    episode, other = tasks(1), tasks(1, seed=9)
    replaced = torch.cat([episode.query.x[:, :1], other.query.x[:, 1:]], dim=1)
    for transductive in (True, False):
        learner = LEARNERS[name](network(transductive=transductive))
        predict = learner.adapt(start_of(learner), episode.support)
        before, after = (predict(x)[0, 0] for x in (episode.query.x, replaced))
        change = (before - after).abs().max()
        assert change > 1e-3 if transductive or learner.transductive else change <= 1e-12
    assert learner.transductive == name.startswith(("tim", "laplacian_shot"))


@pytest.mark.thorough
def test_two_workers_give_the_bits_of_one() -> None:
    """By remote calls, for every algorithm: gradients, metrics and the values of test tasks."""
    results = run_ranks([str(ROOT / "tests/metalearn/learners_program.py")], 2)
    assert all(code == 0 for code, _ in results), results
    reported = [line for line in results[0][1].splitlines() if line.endswith(" ok")]
    assert reported == [f"{name} ok" for name in LEARNERS]


# Each against its paper

REFERENCES: dict[str, Callable[[Params, Episode], Params]] = {
    "maml": written_out.gradient(written_out.maml(lr=0.3, steps=2)),
    "fomaml": written_out.gradient(written_out.maml(lr=0.3, steps=2, order=1)),
    "anil": written_out.gradient(written_out.maml(lr=0.3, steps=2, adapts="head")),
    "boil": written_out.gradient(written_out.maml(lr=0.3, steps=2, adapts="body")),
    "meta_sgd": written_out.gradient(written_out.meta_sgd(steps=2)),
    "maml_pp": written_out.gradient(written_out.maml_pp(steps=2, weights=(0.0, 1.0))),
    "cavia": written_out.gradient(written_out.cavia(lr=0.3, steps=2, norm=2)),
    "meta_curvature": written_out.gradient(written_out.meta_curvature(lr=0.3, steps=2)),
    "protonet": written_out.gradient(written_out.protonet),
    "matching": written_out.gradient(written_out.matching(scale=2.0)),
    "r2d2": written_out.gradient(written_out.r2d2),
    "in_context": written_out.gradient(written_out.in_context(heads=2, layers=2)),
    "reptile": written_out.reptile(lr=0.3, steps=2, size=4),
    "imaml": written_out.imaml(lr=0.1, steps=2, strength=5.0),
    "imaml_damped": written_out.imaml(lr=0.1, steps=2, strength=2.0, damping=1.0, cg_strength=12.0),
    "imaml_after": written_out.imaml(lr=0.1, steps=2, strength=3.0, damping=1.0, cg_strength=12.0, spring="after"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REFERENCES)
def test_ten_meta_steps_beside_the_formulas_written_out(name: str) -> None:
    """Ten steps of Adam on the same episodes, in float64: the parameters stay together."""
    learner = LEARNERS[name](network(filters=2))  # few enough for the whole Hessian
    start = start_of(learner)
    runs: dict[str, Params] = {}
    for who, gradient in (
        ("ours", lambda params, episode: learner.meta_grad(params, episode, 100).grads), ("theirs", REFERENCES[name]),
    ):  # fmt: skip
        params = {key: value.clone().requires_grad_() for key, value in start.items()}
        outer = torch.optim.Adam(params.values(), lr=1e-3)
        for step in range(10):
            for key, grad in gradient({k: v.detach() for k, v in params.items()}, tasks(2, seed=10 * step)).items():
                params[key].grad = grad / 2
            outer.step()
        runs[who] = {key: value.detach() for key, value in params.items()}
    moved = max((runs["ours"][key] - start[key]).abs().max().item() for key in start)
    assert moved > 5e-3
    close(runs["ours"], runs["theirs"], atol=1e-10)


def linear_model(size: int) -> Model:
    """y = x · θ: its mean squared error is a quadratic in θ."""

    def init(generator: Generator) -> Params:
        return {"theta": torch.randn(size, dtype=FLOAT64, generator=generator)}

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return torch.einsum("tnd,td->tn", x, params["theta"]).unsqueeze(2)

    return Model(init, apply, transductive=False, activations=1)


class Quadratic:
    """Tasks with loss(θ) = ½ (θ − a)ᵀ A (θ − a) + constant on the support set, and with B and b on the query set."""

    def __init__(self, size: int = 3, count: int = 4) -> None:
        x = [random(count, 8, size, seed=seed) for seed in (1, 3)]
        y = [random(count, 8, 1, seed=seed) for seed in (2, 4)]
        self.episode = Episode(*(Batch(*pair) for pair in zip(x, y, strict=True)))
        self.size, self.count = size, count
        self.matrices = [2 * part.transpose(1, 2) @ part / 8 for part in x]
        self.centres = [
            torch.linalg.solve(matrix, 2 * part.transpose(1, 2) @ target / 8)[..., 0]
            for matrix, part, target in zip(self.matrices, x, y, strict=True)
        ]

    def task(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (a_matrix, b_matrix), (a, b) = self.matrices, self.centres
        return a_matrix[number], a[number], b_matrix[number], b[number]


EYE = torch.eye(3, dtype=FLOAT64)
RATE, DEPTH = 0.05, 3


def of_maml(theta: Tensor, a_matrix: Tensor, a: Tensor, b_matrix: Tensor, b: Tensor) -> Tensor:
    shrink = torch.linalg.matrix_power(EYE - RATE * a_matrix, DEPTH)
    return shrink.T @ b_matrix @ (a + shrink @ (theta - a) - b)


def of_fomaml(theta: Tensor, a_matrix: Tensor, a: Tensor, b_matrix: Tensor, b: Tensor) -> Tensor:
    shrink = torch.linalg.matrix_power(EYE - RATE * a_matrix, DEPTH)
    return b_matrix @ (a + shrink @ (theta - a) - b)


def of_reptile(theta: Tensor, a_matrix: Tensor, a: Tensor, b_matrix: Tensor, b: Tensor) -> Tensor:
    """All samples are learned from: the mean loss is half of each."""
    matrix = (a_matrix + b_matrix) / 2
    centre = torch.linalg.solve(matrix, (a_matrix @ a + b_matrix @ b) / 2)
    return theta - centre - torch.linalg.matrix_power(EYE - RATE * matrix, DEPTH) @ (theta - centre)


def of_momentum(theta: Tensor, a_matrix: Tensor, a: Tensor, b_matrix: Tensor, b: Tensor) -> Tensor:
    """(θ, m) moves by a matrix: m ← μ m + A (θ − a), θ ← θ − α m."""
    step = torch.cat([torch.cat([EYE - RATE * a_matrix, -RATE * 0.8 * EYE], 1), torch.cat([a_matrix, 0.8 * EYE], 1)])
    power = torch.linalg.matrix_power(step, DEPTH)[:3, :3]
    return power.T @ b_matrix @ (a + power @ (theta - a) - b)


def of_imaml(theta: Tensor, a_matrix: Tensor, a: Tensor, b_matrix: Tensor, b: Tensor) -> Tensor:
    """φ = (A + λ I)⁻¹ (A a + λ θ), so that dφ/dθ = λ (A + λ I)⁻¹."""
    inverse = torch.linalg.inv(a_matrix + 2.0 * EYE)
    return 2.0 * inverse @ b_matrix @ (inverse @ (a_matrix @ a + 2.0 * theta) - b)


STEPPED = {"inner_lr": RATE, "inner_steps": DEPTH, "eval_steps": 1}
CLOSED_FORMS: dict[str, tuple[Callable[[Model], Algorithm], Callable[..., Tensor]]] = {
    "maml": (lambda model: maml(model=model, **STEPPED), of_maml),
    "fomaml": (lambda model: maml(model=model, **STEPPED, first_order=True), of_fomaml),
    "meta_sgd": (lambda model: meta_sgd(model=model, **STEPPED), of_maml),
    "meta_curvature": (lambda model: meta_curvature(model=model, **STEPPED), of_maml),
    "checkpointed": (lambda model: maml(model=model, **STEPPED, checkpoint_steps=True), of_maml),
    "maml_pp": (
        lambda model: maml_pp(model=model, **STEPPED, **(PP | {"multi_step_until": 0, "per_step_norm": False})),
        of_maml,
    ),
    "reptile": (lambda model: reptile(model=model, **STEPPED, inner_batch=None, eval_batch=None), of_reptile),
    "momentum": (lambda model: maml(model=model, inner=OPTIMIZERS["momentum"], **STEPPED), of_momentum),
    "imaml": (
        lambda model: imaml(model=model, inner_lr=0.1, inner_steps=300, eval_steps=1, strength=2.0, cg_steps=3),
        of_imaml,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_the_meta_gradient_of_a_quadratic_is_the_closed_form(name: str, dtype: torch.dtype, error: float) -> None:
    make, formula = CLOSED_FORMS[name]
    problem = Quadratic()
    learner = make(linear_model(problem.size))
    params = {key: value.to(dtype) for key, value in learner.init(Generator().manual_seed(0)).items()}
    theta = params["theta"].double()
    expected = torch.stack([formula(theta, *problem.task(number)) for number in range(problem.count)]).sum(dim=0)
    episode = Episode(*(Batch(batch.x.to(dtype), batch.y.to(dtype)) for batch in problem.episode))
    gradient = learner.meta_grad(params, episode, 1).grads["theta"].double()
    assert (gradient - expected).abs().max() <= error * max(1.0, expected.abs().max().item())


def test_the_gradient_by_a_learned_rate_is_the_closed_form() -> None:
    """One step of θ′ = θ − α ∘ A (θ − a): the derivative by α is −A (θ − a) ∘ B (θ′ − b)."""
    problem = Quadratic()
    learner = meta_sgd(model=linear_model(3), inner_lr=RATE, inner_steps=1, eval_steps=1)
    params = start_of(learner)
    theta, rate = params["theta"], params["inner_lr.theta"]
    expected = torch.zeros(3, dtype=FLOAT64)
    for number in range(problem.count):
        a_matrix, a, b_matrix, b = problem.task(number)
        slope = a_matrix @ (theta - a)
        expected += -slope * (b_matrix @ (theta - rate * slope - b))
    gradient = learner.meta_grad(params, problem.episode, 1).grads["inner_lr.theta"]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_first_order_is_second_order_where_the_hessian_is_zero() -> None:
    """Outputs √(c + x · θ) with targets 0 have the mean squared error c + mean(x) · θ, which is linear."""

    def apply(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        return (50 + torch.einsum("tnd,td->tn", x, params["theta"])).sqrt().unsqueeze(2)

    model = linear_model(3)._replace(apply=apply)
    x = random(2, 4, 8, 3, seed=1)
    support = Batch(x[0], torch.zeros(4, 8, 1, dtype=FLOAT64))
    episode = Episode(support, Batch(x[1], random(4, 8, 1, seed=2)))
    for make in (maml, meta_sgd):
        orders = []
        for first_order in (False, True):
            learner = make(model=model, **STEPS, first_order=first_order)
            orders.append(learner.meta_grad(start_of(learner), episode, 1).grads)
        close(orders[0], orders[1], atol=1e-12)
        assert orders[0]["theta"].abs().max() > 1e-3


def test_meta_sgd_with_equal_rates_is_maml() -> None:
    plain, learned = (make(model=network(), **STEPS) for make in (maml, meta_sgd))
    weights, episode = start_of(plain), tasks(3)
    rates = {f"inner_lr.{name}": torch.full_like(value, STEPS["inner_lr"]) for name, value in weights.items()}
    expected = plain.meta_grad(weights, episode, 1)
    result = learned.meta_grad(weights | rates, episode, 1)
    close({name: result.grads[name] for name in weights}, expected.grads, atol=1e-12)
    assert learned.init(Generator().manual_seed(0))["inner_lr.head.bias"].tolist() == pytest.approx([0.3] * WAYS)


def test_meta_curvature_begins_as_maml() -> None:
    """The identity changes no bit of a gradient; the matrices are meta-parameters beside the weights."""
    plain, learned = (make(model=network(), **STEPS) for make in (maml, meta_curvature))
    weights = {name: value.double() for name, value in plain.init(Generator().manual_seed(3)).items()}
    params = {name: value.double() for name, value in learned.init(Generator().manual_seed(3)).items()}
    episode = tasks(3)
    expected, result = plain.meta_grad(weights, episode, 1), learned.meta_grad(params, episode, 1)
    assert torch.equal(result.metrics["loss"], expected.metrics["loss"])
    close({name: result.grads[name] for name in weights}, expected.grads, atol=1e-15)
    shapes = {name: tuple(value.shape) for name, value in params.items() if name not in weights}
    convolution, head = (8, 8, 9), (WAYS, 8)
    modes = ("outputs", "inputs", "pixels")
    for name, sizes in (("conv2.weight", convolution), ("head.weight", head)):
        for mode, size in zip(modes, sizes, strict=False):
            assert shapes[f"curvature.{name}.{mode}"] == (size, size)
    assert shapes["curvature.norm1.bias.entries"] == (8,) and len(shapes) == 4 * 5 + 3


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_cavia_of_a_perceptron_has_the_context_beside_its_inputs(layer: int) -> None:
    """By torch.func: the network is written out, and a layer is given (h, φ) and the weights (W, W_φ)."""
    learner = cavia(model=mlp(inputs=2, outputs=1, hidden=(5, 4), activation="tanh"), contexts=3, layer=layer, **STEPS)
    params = start_of(learner)
    episode = Episode(*(Batch(random(3, 6, 2, seed=seed), random(3, 6, 1, seed=seed + 1)) for seed in (1, 3)))

    def loss(theta: Params, phi: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for number in (1, 2, 3):
            weight = theta[f"layer{number}.weight"]
            if number == layer:
                x = torch.cat([x, phi.expand(len(x), -1)], dim=1)
                weight = torch.cat([weight, theta["context.shift"]], dim=1)
            x = F.linear(x, weight, theta[f"layer{number}.bias"])
            x = x.tanh() if number < 3 else x
        return F.mse_loss(x, y)

    def meta_loss(theta: Params) -> Tensor:
        losses = []
        for sx, sy, qx, qy in written_out.tasks_of(episode):
            phi = torch.zeros(3, dtype=FLOAT64)
            for _ in range(2):
                phi = phi - 0.3 * torch.func.grad(loss, argnums=1)(theta, phi, sx, sy)
            losses.append(loss(theta, phi, qx, qy))
        return torch.stack(losses).sum()

    result = learner.meta_grad(params, episode, 1)
    close(result.grads, torch.func.grad(meta_loss)(params), atol=1e-12)
    assert result.metrics["loss"].item() == pytest.approx(meta_loss(params).item(), abs=1e-12)


@pytest.mark.parametrize("name", ["anil", "cavia", "matching", "meta_curvature", "metaoptnet", "protonet", "r2d2"])
@pytest.mark.parametrize("transductive", [True, False])
def test_the_compiled_network_gives_what_its_layers_give(name: str, transductive: bool) -> None:
    model, episode = network(transductive=transductive), tasks(3)
    whole, by_layers = (LEARNERS[name](one) for one in (model, model._replace(network=None, body=None)))
    params = start_of(whole)
    close(whole.meta_grad(params, episode, 1).grads, by_layers.meta_grad(params, episode, 1).grads, atol=1e-12)


def test_maml_pp_switched_off_is_maml() -> None:
    plain = maml(model=network(), **STEPS)
    off = {"multi_step_until": 0, "first_order_until": 0, "learned_rates": False, "per_step_norm": False}
    params, episode = start_of(plain), tasks(3)
    expected = plain.meta_grad(params, episode, 1)
    result = maml_pp(model=network(), **STEPS, **off).meta_grad(params, episode, 1)
    assert all(torch.equal(result.grads[name], expected.grads[name]) for name in params)


def test_maml_pp_begins_with_first_order_gradients() -> None:
    options = {"multi_step_until": 0, "learned_rates": False, "per_step_norm": False}
    learner = maml_pp(model=network(), **STEPS, **options, first_order_until=5)
    params, episode = start_of(learner), tasks(2)
    for step, first_order in ((5, True), (6, False)):
        expected = maml(model=network(), **STEPS, first_order=first_order).meta_grad(params, episode, 1)
        close(learner.meta_grad(params, episode, step).grads, expected.grads, atol=1e-14)


def test_maml_pp_weighs_the_losses_of_all_steps() -> None:
    assert step_weights(1, 5, 100) == pytest.approx([0.2] * 5)
    assert step_weights(51, 5, 100) == pytest.approx([0.1] * 4 + [0.6])
    assert step_weights(101, 5, 100) == [0.0] * 4 + [1.0] == step_weights(1, 5, 0)
    assert sum(step_weights(34, 5, 100)) == pytest.approx(1)
    learner = LEARNERS["maml_pp"](network())
    params, episode = start_of(learner), tasks(2)
    expected = written_out.gradient(written_out.maml_pp(steps=2, weights=(0.35, 0.65)))(params, episode)
    close(learner.meta_grad(params, episode, 4).grads, expected, atol=1e-12)  # 1 − 3/10 of an equal share


def test_scratch_meta_learns_nothing() -> None:
    learner = LEARNERS["scratch"](network())
    params, episode = start_of(learner), tasks(3)
    result = learner.meta_grad(params, episode, 1)
    assert not any(grad.any() for grad in result.grads.values()) and learner.loss is None
    assert result.metrics["loss"] == learner.evaluate(params, episode)["loss"][:, 0].sum()


def test_anil_on_a_frozen_body_is_logistic_regression() -> None:
    """The head after some inner steps, against textbook softmax regression in numpy."""
    learner = anil(model=network(), inner_lr=0.5, inner_steps=1, eval_steps=4)
    params, episode = start_of(learner), tasks(1)
    weight, bias = (params[name].numpy() for name in written_out.HEAD)
    (support, query) = episode

    def features(x: Tensor) -> np.ndarray:
        return np.asarray(written_out.features(params, x, x, F.softplus))

    weight, bias = written_out.softmax_regression(
        features(support.x[0]), support.y[0].numpy(), weight, bias, lr=0.5, steps=4
    )
    expected = features(query.x[0]) @ weight.T + bias
    np.testing.assert_allclose(learner.adapt(params, support)(query.x)[0].numpy(), expected, rtol=0, atol=1e-12)


def test_prototypes_by_hand() -> None:
    """Two classes around (0, 0) and (4, 0), a query at (1, 0): squared distances 1 and 9."""
    model = Model(
        lambda generator: {"unused": torch.zeros(1)}, lambda params, x, support_x=None: x, transductive=False,
        activations=1, features=lambda params, x, support_x=None: x, head=network().head,
    )  # fmt: skip
    x = torch.tensor([[[0.0, 1.0], [0.0, -1.0], [4.0, 2.0], [4.0, -2.0]]])
    predict = protonet(model=model).adapt({}, Batch(x, torch.tensor([[0, 0, 1, 1]])))
    assert predict(torch.tensor([[[1.0, 0.0]]])).tolist() == [[[-1.0, -9.0]]]


def test_baseline_pp_is_a_cosine_classifier_by_torch() -> None:
    """The gradient in training, and the vectors after each step of torch's SGD on a task."""
    learner = LEARNERS["baseline_pp"](network())
    params = {name: value.requires_grad_() for name, value in start_of(learner).items()}
    samples = training_episode(learner, 5)
    x, y = samples.query.x[0], samples.query.y[0]

    def logits(features: Tensor, vectors: Tensor, scale: float) -> Tensor:
        return scale * F.cosine_similarity(features.unsqueeze(1), vectors.unsqueeze(0), dim=2)

    ours = learner.meta_grad({name: value.detach() for name, value in params.items()}, samples, 1).grads
    known = written_out.features(params, x, x, F.softplus)
    total = F.cross_entropy(logits(known, params["cosine.weight"], 10.0), y, reduction="sum")
    close(ours, dict(zip(params, torch.autograd.grad(total, list(params.values())), strict=True)), atol=1e-11)

    params = {name: value.detach() for name, value in params.items()}
    episode, losses = tasks(2), []
    for sx, sy, qx, qy in written_out.tasks_of(episode):
        known, queries = (written_out.features(params, part, part, F.softplus) for part in (sx, qx))
        lengths = known / known.norm(dim=1, keepdim=True)
        vectors = torch.stack([lengths[sy == label].mean(dim=0) for label in range(WAYS)]).requires_grad_()
        optimizer = torch.optim.SGD([vectors], lr=0.3)
        for _ in range(4):
            losses.append(F.cross_entropy(logits(queries, vectors, 2.0), qy).item())
            optimizer.zero_grad()
            F.cross_entropy(logits(known, vectors, 2.0), sy).backward()
            optimizer.step()
    assert learner.evaluate(params, episode)["loss"].flatten().tolist() == pytest.approx(losses, abs=1e-11)


def test_simpleshot_trains_as_finetune_and_compares_as_numpy() -> None:
    learner = LEARNERS["simpleshot"](network())
    params, samples, episode = start_of(learner), training_episode(learner, 5), tasks(2)
    same = LEARNERS["finetune"](network()).meta_grad(params, samples, 1).grads
    close(learner.meta_grad(params, samples, 1).grads, same, atol=0)
    for number, (sx, sy, qx, _) in enumerate(written_out.tasks_of(episode)):
        known, queries = (written_out.features(params, part, part, F.softplus).numpy() for part in (sx, qx))
        known, queries = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (known, queries))
        means = [known[sy.numpy() == label].mean(axis=0) for label in range(WAYS)]
        expected = [[-np.sum((query - mean) ** 2) for mean in means] for query in queries]
        support = Batch(episode.support.x[number : number + 1], episode.support.y[number : number + 1])
        logits = learner.adapt(params, support)(qx.unsqueeze(0))[0]
        np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [4, 40])
def test_ridge_regression_is_numpys(samples: int) -> None:
    x, y = random(2, samples, 9, seed=1), random(2, samples, 3, seed=2)
    weights = ridge(x, y, torch.tensor([0.7], dtype=FLOAT64))
    for task in range(2):
        a, b = x[task].numpy(), y[task].numpy()
        expected = np.linalg.solve(a.T @ a + 0.7 * np.eye(9), a.T @ b)
        np.testing.assert_allclose(weights[task].numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strength", [1e-4, 1e-6])
def test_ridge_regression_keeps_its_digits_in_float32(strength: float) -> None:
    """With more samples than features, where X Xᵀ is singular, and with fewer; the exact predictions are numpy's."""
    for samples, features in ((100, 20), (10, 65)):
        x, y = (random(4, samples, width, seed=width).float() for width in (features, 5))
        predicted = (x @ ridge(x, y, torch.tensor([strength]))).double().numpy()
        for task in range(4):
            a, b = x[task].double().numpy(), y[task].double().numpy()
            expected = a @ np.linalg.solve(a.T @ a + strength * np.eye(features), a.T @ b)
            np.testing.assert_allclose(predicted[task], expected, rtol=0, atol=2e-4)


def test_equal_support_pictures_and_a_tiny_strength_are_solved() -> None:
    """Twice the same picture is one picture of twice the weight; the gradient is finite."""
    one, y = random(1, 3, 65, seed=1).float(), random(1, 3, 5, seed=2).float()
    for strength in (1e-6, 0.0):
        x = torch.cat([one, one], dim=1).requires_grad_()
        weights = ridge(x, torch.cat([y, y], dim=1), torch.tensor([strength]))
        torch.testing.assert_close(one @ weights, y, rtol=0, atol=1e-3)
        assert torch.isfinite(torch.autograd.grad(weights.square().sum(), x)[0]).all()


def test_conjugate_gradient_solves_and_gives_its_residual() -> None:
    """Three tasks: a system of full rank, the identity, and a right side of zero."""
    root = random(5, 5, seed=1)
    matrices = torch.stack([root @ root.T + EYE.new_ones(5).diag(), torch.eye(5, dtype=FLOAT64), root @ root.T])
    right = random(3, 5, seed=2)
    right[2] = 0

    def product(v: Params) -> Params:
        return {"x": torch.einsum("tij,tj->ti", matrices, v["x"])}

    solution, residual = conjugate_gradient(product, {"x": right}, 5)
    torch.testing.assert_close(solution["x"][:2], torch.linalg.solve(matrices, right)[:2], rtol=0, atol=1e-10)
    assert residual.max() < 1e-10 and solution["x"][2].abs().max() == 0 == residual[2]
    short, residual = conjugate_gradient(product, {"x": right}, 2)
    gap = (product(short)["x"] - right).norm(dim=1)[0] / right[0].norm()
    assert residual[0] == pytest.approx(gap.item(), rel=1e-10) and residual[0] > 1e-3


def test_conjugate_gradient_stops_where_a_system_is_not_positive_definite() -> None:
    """b has a negative curvature in the first two tasks, b − A b in the first: x stays b. The third task is solved. The
    fourth stops after a step, at its second direction."""
    diagonals = torch.tensor([[1, 2, -1.01], [10, -1, 1], [1, 2, 4], [3, -0.1, 1]], dtype=FLOAT64)
    right = torch.tensor([[1, 0, 1], [1, 3.2, 0], [1, 1, 1], [1, 1, 0]], dtype=FLOAT64)
    solution, residual = conjugate_gradient(lambda v: {"x": diagonals * v["x"]}, {"x": right}, 5)
    assert torch.equal(solution["x"][:2], right[:2])
    gaps = (diagonals * solution["x"] - right).norm(dim=1) / right.norm(dim=1)
    torch.testing.assert_close(residual, gaps, rtol=0, atol=1e-12)
    torch.testing.assert_close(solution["x"][2], right[2] / diagonals[2], rtol=0, atol=1e-12)
    first = right[3] - diagonals[3] * right[3]
    once = right[3] + first.dot(first) / first.dot(diagonals[3] * first) * first
    torch.testing.assert_close(solution["x"][3], once, rtol=0, atol=1e-12)


def test_a_task_whose_curvature_is_not_positive_gives_first_order_maml() -> None:
    """The support losses (θᵢ² − 100)² are concave around 1, so its system is negative definite."""
    squares = linear_model(3)._replace(apply=lambda params, x, known=None: params["theta"].square().unsqueeze(2))
    params = {"theta": torch.tensor([0.5, 1.0, 1.5], dtype=FLOAT64)}
    x = torch.zeros(1, 3, 1, dtype=FLOAT64)
    episode = Episode(Batch(x, x + 100), Batch(x, x + 2))
    steps = STEPS | {"inner_steps": 0}
    expected = maml(model=squares, **steps, first_order=True).meta_grad(params, episode, 1).grads
    result = imaml(model=squares, **steps, strength=1.0, cg_steps=3).meta_grad(params, episode, 1)
    assert expected["theta"].abs().min() > 0.1
    close(result.grads, expected, atol=1e-12)


def test_imaml_gives_the_implicit_gradient_of_a_network() -> None:
    """If the inner problems are solved to the end, the gradient is a finite difference of the loss after them."""
    model = mlp(inputs=1, outputs=1, hidden=(4,), activation="tanh")
    learner = imaml(model=model, inner_lr=0.1, inner_steps=200, eval_steps=200, strength=4.0, cg_steps=13)
    params = start_of(learner)
    episode = Episode(*(Batch(random(2, 6, 1, seed=s), random(2, 6, 1, seed=s + 1)) for s in (1, 3)))
    result = learner.meta_grad(params, episode, 1)
    assert result.metrics["cg_residual"] < 1e-8
    direction = {name: random(*value.shape, seed=60 + i) for i, (name, value) in enumerate(params.items())}
    slope = sum((result.grads[name] * direction[name]).sum().item() for name in params)

    def along(distance: float) -> float:
        moved = {name: params[name] + distance * direction[name] for name in params}
        return learner.evaluate(moved, episode)["loss"][:, -1].sum().item()

    h = 1e-4
    assert slope == pytest.approx((8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h), rel=1e-8)


@pytest.mark.parametrize("spring", ["every_step", "after"])
def test_the_spring_of_imaml_has_a_strength_of_its_own_in_the_test(spring: str) -> None:
    """With none, a task is learned as from scratch; with one, as by a training of this strength."""
    model, episode = network(), tasks(2)
    steps = STEPS | {"inner_lr": 0.1}
    make = partial(imaml, model=model, **steps, cg_steps=1, spring=spring)
    params = start_of(make(strength=1.0))
    plain = scratch(model=model, inner_lr=0.1, eval_steps=3).evaluate(params, episode)
    close(make(strength=2.0, eval_strength=0.0).evaluate(params, episode), plain, atol=1e-12)
    stronger = make(strength=5.0).evaluate(params, episode)
    close(make(strength=2.0, eval_strength=5.0).evaluate(params, episode), stronger, atol=1e-12)
    assert (stronger["loss"][:, -1] - plain["loss"][:, -1]).abs().min() > 1e-4


def test_the_spring_after_the_steps_pulls_back_once() -> None:
    """One dimension by hand: support (θ − 4)² from θ = 1 at rate 0.1 goes to 1.6, then 2.08. A spring of 3 at that rate
    takes 0.3 of the way back."""
    x = torch.ones(1, 1, 1, dtype=FLOAT64)
    episode = Episode(Batch(x, 4 * x), Batch(x, 4 * x))
    learner = imaml(
        model=linear_model(1), inner_lr=0.1, inner_steps=2, eval_steps=2, strength=3.0, spring="after", cg_steps=1
    )
    mse = learner.evaluate({"theta": torch.ones(1, dtype=FLOAT64)}, episode)["mse"][0]
    assert mse.sqrt().tolist() == pytest.approx([3, 4 - (1 + 0.7 * 0.6), 4 - (1 + 0.7 * 1.08)], abs=1e-12)


def test_imaml_as_its_experiment_has_it_solves_its_linear_system() -> None:
    """Conv4 with ReLU, whose Hessian is not positive, in float32 on drawn characters: five steps are enough."""
    chosen = OmegaConf.load(ROOT / "conf/experiment/imaml_omniglot.yaml").algorithm
    model = conv4(ways=5, channels=1, image_size=28, filters=16)
    learner = imaml(model=model, **chosen)
    source = glyphs(episode=EpisodeSpec(5, 1, 1), image_size=28, channels=1, rotations=True, seeds=Seeds(0, 1))
    params = learner.init(Generator().manual_seed(0))
    for first in (0, 8):
        result = learner.meta_grad(params, source.episodes("train", torch.arange(first, first + 8)), 1)
        assert result.metrics["cg_residual"] / 8 < 1e-2
        params = {name: params[name] - 0.1 * result.grads[name] / 8 for name in params}


def test_mini_batches_take_the_classes_in_turn() -> None:
    y = torch.tensor([[0, 1, 2, 0, 0, 1, 1, 2, 2]])
    batch_of = mini_batches(Batch(torch.arange(9.0).view(1, 9, 1), y), 4)
    batches = [batch_of(step) for step in range(3)]
    assert [batch.y[0].tolist() for batch in batches] == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert [batch.x.flatten().tolist() for batch in batches] == [[0, 1, 2], [3, 5, 7], [4, 6, 8]]


@pytest.mark.parametrize(("key", "size"), [("inner_batch", 1), ("eval_batch", 1), ("inner_batch", 2)])
def test_reptile_refuses_mini_batches_that_a_batch_norm_cannot_take(key: str, size: int) -> None:
    """The maps of pictures of 8 pixels end with one pixel. Nine samples in mini-batches of two leave one."""
    sizes = {"inner_batch": None, "eval_batch": None} | {key: size}
    learner = reptile(model=conv4(ways=3, channels=1, image_size=8, filters=2), **STEPS, **sizes)
    params = learner.init(Generator().manual_seed(0))
    samples = Batch(torch.rand(1, 3, 1, 8, 8), torch.tensor([[0, 1, 2]]))
    more = Batch(torch.rand(1, 6, 1, 8, 8), torch.tensor([[0, 0, 1, 1, 2, 2]]))
    with pytest.raises(ConfigError, match=f"^algorithm.{key}={size}: .* leaves mini-batches of one .*{key}=null"):
        if size == 1:  # what is checked before a run starts
            learner.adapt(params, samples, 0)
        else:
            learner.meta_grad(params, Episode(samples, more), 1)


ONE_ADAM = {"betas": (0.0, 0.9), "eps": 1e-3}


def carrying(meta_batch: int, **changes: object) -> Algorithm:
    chosen = {"inner_lr": 0.05, "inner_steps": 3, "eval_steps": 2, "inner_batch": None, "eval_batch": None} | changes
    optimizer = inner.adam(beta1=0.0, beta2=0.9, eps=1e-3)
    return reptile(
        model=network(filters=2),
        inner=optimizer,
        inner_state="carried",
        meta_batch=meta_batch,
        **chosen,  # type: ignore[arg-type]
    )


def stepped(learner: Algorithm, params: Params, episodes: list[Episode], rate: float) -> Params:
    """The meta-parameters after a meta-step of the training loop on each episode, by gradient descent."""
    of_optimizer = {"momentum": 0.0, "schedule": "constant", "min_lr": 0, "decay": 0, "decay_every": 1, "warmup": 0}
    trained = new_learner(params, outer_sgd(lr=rate, **of_optimizer).start)  # type: ignore[arg-type]
    for step, episode in enumerate(episodes, start=1):
        now = {name: value.detach() for name, value in trained.params.items()}
        halves = [learner.meta_grad(now, part_of(learner, episode, [i]), step) for i in range(len(episode.query.y))]
        update(trained, dict.__or__(*meta_gradient(mean_of_sums, halves)), rate)
    return {name: value.detach() for name, value in trained.params.items()}


def test_reptile_carries_one_adam_through_the_run_and_into_every_test_task() -> None:
    """One task a step: torch's Adam goes on from task to task, and from the training into each test task."""
    learner, trained = carrying(1), tasks(5)
    start = {name: value.double() for name, value in learner.init(Generator().manual_seed(0)).items()}
    ours = stepped(learner, start, [part_of(learner, trained, [i]) for i in range(5)], rate=0.5)
    plain = {name: value for name, value in start.items() if not name.startswith("state.")}
    theta, phi, adam = written_out.reptile_with_one_adam(
        plain, trained, steps=3, rate=0.5, adam=lambda params: torch.optim.Adam(params, lr=0.05, **ONE_ADAM)
    )
    moments = {f"state.v.{name}": adam.state[value]["exp_avg_sq"] for name, value in phi.items()}
    close(ours, theta | moments | {"state.steps": torch.tensor([15.0], dtype=FLOAT64)}, atol=1e-11)

    evaluated = tasks(2, seed=90)
    losses, before = [], copy.deepcopy(adam.state_dict())
    for sx, sy, qx, qy in written_out.tasks_of(evaluated):
        with torch.no_grad():
            for name, value in phi.items():
                value.copy_(theta[name])
        adam.load_state_dict(copy.deepcopy(before))
        losses += [
            F.cross_entropy(written_out.conv4(phi, qx, qx), qy).item()
            for _ in itertools.chain([None], written_out.conv4_with(phi, adam, sx, sy, 2))
        ]
    assert learner.evaluate(ours, evaluated)["loss"].flatten().tolist() == pytest.approx(losses, abs=1e-11)


def adam_after(done: int, moments: Params) -> Callable[[list[Tensor]], torch.optim.Adam]:
    """Makes torch's Adam as it is after `done` steps, with these second moments of the parameters in their order."""

    def adam(params: list[Tensor]) -> torch.optim.Adam:
        optimizer = torch.optim.Adam(params, lr=0.05, **ONE_ADAM)
        for value, moment in zip(params, moments.values(), strict=True):
            steps = torch.tensor(float(done))
            optimizer.state[value] = {"step": steps, "exp_avg": torch.zeros_like(value), "exp_avg_sq": moment.clone()}
        return optimizer

    return adam


def test_tasks_of_one_step_start_from_the_same_carried_adam_and_add_their_mean() -> None:
    """Three tasks a step, of three inner steps: v ← β⁹ v + (1 − β⁹) / (1 − β³) · mean (u − β³ v), by torch's Adam."""
    learner, episodes = carrying(3), [tasks(3), tasks(3, seed=20)]
    start = {name: value.double() for name, value in learner.init(Generator().manual_seed(0)).items()}
    ours = stepped(learner, start, episodes, rate=0.5)
    theta = {name: value for name, value in start.items() if not name.startswith("state.")}
    moments, done = {name: torch.zeros_like(value) for name, value in theta.items()}, 0
    for episode in episodes:
        ends, added = [], []
        for number in range(3):
            task = part_of(learner, episode, [number])
            end, phi, used = written_out.reptile_with_one_adam(
                theta, task, steps=3, rate=1.0, adam=adam_after(done, moments)
            )
            ends.append(end)
            added.append({k: used.state[value]["exp_avg_sq"] - 0.9**3 * moments[k] for k, value in phi.items()})
        theta = {k: value + 0.5 * (sum(end[k] for end in ends) / 3 - value) for k, value in theta.items()}
        mean = {k: sum(one[k] for one in added) / 3 for k in theta}
        moments = {k: 0.9**9 * v + (1 - 0.9**9) / (1 - 0.9**3) * mean[k] for k, v in moments.items()}
        done += 9
    expected = theta | {f"state.v.{name}": value for name, value in moments.items()}
    close(ours, expected | {"state.steps": torch.tensor([18.0], dtype=FLOAT64)}, atol=1e-11)


def test_a_mini_batch_smaller_than_the_ways_has_no_favourite_labels() -> None:
    """20 ways in batches of 5: every pass has each sample once, in an order of its own; each label is equally often in
    the last batch. In the order of labels it was always the same quarter."""
    x = random(400, 20, 1, seed=1)
    y = torch.arange(20).repeat(400, 1)
    batch_of = mini_batches(Batch(x, y), 5)
    passes = [torch.cat([batch_of(4 * number + place).y for place in range(4)], dim=1) for number in range(2)]
    assert all(torch.equal(labels.sort(dim=1).values, y) for labels in passes)
    assert not (passes[0] == passes[1]).all(dim=1).any() and len(passes[0].unique(dim=0)) == 400
    last = batch_of(7)
    assert torch.equal(last.x, x.gather(1, last.y.unsqueeze(2)))  # sample i has label i
    counts = last.y.flatten().bincount(minlength=20)  # 100 ± 8.7 each
    assert counts.min() > 60 and counts.max() < 140
    alone = mini_batches(Batch(x[7:8], y[7:8]), 5)
    assert torch.equal(alone(7).y[0], last.y[7])


# Inner optimisers

TORCHS = {
    "sgd": (inner.SGD, lambda params: torch.optim.SGD(params, lr=0.1)),
    "momentum": (OPTIMIZERS["momentum"], lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.8)),
    "rmsprop": (OPTIMIZERS["rmsprop"], lambda params: torch.optim.RMSprop(params, lr=0.1, alpha=0.9, eps=1e-3)),
    "adam": (OPTIMIZERS["adam"], lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.9, 0.99), eps=1e-3)),
}


@pytest.mark.parametrize("name", TORCHS)
def test_inner_optimisers_are_torchs(name: str) -> None:
    optimizer, make = TORCHS[name]
    start, centre = random(2, 5, seed=1), random(2, 5, seed=2)

    def loss(x: Tensor) -> Tensor:
        return (x - centre).square().sum(dim=1) + x.cos().sum(dim=1)

    end = last(
        descent(
            lambda params, step: loss(params["x"]),
            {"x": start},
            optimizer=optimizer,
            rate=constant(0.1),
            steps=7,
            order=0,
        )
    )
    x = start.clone().requires_grad_()
    theirs = make([x])
    for _ in range(7):
        theirs.zero_grad()
        loss(x).sum().backward()
        theirs.step()
    torch.testing.assert_close(end["x"], x.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rmsprop", "adam"])
def test_a_parameter_without_a_gradient_stays_and_harms_nothing(name: str) -> None:
    """√v has no derivative at 0; the meta-gradient must still be finite."""
    x = random(1, 3, seed=1).requires_grad_()
    still = torch.ones(1, 3, dtype=FLOAT64, requires_grad=True)

    def loss(params: Params, step: int) -> Tensor:
        return (params["x"].square() + 0 * params["still"]).sum(dim=1)

    adapted = last(
        descent(loss, {"x": x, "still": still}, optimizer=OPTIMIZERS[name], rate=constant(0.1), steps=2, order=2)
    )
    total = adapted["x"].sum() + adapted["still"].sum()
    of_x, of_still = torch.autograd.grad(total, (x, still))
    assert torch.isfinite(of_x).all() and torch.equal(of_still, torch.ones_like(still))
    assert torch.equal(adapted["still"], still)


# Against another library


TORCHOPTS = {
    "sgd": (inner.SGD, "MetaSGD", {}),
    "momentum": (OPTIMIZERS["momentum"], "MetaSGD", {"momentum": 0.8}),
    # Its corrections 1 − βᵗ are float32 even here; with these β they are exact.
    "adam": (inner.adam(beta1=0.5, beta2=0.75, eps=1e-3), "MetaAdam", {"betas": (0.5, 0.75), "eps": 1e-3}),
    "rmsprop": (OPTIMIZERS["rmsprop"], "MetaRMSProp", {"alpha": 0.9, "eps": 1e-3}),
}


class Registered(torch.nn.Module):
    """The network written out, as a module: the library needs a module with parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in params}
        for name, value in params.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(value.clone()))

    def values(self) -> Params:
        return {name: getattr(self, attribute) for name, attribute in self.names.items()}

    def forward(self, x: Tensor) -> Tensor:
        return written_out.conv4(self.values(), x, x)


@pytest.mark.parametrize("name", TORCHOPTS)
def test_ten_meta_steps_of_maml_beside_torchopt(name: str) -> None:
    """Images of 24 pixels. With smaller ones, some weights of a kernel meet only padding; their gradient is zero, and
    torchopt's √v then has the derivative NaN."""
    torchopt = pytest.importorskip("torchopt", reason="torchopt is not installed: pip install torchopt==0.7.3")
    chosen, of_library, options = TORCHOPTS[name]
    steps = {"inner_lr": 0.05, "inner_steps": 2, "eval_steps": 1}
    learner = maml(model=network(size=24, filters=2), inner=chosen, **steps)
    params = {key: value.requires_grad_() for key, value in start_of(learner).items()}
    net = Registered({key: value.detach() for key, value in params.items()})
    ours, theirs = torch.optim.Adam(params.values(), lr=1e-3), torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(10):
        episode = tasks(2, seed=10 * step, size=24)
        result = learner.meta_grad({key: value.detach() for key, value in params.items()}, episode, 1)
        for key, value in params.items():
            value.grad = result.grads[key]
        ours.step()
        theirs.zero_grad()
        optimizer = getattr(torchopt, of_library)(net, lr=0.05, **options)
        states = [torchopt.extract_state_dict(part, by="reference") for part in (net, optimizer)]
        for sx, sy, qx, qy in written_out.tasks_of(episode):
            for _ in range(2):
                optimizer.step(F.cross_entropy(net(sx), sy))
            F.cross_entropy(net(qx), qy).backward()
            for part, state in zip((net, optimizer), states, strict=True):
                torchopt.recover_state_dict(part, state)
        theirs.step()
    close({k: v.detach() for k, v in params.items()}, {k: v.detach() for k, v in net.values().items()}, atol=1e-10)


def test_bad_settings_are_refused() -> None:
    plain = linear_model(3)
    for make, message in (
        (
            lambda: anil(model=plain, **STEPS),
            "model: this algorithm needs a network whose outputs come from one",
        ),
        (lambda: maml_pp(model=plain, **STEPS, **PP), "per_step_norm=True: this model has no batch norm"),
        (lambda: maml_pp(model=network(), **(STEPS | {"inner_steps": 0}), **PP), "inner_steps=0: must be a whole"),
        (lambda: imaml(model=plain, **STEPS, strength=0, cg_steps=1), "strength=0: must be a finite number above 0"),
        (lambda: imaml(model=plain, **STEPS, strength=1, cg_steps=1, spring="once"), "spring='once': must be one of"),
        (lambda: cavia(model=network(), **STEPS, contexts=0), "contexts=0: must be a whole number of at least 1"),
        (lambda: cavia(model=network(), **STEPS, contexts=2, layer=5), "layer=5: this model has 4 batch norms.*=4 or"),
        (lambda: cavia(model=plain, **STEPS, contexts=2), "layer=1: this model has 0 linear layers .*model=conv4"),
        (lambda: meta_curvature(model=plain, **STEPS, first_order=1), "first_order=1: must be true or false"),
        (lambda: inner.adam(beta1=1.0, beta2=0.9, eps=1e-8), "beta1=1.0: must be below 1"),
        (lambda: reptile(model=plain, **STEPS, inner_batch=0, eval_batch=None), "inner_batch=0: must be a whole"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    waves = Batch(random(1, 4, 1, 12, 12, seed=1), random(1, 4, 1, seed=2))
    learner = protonet(model=network())
    with pytest.raises(ValueError, match="this dataset's targets are real numbers; type algorithm=maml"):
        learner.adapt(start_of(learner), waves)(waves.x)
