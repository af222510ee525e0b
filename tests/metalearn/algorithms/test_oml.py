"""OML: a stream by hand, step by step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.losses import cross_entropy, measured_by
from metalearn.algorithms.oml import SPEED, oml, streamed
from metalearn.errors import ConfigError
from metalearn.nn.surroundings import surrounded
from metalearn.types import Batch, Episode
from tests.metalearn.learners import FLOAT64, WAYS, close, network, random, start_of, tasks


def by_hand(features: Tensor, y: Tensor, rate: float) -> list[Tensor]:
    """The classifier before a stream [n, d] with labels [n], and after each sample, by torch's optimiser."""
    rows = torch.zeros(WAYS, features.shape[1], dtype=FLOAT64, requires_grad=True)
    optimizer, along = torch.optim.SGD([rows], lr=rate), [rows.detach().clone()]
    for f, label in zip(features, y, strict=True):
        optimizer.zero_grad()
        F.cross_entropy((rows @ f)[None], label[None]).backward()
        optimizer.step()
        along.append(rows.detach().clone())
    return along


def test_a_stream_is_descent_sample_by_sample() -> None:
    features, y = random(2, 5, 4, seed=0), torch.tensor([[0, 0, 2, 1, 1], [2, 1, 0, 1, 2]])
    start, rate = torch.zeros(2, WAYS, 4, dtype=FLOAT64), torch.tensor(0.7, dtype=FLOAT64)
    rows = streamed(start, features, F.one_hot(y).double(), rate)
    for task in range(2):
        close({"rows": rows[task]}, {"rows": by_hand(features[task], y[task], 0.7)[-1]}, atol=1e-12)


def test_figures_are_those_of_the_classes_so_far() -> None:
    """Two samples of each class: after k classes, 2 k samples are learned from, and only their queries count."""
    model = network(transductive=False)
    learner = oml(model=model, inner_lr=0.7, scale=9.0, eval_lr_factor=0.5)
    params, (support, query) = start_of(learner), tasks(1)
    rate, scale = ((SPEED * params[name]).exp().item() for name in ("log_rate", "log_scale"))
    body = {name: value for name, value in params.items() if not name.startswith("log_")}
    known, asked = (
        F.normalize(model.features_of(body, 1)(x, support.x[:, :2])[0], dim=1) for x in (support.x, query.x)
    )
    along, values = by_hand(known, support.y[0], 0.5 * rate), learner.evaluate(params, Episode(support, query))
    assert values["loss"].shape == values["accuracy"].shape == (1, WAYS + 1)
    for classes in range(WAYS + 1):
        shown = query.y[0] < (classes or WAYS)
        logits, y = scale * asked[shown] @ along[2 * classes].T, query.y[0, shown]
        assert values["loss"][0, classes].item() == pytest.approx(F.cross_entropy(logits, y).item(), abs=1e-10)
        assert values["accuracy"][0, classes].item() == pytest.approx(
            (logits.argmax(dim=1) == y).double().mean().item()
        )
    close({"": learner.adapt(params, support)(query.x)[0]}, {"": logits}, atol=1e-10)


def test_the_last_figure_is_the_loss_of_training() -> None:
    """Also where the loss has weights, of queries in any order."""
    model = measured_by(network(transductive=False), cross_entropy(weights=[1.0, 2.0, 5.0]))
    learner, (support, query) = oml(model=model, inner_lr=0.7, scale=9.0), tasks(2)
    params, order = start_of(learner), torch.randperm(query.y.shape[1], generator=torch.Generator().manual_seed(0))
    mixed = Episode(support, Batch(query.x[:, order], query.y[:, order]))
    trained, tested = learner.meta_grad(params, mixed, 0).metrics, learner.evaluate(params, mixed)
    close({"loss": tested["loss"][:, -1].sum()}, {"loss": trained["loss"]}, atol=1e-9)
    close(tested, learner.evaluate(params, Episode(support, query)), atol=1e-9)


def test_streams_of_different_lengths_are_refused() -> None:
    learner = oml(model=network(transductive=False), inner_lr=0.7, scale=9.0)
    with surrounded(present=2), pytest.raises(ConfigError, match=r"type a number, such as dataset\.shots=1"):
        learner.meta_grad(start_of(learner), tasks(1), 0)


def test_what_comes_later_changes_no_figure_before() -> None:
    """The samples of the last class, and their queries, are others."""
    learner, one, other = oml(model=network(transductive=False), inner_lr=0.7, scale=9.0), tasks(1), tasks(1, seed=5)
    params, last = start_of(learner), slice(2 * (WAYS - 1), None)
    pairs = zip(one, other, strict=True)
    mixed = Episode(*(Batch(torch.cat([a.x[:, :4], b.x[:, last]], dim=1), a.y) for a, b in pairs))
    first, second = (learner.evaluate(params, episode)["loss"] for episode in (one, mixed))
    assert torch.equal(first[:, 1:WAYS], second[:, 1:WAYS]) and first[0, WAYS] != second[0, WAYS]
