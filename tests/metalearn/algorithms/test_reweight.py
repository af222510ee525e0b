"""Weights of training examples, learned through a training: by other routes, and as a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.inner import momentum
from metalearn.algorithms.reweight import DROPPED, reweight, seeds_of
from metalearn.errors import ConfigError, Invalid
from metalearn.models.mlp import mlp
from metalearn.nn.network import leaves
from metalearn.runs.metrics import describe, of_wrong_labels, summary
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.noisy_digits import NoisyDigits, noisy_digits
from metalearn.types import EXAMPLES, Algorithm, Batch, Episode, Params
from tests.runs import Start, metrics, params_of, result_of, until

EXAMPLE_COUNT, CLEAN, BATCH, STEPS, RATE = 40, 12, 8, 9, 0.4
DOUBLE = torch.float64


def digits(wrong: float = 0.4, noise: str = "next", seed: int = 0) -> NoisyDigits:
    return noisy_digits(examples=EXAMPLE_COUNT, clean=CLEAN, queries=20, wrong=wrong, noise=noise, seeds=Seeds(seed, 5))


def learner(**settings: Any) -> Algorithm:
    usual = {"examples": EXAMPLE_COUNT, "inner_lr": RATE, "inner_steps": STEPS, "batch": BATCH}
    return reweight(model=mlp(inputs=64, outputs=10, hidden=[6], activation="tanh"), **usual | settings)


def tasks(split: str = "train", count: int = 2) -> Episode:
    support, query = digits().episodes(split, torch.arange(count))
    return Episode(Batch(support.x.double(), support.y), Batch(query.x.double(), query.y))


def some_weights() -> Params:
    return {EXAMPLES: torch.randn(EXAMPLE_COUNT, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)}


@pytest.mark.parametrize("memory", ["points", "log", "all"])
@pytest.mark.parametrize("settings", [{}, {"inner": momentum(momentum=0.8), "inner_lr": 0.1}])
def test_the_meta_gradient_is_a_finite_difference(memory: str, settings: dict[str, Any]) -> None:
    algorithm, params, episode = learner(memory=memory, **settings), some_weights(), tasks()
    direction = torch.randn(EXAMPLE_COUNT, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    result = algorithm.meta_grad(params, episode, 1)

    def along(distance: float) -> float:
        assert algorithm.loss is not None
        return float(algorithm.loss(leaves({EXAMPLES: params[EXAMPLES] + distance * direction}), episode, 1).detach())

    h = 1e-4
    expected = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
    assert float((result.grads[EXAMPLES] * direction).sum()) == pytest.approx(expected, rel=1e-6)
    assert result.count == 2 and result.metrics["loss"].item() == pytest.approx(along(0))


def by_hand(task: Batch, weights: Tensor, steps: int = STEPS, first: int = 0) -> list[Tensor]:
    """The layers after a training on examples of a task, from the `first` on, one step after the other."""
    (seed,) = seeds_of(Batch(task.x[None], task.y[None]))
    (x, y), n = (values[first:] for values in task), len(weights)
    drawn = mlp(inputs=64, outputs=10, hidden=[6]).init(torch.Generator().manual_seed(seed))
    layers = [drawn[f"layer{layer}.{part}"].double() for layer in (1, 2) for part in ("weight", "bias")]
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(n) for _ in range(steps * BATCH // n + 1)])
    for step in range(steps):
        at = order[step * BATCH : (step + 1) * BATCH]
        layers = [layer.requires_grad_() for layer in layers]
        losses = F.cross_entropy(outputs(layers, x[at]), y[at], reduction="none")
        total = (weights[at] * losses).sum() / weights[at].sum() if weights[at].any() else 0 * losses.sum()
        slopes = torch.autograd.grad(total, layers)
        layers = [(layer - RATE * slope).detach() for layer, slope in zip(layers, slopes, strict=True)]
    return layers


def outputs(layers: list[Tensor], x: Tensor) -> Tensor:
    first, bias, second, last = layers
    return torch.tanh(x.flatten(1) @ first.T + bias) @ second.T + last


def test_evaluation_trains_as_by_hand_with_all_weights() -> None:
    params, (support, query) = some_weights(), tasks("test")
    figures = learner().evaluate(params, Episode(support, query))
    assert {figure.shape for figure in figures.values()} == {(2, 1)}
    for number in range(2):
        task, asked = (Batch(batch.x[number], batch.y[number]) for batch in (support, query))
        clean = Batch(task.x[EXAMPLE_COUNT:], task.y[EXAMPLE_COUNT:])

        def loss(layers: list[Tensor], samples: Batch) -> float:
            return float(F.cross_entropy(outputs(layers, samples.x), samples.y))

        equal = torch.ones(EXAMPLE_COUNT, dtype=DOUBLE)
        ends = [by_hand(task, equal)]
        for steps in (3, STEPS):
            answers = outputs(by_hand(task, equal, steps), task.x[:EXAMPLE_COUNT])
            losses = F.cross_entropy(answers, task.y[:EXAMPLE_COUNT], reduction="none")
            ends += [by_hand(task, (losses <= losses.quantile(1 - part)).double()) for part in DROPPED]
        best = min(ends, key=lambda layers: loss(layers, clean))
        expected = {
            "loss": by_hand(task, params[EXAMPLES].sigmoid()), "equal_loss": ends[0], "threshold_loss": best,
            "clean_loss": by_hand(task, equal[:CLEAN], first=EXAMPLE_COUNT),
        }  # fmt: skip
        for name, layers in expected.items():
            assert float(figures[name][number]) == pytest.approx(loss(layers, asked)), name


def test_a_predictor_is_that_of_the_learned_weights() -> None:
    params, (support, query) = some_weights(), tasks("test", 1)
    answers = learner().adapt(params, support)(query.x)
    layers = by_hand(Batch(support.x[0], support.y[0]), params[EXAMPLES].sigmoid())
    torch.testing.assert_close(answers[0], outputs(layers, query.x[0]))


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"inner_steps": 0}, "inner_steps"), ({"batch": 0}, "batch"), ({"examples": 1.5}, "examples"),
     ({"inner_lr": -1}, "inner_lr"), ({"memory": "none"}, "memory")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(Invalid) as raised:
        learner(**settings)
    assert raised.value.text("algorithm").startswith(f"algorithm.{key}=")


def test_a_support_set_without_clean_examples_is_refused() -> None:
    algorithm = learner(examples=EXAMPLE_COUNT + CLEAN)
    with pytest.raises(ConfigError, match=r"algorithm.examples=52: a support set has 52 .* type dataset=noisy_digits"):
        algorithm.evaluate(algorithm.init(torch.Generator()), tasks("test"))


# The digits


@pytest.mark.parametrize("noise", ["next", "any"])
def test_the_share_of_wrong_labels_is_that_asked_for(noise: str) -> None:
    (noisy, _), (true, _) = (digits(wrong, noise).episodes("val", torch.tensor([3])) for wrong in (0.4, 0.0))
    assert noisy.x.equal(true.x) and noisy.x.shape == (1, EXAMPLE_COUNT + CLEAN, 1, 8, 8)
    shift = (noisy.y - true.y)[0] % 10
    wrong = digits(0.4, noise).wrong_labels()
    assert (shift[:EXAMPLE_COUNT] > 0).equal(wrong) and int(wrong.sum()) == 16 and not shift[EXAMPLE_COUNT:].any()
    assert (set(shift[shift > 0].tolist()) == {1}) == (noise == "next")


def test_a_replicate_follows_from_its_number() -> None:
    three, alone = (digits().episodes("train", torch.tensor(numbers)) for numbers in ([4, 2, 7], [2]))
    assert three.support.x[1].equal(alone.support.x[0]) and three.query.y[1].equal(alone.query.y[0])
    assert three.support.x[0, :EXAMPLE_COUNT].equal(alone.support.x[0, :EXAMPLE_COUNT])
    assert len(set(seeds_of(three.support))) == 3 and seeds_of(alone.support) == seeds_of(three.support)[1:2]
    assert not digits(seed=1).episodes("train", torch.tensor([2])).support.x.equal(alone.support.x)


def test_no_picture_is_in_two_parts() -> None:
    pictures = []
    for split in ("train", "val", "test"):
        support, query = digits().episodes(split, torch.tensor([0]))
        pictures.append(query.x[0].flatten(1))
        known = support.x[0, :EXAMPLE_COUNT].flatten(1)
    parts = [known, *pictures]
    assert [len(part) for part in parts] == [EXAMPLE_COUNT, CLEAN, 20, 1797 - EXAMPLE_COUNT - CLEAN - 20]
    rows = {tuple(row.tolist()) for part in parts for row in part}
    assert len(rows) == 1797


# Figures, and runs


def test_figures_beside_the_loss_have_intervals() -> None:
    values = {name: torch.rand(5, 1) for name in ("loss", "accuracy", "equal_loss", "equal_accuracy")}
    figures = summary(values)
    for name in ("loss", "equal_loss", "equal_accuracy"):
        assert figures[name] == pytest.approx(values[name].mean().item())
        assert figures[f"ci95_{name}"] == pytest.approx(1.96 * values[name].std().item() / 5**0.5)
    assert f"equal_loss {figures['equal_loss']:.4f} ±" in describe(figures)
    assert "ci95_loss" not in summary({name: values[name] for name in ("loss", "accuracy")})


def test_wrong_labels_of_low_weights_are_counted_in_pairs() -> None:
    source = digits()
    wrong, weights = source.wrong_labels(), some_weights()[EXAMPLES].round()
    pairs = [(a > b) + (a == b) / 2 for a in weights[~wrong].tolist() for b in weights[wrong].tolist()]
    assert of_wrong_labels({EXAMPLES: weights}, source)["wrong_auc"] == pytest.approx(sum(pairs) / len(pairs))
    assert of_wrong_labels({EXAMPLES: weights}, digits(wrong=0)) == of_wrong_labels({}, source) == {}


TINY = (
    "experiment=reweight", "dataset.examples=40", "dataset.clean=12", "algorithm.inner_steps=15", "algorithm.batch=8",
    "trainer.steps=6", "trainer.val_every=3", "trainer.test_tasks=2", "logger=[]", "logger.plots=false",
    "logger.report=false", "run=one",
)  # fmt: skip
RUN = Path("outputs/reweight/one")


@pytest.mark.thorough
def test_killed_runs_and_two_workers_give_the_bits_of_one(start: Start, tmp_path: Path) -> None:
    whole = start(*TINY).wait()
    assert whole.code == 0, whole.text
    run_dir = tmp_path / RUN
    expected, test = params_of(run_dir), result_of(run_dir)["test"]
    assert {"equal_loss", "ci95_equal_loss", "threshold_loss", "clean_loss", "wrong_auc"} <= test.keys()
    run_dir.rename(tmp_path / "whole")
    killed = start(*TINY)
    until(lambda: len(metrics(run_dir)) >= 3, "step 3")
    killed.kill()
    resumed = start(*TINY, "workers=2").wait()
    assert resumed.code == 0 and "going on after step" in resumed.text, resumed.text
    assert params_of(run_dir) == expected and json.dumps(result_of(run_dir)["test"]) == json.dumps(test)
