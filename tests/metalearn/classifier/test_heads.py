"""Heads and cross-validation on numbers: closed forms, hand counts, and data of which the answer is known."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.classifier.heads import HEADS, centred, class_means
from metalearn.classifier.validation import (
    LOST,
    calibration_error,
    cross_validated,
    folds_of,
    learning_curve,
    report_of,
    sharpness_of,
    strangers,
    with_twice,
)


def clusters(classes: int, pictures: int, width: int = 40, spread: float = 0.3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features around one point a class, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(classes, width, generator=generator)
    y = torch.arange(classes).repeat_interleave(pictures)
    return points[y] + spread * torch.randn(len(y), width, generator=generator), y


def test_ridge_solves_the_normal_equations() -> None:
    features, y = clusters(4, 6)
    z = centred(features, features.double().mean(dim=0))
    state = HEADS["ridge 0.1"].fit(z, y, 4)
    rows = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
    w = torch.cat([state["weights"].T, state["biases"][None]])
    left = (rows.T @ rows + 0.1 * torch.eye(41, dtype=z.dtype)) @ w
    torch.testing.assert_close(left, rows.T @ F.one_hot(y, 4).double(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("width", [5, 40], ids=["more pictures than features", "fewer"])
def test_logistic_regression_is_where_the_gradient_is_zero(width: int) -> None:
    features, y = clusters(3, 8, width, spread=2.0)
    z = centred(features, features.double().mean(dim=0))
    state = HEADS["logistic 0.001"].fit(z, y, 3)
    weights, biases = (state[name].clone().requires_grad_() for name in ("weights", "biases"))
    loss = F.cross_entropy(z @ weights.T + biases, y) + 0.0005 * weights.square().sum()
    for gradient in torch.autograd.grad(loss, [weights, biases]):
        assert gradient.abs().max() < 1e-5


def test_the_nearest_pictures_vote_by_their_similarity() -> None:
    z = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]).double(), dim=1)
    rule = HEADS["nearest pictures"]
    score = rule.score(rule.fit(z, torch.tensor([0, 1, 1]), 2), torch.tensor([[1.0, 0.0]]).double())
    near = math.exp(10 * (math.sqrt(0.5) - 1)) + math.exp(-10)
    assert score.exp()[0].tolist() == pytest.approx([1.0, near])


def test_class_means_are_means() -> None:
    z = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 0.0]]).double()
    assert class_means(z, torch.tensor([0, 1, 0]), 2).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_folds_spread_every_class_and_are_equally_large() -> None:
    y = torch.tensor([0] * 8 + [1] * 3 + [2] * 1 + [3] * 9)
    fold = folds_of(y, 4)
    assert (fold[y == 2] == -1).all() and (fold[y != 2] >= 0).all()
    for label in (0, 1, 3):
        counts = torch.bincount(fold[y == label], minlength=5)
        assert counts.max() - counts.min() <= 1
    sizes = torch.bincount(fold[fold >= 0], minlength=5)
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("head", HEADS)
def test_no_head_scores_a_picture_that_it_has_learned_from(head: str) -> None:
    """Labels by chance: whoever sees a picture's label is right, and whoever does not is right by chance alone."""
    features = torch.randn(120, 300, generator=torch.Generator().manual_seed(1))
    y = torch.randint(4, (120,), generator=torch.Generator().manual_seed(2))
    z = centred(features, features.double().mean(dim=0))
    assert (HEADS[head].score(HEADS[head].fit(z, y, 4), z).argmax(dim=1) == y).double().mean() > 0.6
    found, _ = cross_validated(features, y, 4, [head], folds_of(y, 4))
    assert (found[head].argmax(dim=1) == y).double().mean() < 0.4


def test_the_sharpness_is_that_of_the_highest_likelihood() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, 3, generator=generator).double()
    y = torch.multinomial(torch.softmax(scores * 2.5, dim=1), 1, generator=generator).flatten()
    found = sharpness_of(scores, y)
    grid = [1.5 + 0.01 * i for i in range(200)]
    smoothed = F.one_hot(y, 3) * (1 - 1.5 / 402) + 0.5 / 402  # a wrong label of 402, of one or the other class

    def loss(sharpness: float) -> float:
        return -(smoothed * torch.log_softmax(scores * sharpness, dim=1)).sum(dim=1).mean().item()

    assert found == pytest.approx(min(grid, key=loss), abs=0.01)
    assert found == pytest.approx(2.5, rel=0.2)


def test_answers_that_are_all_right_are_not_certain() -> None:
    scores, y = torch.eye(12).double().repeat(8, 1), torch.arange(12).repeat(8)
    found = sharpness_of(scores, y)
    # exp(s) / (exp(s) + 11) is 97 / 98, by the rule of succession.
    assert found == pytest.approx(math.log(97 * 11), rel=1e-4)


def test_the_calibration_error_of_a_hand_count() -> None:
    """Two pictures at 95% of which one is right, and two at 65% that are both right."""
    probabilities = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.65, 0.35], [0.65, 0.35]]).double()
    error = calibration_error(probabilities, torch.tensor([0, 1, 0, 0]))
    assert error == pytest.approx((2 * (0.95 - 0.5) + 2 * (1 - 0.65)) / 4)


def test_pictures_of_no_class_are_told_from_others() -> None:
    features, y = clusters(6, 8)
    found = strangers(features, y, 6, cross_validated(features, y, 6, [], folds_of(y, 6))[1])
    assert found is not None and found[1:] == (1.0, 0.0)
    assert strangers(features[:16], y[:16], 2, torch.ones(16)) is None
    near = torch.rand(48, generator=torch.Generator().manual_seed(0)).double()  # some below the threshold
    mixed = strangers(features, y, 6, near)
    assert mixed is not None and 0 < mixed[2] == (near < mixed[0]).double().mean() <= LOST


def test_more_pictures_help() -> None:
    features, y = clusters(5, 9, width=10, spread=1.2)
    curve = learning_curve(features, y, 5, "class means")
    assert list(curve) == [1, 2, 4, 8] and curve[1] < curve[2] < curve[8]


def test_the_errors_of_twice_the_pictures_go_on_along_the_curve() -> None:
    curve = {shots: 1 - 0.4 / shots**0.5 for shots in (1, 2, 4)}
    assert with_twice(curve, 0.9) == pytest.approx(1 - 0.1 / 2**0.5)
    assert with_twice({1: 0.5, 2: 0.4}, 0.9) == pytest.approx(0.9)  # a curve that falls promises nothing
    assert with_twice({1: 0.9, 2: 1.0, 4: 1.0}, 1.0) is None


def test_a_class_with_one_picture_is_learned_and_not_asked_for() -> None:
    features, y = clusters(3, 4)
    keep = torch.tensor([i for i in range(12) if not 5 <= i < 8])
    names = [str(i) for i in keep.tolist()]
    report = report_of(features[keep], y[keep], classes=["a", "b", "c"], names=names, heads=list(HEADS))
    assert report["pictures"] == 8 and report["learned_from"] == 9 and set(report["by_class"]) == {"a", "c"}
    one_each = {"classes": ["a", "b", "c"], "names": ["1", "2", "3"], "heads": ["ridge 1"]}
    single = report_of(features[::4], torch.arange(3), **one_each)
    assert single["accuracy"] is None and single["head"] == "ridge 1"


def test_the_first_of_equal_heads_is_taken() -> None:
    features, y = clusters(3, 5, spread=0.01)
    report = report_of(features, y, classes=["a", "b", "c"], names=[""] * 15, heads=list(HEADS))
    assert report["accuracy"] == 1.0 and report["head"] == "class means" and report["wrong"] == []
    assert report["confusion"] == [[5, 0, 0], [0, 5, 0], [0, 0, 5]]
