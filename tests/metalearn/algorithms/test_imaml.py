"""iMAML: conjugate gradient, the implicit gradient, and the spring that pulls to the start. It is in the property table
(test_algorithms.py), too."""

from functools import partial

import pytest
import torch
from torch import Generator

from metalearn.algorithms.common.arithmetic import conjugate_gradient
from metalearn.algorithms.imaml import imaml
from metalearn.algorithms.maml import maml
from metalearn.algorithms.scratch import scratch
from metalearn.config.options import shipped
from metalearn.models.conv4 import conv4
from metalearn.models.mlp import mlp
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.glyphs import glyphs
from metalearn.types import Batch, Episode, Params
from tests.metalearn.learners import FLOAT64, STEPS, close, linear_model, network, random, start_of, tasks


def test_conjugate_gradient_solves_and_gives_its_residual() -> None:
    """Three tasks: a system of full rank, the identity, and a right side of zero."""
    root = random(5, 5, seed=1)
    matrices = torch.stack([root @ root.T + torch.eye(5, dtype=FLOAT64), torch.eye(5, dtype=FLOAT64), root @ root.T])
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


def test_conjugate_gradient_stops_at_an_indefinite_system() -> None:
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


def test_an_indefinite_task_gives_first_order_maml() -> None:
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
def test_imaml_has_another_strength_in_the_test(spring: str) -> None:
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


@pytest.mark.parametrize("spring", ["every_step", "after"])
def test_a_parameter_may_be_a_single_number(spring: str) -> None:
    """Such as a temperature that is learned; it has no axis beside that of the tasks."""
    vector = linear_model(3)
    alone = vector._replace(
        init=lambda generator: {"scale": torch.tensor(2.0, dtype=FLOAT64)},
        apply=lambda params, x, known=None: x.sum(dim=2, keepdim=True) * params["scale"].view(-1, 1, 1),
    )
    one = vector._replace(init=lambda generator: {"scale": torch.tensor([2.0], dtype=FLOAT64)}, apply=alone.apply)
    episode = Episode(*(Batch(random(2, 4, 3, seed=seed), random(2, 4, 1, seed=seed + 9)) for seed in (1, 2)))
    results = []
    for model in (alone, one):
        learner = imaml(
            model=model, inner_lr=0.01, inner_steps=2, eval_steps=2, cg_steps=2, strength=1.0, spring=spring
        )
        params = learner.init(Generator())
        grads = learner.meta_grad(params, episode, 0).grads
        results.append([grads["scale"].flatten(), learner.evaluate(params, episode)["loss"]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    chosen = shipped("experiment")["imaml_omniglot"].algorithm
    model = conv4(ways=5, channels=1, image_size=28, filters=16)
    learner = imaml(model=model, **chosen)
    source = glyphs(episode=EpisodeSpec(5, 1, 1), image_size=28, channels=1, rotations=True, seeds=Seeds(0, 1))
    params = learner.init(Generator().manual_seed(0))
    for first in (0, 8):
        result = learner.meta_grad(params, source.episodes("train", torch.arange(first, first + 8)), 1)
        assert result.metrics["cg_residual"] / 8 < 1e-2
        params = {name: params[name] - 0.1 * result.grads[name] / 8 for name in params}
