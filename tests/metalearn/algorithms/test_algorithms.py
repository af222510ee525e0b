"""The property table, which every algorithm passes, and a comparison of each algorithm with its paper."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Generator, Tensor, nn

from metalearn.algorithms.anil import anil
from metalearn.algorithms.boil import boil
from metalearn.algorithms.cavia import cavia
from metalearn.algorithms.common import inner
from metalearn.algorithms.common.inner import descent, last
from metalearn.algorithms.deepbdc import deepbdc
from metalearn.algorithms.imaml import imaml
from metalearn.algorithms.maml import maml
from metalearn.algorithms.maml_pp import maml_pp, step_weights
from metalearn.algorithms.matching import log_sums, matching
from metalearn.algorithms.meta_curvature import meta_curvature
from metalearn.algorithms.meta_sgd import meta_sgd
from metalearn.algorithms.protonet import protonet
from metalearn.algorithms.r2d2 import ridge
from metalearn.algorithms.reptile import reptile
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
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
    close,
    evaluation_episode,
    linear_model,
    network,
    part_of,
    random,
    start_of,
    tasks,
    training_episode,
)
from tests.metalearn.learners_program import OWN
from tests.runs import ROOT, slow

every_learner = pytest.mark.parametrize("name", LEARNERS)


def copied(values: Params) -> Params:
    return {name: value.clone() for name, value in values.items()}


# What holds for all


def test_the_table_has_every_algorithm() -> None:
    """Each file in the folder of algorithms is in the table, and a yaml names it. Only pfn, reading and reweight, which
    take tables, documents and weighted examples alone, have tests of their own."""
    alone = ("pfn", "reading", "reweight")
    files = {path.stem for path in (ROOT / "metalearn/algorithms").glob("*.py")} - {"__init__", *alone}
    yamls = {path.stem: OmegaConf.load(path)._target_ for path in (ROOT / "conf/algorithm").glob("*.yaml")}
    for name in alone:
        assert yamls.pop(name) == f"metalearn.algorithms.{name}.{name}"
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
    "deepbdc",
    "feat",
    "matching",
    "r2d2",
    "metaoptnet",
    "in_context",
    "simpleshot",
    "simpleshot_centred",
    "supervised",
)


@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "oml"])
def test_every_inner_step_is_evaluated(name: str) -> None:
    """Column i of an evaluation has the values of the predictor after i inner steps; those of OML are by class."""
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
    assert learner.transductive == name.startswith(("tim", "bd_cspn", "laplacian_shot"))


@pytest.mark.thorough
@pytest.mark.parametrize("every", [pytest.param(1, marks=slow), 4])
def test_two_workers_give_the_bits_of_one(every: int) -> None:
    """By remote calls, for every algorithm: gradients, metrics and the values of test tasks."""
    results = run_ranks([str(ROOT / "tests/metalearn/learners_program.py"), str(every)], 2)
    assert all(code == 0 for code, _ in results), results
    reported = [line for line in results[0][1].splitlines() if line.endswith(" ok")]
    own = [f"{name}, {how}" for name in OWN for how in ("rpc", "rpc_autograd")]
    assert reported == [f"{name} ok" for name in (*[*LEARNERS][::every], *own)]


# Each against its paper

REFERENCES: dict[str, Callable[[Params, Episode], Params]] = {
    "maml": written_out.gradient(written_out.maml(lr=0.3, steps=2)),
    "fomaml": written_out.gradient(written_out.maml(lr=0.3, steps=2, order=1)),
    "anil": written_out.gradient(written_out.maml(lr=0.3, steps=2, adapts="head")),
    "boil": written_out.gradient(written_out.maml(lr=0.3, steps=2, adapts="body")),
    "protomaml": written_out.gradient(written_out.protomaml(lr=0.05, steps=2)),
    "meta_sgd": written_out.gradient(written_out.meta_sgd(steps=2)),
    "maml_pp": written_out.gradient(written_out.maml_pp(steps=2, weights=(0.0, 1.0))),
    "cavia": written_out.gradient(written_out.cavia(lr=0.3, steps=2, norm=2)),
    "meta_curvature": written_out.gradient(written_out.meta_curvature(lr=0.3, steps=2)),
    "protonet": written_out.gradient(written_out.protonet),
    "deepbdc": written_out.gradient(written_out.deepbdc(channels=4)),
    "feat": written_out.gradient(written_out.feat(temperature=2.0)),
    "matching": written_out.gradient(written_out.matching(scale=2.0)),
    "r2d2": written_out.gradient(written_out.r2d2),
    "in_context": written_out.gradient(written_out.in_context(heads=2, layers=2)),
    "reptile": written_out.reptile(lr=0.3, steps=2, size=3),
    "imaml": written_out.imaml(lr=0.1, steps=2, strength=5.0),
    "imaml_damped": written_out.imaml(lr=0.1, steps=2, strength=2.0, damping=1.0, cg_strength=12.0),
    "imaml_after": written_out.imaml(lr=0.1, steps=2, strength=3.0, damping=1.0, cg_strength=12.0, spring="after"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow if name in ("imaml_damped", "imaml_after") else ()) for name in REFERENCES]
)
def test_ten_meta_steps_beside_the_formulas_written_out(name: str) -> None:
    """Ten steps of Adam on the same episodes, in float64: the parameters stay together."""
    learner = LEARNERS[name](network(filters=8 if name == "deepbdc" else 2))  # few enough for the whole Hessian
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


@pytest.mark.parametrize("make", [maml, anil, boil, meta_sgd])
def test_evaluations_have_a_rate_of_their_own(make: Callable[..., Algorithm]) -> None:
    """`eval_lr_factor` changes validation, test and predictors as another rate would, and leaves training as it is."""
    plain, slower, slow = (
        make(model=network(), **STEPS | {"inner_lr": rate}, eval_lr_factor=factor)
        for rate, factor in ((0.3, 1.0), (0.3, 0.25), (0.075, 1.0))
    )
    params = start_of(plain)
    quarter = params | {name: 0.25 * rate for name, rate in params.items() if name.startswith("inner_lr.")}
    grads = [learner.meta_grad(params, training_episode(plain, 2), 1).grads for learner in (plain, slower)]
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in params)
    episode = evaluation_episode(plain, 1)
    values, expected = slower.evaluate(params, episode), slow.evaluate(quarter, episode)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-14)
    logits, wanted = (
        learner.adapt(given, episode.support)(episode.query.x) for learner, given in ((slower, params), (slow, quarter))
    )
    torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(values["loss"], plain.evaluate(params, episode)["loss"])
    with pytest.raises(ValueError, match="eval_lr_factor=0"):
        make(model=network(), **STEPS, eval_lr_factor=0)


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


@pytest.mark.parametrize(
    "name",
    ["anil", "cavia", "deepbdc", "feat", "matching", "meta_curvature", "metaoptnet", "protomaml", "protonet", "r2d2"],
)
@pytest.mark.parametrize("transductive", [True, False])
def test_the_compiled_network_gives_what_its_layers_give(name: str, transductive: bool) -> None:
    model, episode = network(transductive=transductive), tasks(3)
    whole, by_layers = (LEARNERS[name](one) for one in (model, model._replace(network=None, body=None)))
    params = start_of(whole)
    close(whole.meta_grad(params, episode, 1).grads, by_layers.meta_grad(params, episode, 1).grads, atol=1e-12)


def test_protomaml_starts_as_a_prototypical_network() -> None:
    """Before the first inner step, the probabilities are those by squared distances to the class means."""
    proto, maml = (LEARNERS[name](network()) for name in ("protonet", "protomaml"))
    params, episode = start_of(proto), tasks(1)
    assert params.keys() == start_of(maml).keys()
    by_distance, by_head = (
        learner.adapt(params, episode.support, steps)(episode.query.x).softmax(dim=2)
        for learner, steps in ((proto, None), (maml, 0))
    )
    torch.testing.assert_close(by_head, by_distance, rtol=0, atol=1e-12)
    after = maml.adapt(params, episode.support)(episode.query.x).softmax(dim=2)
    assert (after - by_head).abs().max() > 1e-3


def test_deepbdc_of_one_shot_compares_by_inner_products() -> None:
    """Beside the formula written out, of two pictures; the support set has one sample of each class."""
    learner, covariance = LEARNERS["deepbdc"](network()), written_out.brownian_covariance
    params, (support, query) = start_of(learner), tasks(1)
    support = Batch(support.x[:, ::2], support.y[:, ::2])
    sx, qx = (
        torch.stack([covariance(one, params["bdc.log_scale"].exp(), 4) for one in features])
        for features in (written_out.features(params, x[0], x[0], F.softplus) for x in (support.x, query.x))
    )
    torch.testing.assert_close(learner.adapt(params, support)(query.x)[0], qx @ sx.T, rtol=0, atol=1e-12)


def test_deepbdc_refuses_features_that_are_no_maps() -> None:
    with pytest.raises(ValueError, match=r"channels=None: 8 features are not the pixels.*model\.downsample=pool"):
        deepbdc(model=network(), channels=None)
    model = conv4(ways=5, channels=1, image_size=32, filters=8, downsample="pool")
    assert deepbdc(model=model, channels=None).init(Generator())["bdc.log_scale"].item() == pytest.approx(
        math.log(1 / 8)
    )


def test_matching_learns_from_a_class_that_is_far_away() -> None:
    """The probability of a query's own class is below the smallest float."""
    scale = 1e6
    learner = matching(model=network(), scale=scale)
    params, episode = start_of(learner), tasks(1)

    def loss(params: Params) -> Tensor:
        ((sx, sy, qx, qy),) = written_out.tasks_of(episode)
        support, queries = (written_out.features(params, x, x, F.softplus) for x in (sx, qx))
        similar = scale * torch.stack([F.cosine_similarity(query, support, dim=1) for query in queries])
        of_own_class = similar.masked_fill(qy.unsqueeze(1) != sy, -math.inf).logsumexp(dim=1)
        return (similar.logsumexp(dim=1) - of_own_class).mean()

    expected, value = torch.func.grad_and_value(loss)(params)
    assert value > -math.log(torch.finfo(FLOAT64).tiny)
    result = learner.meta_grad(params, episode, 1)
    assert result.metrics["loss"].item() == pytest.approx(value.item(), rel=1e-9)
    close(result.grads, expected, atol=1e-9 * scale)
    assert any(grad.abs().max() > 1 for grad in result.grads.values())


def test_matching_gives_a_class_without_a_sample_the_least() -> None:
    """Its loss is finite, also that of several queries."""
    attention = torch.tensor([[[-1.0, -0.5, -900.0]] * 2]).log_softmax(dim=2)
    sums = log_sums(attention, Batch(torch.zeros(1, 3), torch.tensor([[0, 0, 2]])))
    assert sums[0, 0].argsort().tolist() == [1, 2, 0] and F.cross_entropy(sums[0], torch.tensor([1, 1])).isfinite()


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


@pytest.mark.parametrize("name", ["finetune", "finetune_whole"])
def test_finetune_is_a_classifier_by_torch(name: str) -> None:
    """The losses after each step of torch's SGD on a task, from a head of zeros."""
    learner = LEARNERS[name](network())
    params, episode, losses = start_of(learner), tasks(2), []
    for sx, sy, qx, qy in written_out.tasks_of(episode):
        body = {key: value.clone().requires_grad_() for key, value in params.items() if not key.startswith("head")}
        head = nn.Linear(8, WAYS, dtype=FLOAT64)
        nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)

        def loss(x: Tensor, y: Tensor, body: Params = body, head: nn.Linear = head) -> Tensor:
            return F.cross_entropy(head(written_out.features(body, x, x, F.softplus)), y)

        trained = [*head.parameters(), *(body.values() if name == "finetune_whole" else ())]
        optimizer = torch.optim.SGD(trained, lr=0.3)
        for _ in range(4):
            losses.append(loss(qx, qy).item())
            optimizer.zero_grad()
            loss(sx, sy).backward()
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
@pytest.mark.parametrize(("samples", "features", "rank"), [(100, 20, 20), (10, 65, 10), (3000, 10, 2)])
def test_ridge_regression_keeps_its_digits_in_float32(samples: int, features: int, rank: int, strength: float) -> None:
    """Predictions and the derivative by λ beside numpy: more samples than features, fewer, and a singular system."""
    x = (random(4, samples, rank, seed=1) @ random(4, rank, features, seed=2)).float()
    y, given = random(4, samples, 5, seed=3).float(), torch.tensor([strength], requires_grad=True)
    predicted = x @ ridge(x, y, given)
    (derivative,) = torch.autograd.grad(predicted.square().sum(), given)
    expected, slope = np.empty((4, samples, 5)), 0.0
    for task in range(4):
        a, b = x[task].double().numpy(), y[task].double().numpy()
        inverse = np.linalg.inv(a.T @ a + strength * np.eye(features))
        expected[task] = a @ inverse @ a.T @ b
        slope -= 2 * np.sum(expected[task] * (a @ inverse @ inverse @ a.T @ b))
    np.testing.assert_allclose(predicted.detach().numpy(), expected, rtol=0, atol=1.5e-5)
    if rank == min(samples, features):  # numpy's inverse of a singular system has too few digits for this
        assert derivative.item() == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("strength", [1e-4, 1e-6])
def test_a_small_strength_counts_beside_a_large_sample(strength: float) -> None:
    """X = diag(30, 0.03), Y = I: the predictions are x² / (x² + λ)."""
    squares = torch.tensor([900.0, 0.0009])
    x, y = squares.sqrt().diag().unsqueeze(0), torch.eye(2).unsqueeze(0)
    given = torch.tensor([strength], requires_grad=True)
    predicted = (x @ ridge(x, y, given))[0].diagonal()
    torch.testing.assert_close(predicted, squares / (squares + strength), rtol=1e-5, atol=0)
    derivative = -(squares / (squares + strength).square()).sum()
    torch.testing.assert_close(torch.autograd.grad(predicted.sum(), given)[0], derivative.view(1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("strength", [1e-4, 1e-6, 0.0])
def test_equal_support_pictures_and_a_tiny_strength_are_solved(strength: float) -> None:
    """Twice the same picture is one picture of twice the weight, whose label is the mean of both (without λ, both have
    the same: rounding decides otherwise). A task beside it has the bits that it has alone."""
    one, y, others = (random(2, 3, width, seed=width).float() for width in (65, 5, 6))
    others *= strength > 0
    x = torch.cat([one, one], dim=1)
    x[1, 3:] = random(3, 65, seed=9).float()
    x.requires_grad_()
    labels = torch.cat([y + others[..., :5], y - others[..., :5]], dim=1)
    weights = ridge(x, labels, torch.tensor([strength]))
    torch.testing.assert_close(one[0] @ weights[0], y[0], rtol=0, atol=1e-5)
    assert torch.isfinite(torch.autograd.grad(weights.square().sum(), x)[0]).all()
    assert torch.equal(weights[1:], ridge(x[1:], labels[1:], torch.tensor([strength])))


def test_a_feature_that_is_zero_everywhere_has_no_weight() -> None:
    x = torch.stack([torch.arange(1.0, 4.0), torch.zeros(3)], dim=1).unsqueeze(0)
    weights = ridge(x, torch.ones(1, 3, 1), torch.zeros(1))
    torch.testing.assert_close(weights, torch.tensor([[[6 / 14], [0.0]]]))


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
            rate=0.1,
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

    adapted = last(descent(loss, {"x": x, "still": still}, optimizer=OPTIMIZERS[name], rate=0.1, steps=2, order=2))
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
