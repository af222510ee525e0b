"""Learners on supervised features, with the mean of the training features and with all queries of a task together."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical

from metalearn.algorithms.laplacian_shot import affinities, laplacian_shot, rectified_means
from metalearn.algorithms.simpleshot import simpleshot
from metalearn.algorithms.tim import tim
from metalearn.types import Batch, Episode, Params
from tests.metalearn import written_out
from tests.metalearn.learners import LEARNERS, TIM, WAYS, evaluation_episode, network, start_of, tasks, training_episode

Array = NDArray[np.float64]


def unit(params: Params, x: Tensor) -> Tensor:
    """Features of length 1, less the centre if there is one."""
    values = written_out.features(params, x, x, F.softplus) - params.get("state.centre", torch.tensor(0.0))
    return values / values.norm(dim=1, keepdim=True)


def means_of(known: Tensor, y: Tensor) -> Tensor:
    return torch.stack([known[y == label].mean(dim=0) for label in range(WAYS)])


# The mean of the training features


def test_the_centre_follows_the_mean_of_the_features() -> None:
    learner, plain = (LEARNERS[name](network()) for name in ("simpleshot_centred", "simpleshot"))
    params, samples = start_of(learner), training_episode(learner, 5)
    assert not learner.init(torch.Generator().manual_seed(0))["state.centre"].any()
    weights = {name: value for name, value in params.items() if name != "state.centre"}
    x, centre = samples.query.x[0], params["state.centre"]
    mean = written_out.features(weights, x, x, F.softplus).mean(dim=0)
    for step, rate in ((1, 1), (4, 0.25), (5000, 0.01)):
        result = learner.meta_grad(params, samples, step)
        after = centre - result.grads["state.centre"] / result.count
        torch.testing.assert_close(after, (1 - rate) * centre + rate * mean, rtol=0, atol=1e-12)
        expected = plain.meta_grad(weights, samples, step)
        assert all(torch.equal(result.grads[name], expected.grads[name]) for name in weights)
        assert result.metrics == expected.metrics
    assert learner.loss is None


def test_centred_features_are_compared_as_numpy_compares_them() -> None:
    learner = LEARNERS["simpleshot_centred"](network())
    params, episode = start_of(learner), tasks(1)
    ((sx, sy, qx, _),) = written_out.tasks_of(episode)
    known, queries = (written_out.features(params, part, part, F.softplus).numpy() for part in (sx, qx))
    known, queries = (part - params["state.centre"].numpy() for part in (known, queries))
    known, queries = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (known, queries))
    means = [known[sy.numpy() == label].mean(axis=0) for label in range(WAYS)]
    expected = [[-np.sum((query - mean) ** 2) for mean in means] for query in queries]
    logits = learner.adapt(params, episode.support)(episode.query.x)[0]
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-12)


# TIM


@pytest.mark.parametrize("name", ["tim", "tim_centred"])
def test_tim_is_torchs_adam_on_the_papers_loss(name: str) -> None:
    """The query loss after each step; the entropies are those of torch's distributions."""
    learner = LEARNERS[name](network())
    params, episode, losses = start_of(learner), tasks(2), []
    for sx, sy, qx, qy in written_out.tasks_of(episode):
        known, queries = unit(params, sx), unit(params, qx)
        vectors = means_of(known, sy).requires_grad_()
        optimizer = torch.optim.Adam([vectors], lr=TIM["inner_lr"])
        for _ in range(4):
            of_support, of_queries = (-8.0 / 2 * torch.cdist(z, vectors).square() for z in (known, queries))
            losses.append(F.cross_entropy(of_queries, qy).item())
            each = Categorical(logits=of_queries)
            together = Categorical(probs=each.probs.mean(dim=0))
            loss = 0.4 * F.cross_entropy(of_support, sy) - together.entropy() + 0.2 * each.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert learner.evaluate(params, episode)["loss"].flatten().tolist() == pytest.approx(losses, abs=1e-9)


def test_without_steps_tim_and_laplacian_shot_are_simpleshot() -> None:
    learner = LEARNERS["simpleshot"](network())
    params, episode = start_of(learner), evaluation_episode(learner, 1)
    expected = learner.adapt(params, episode.support)(episode.query.x)
    of_tim = tim(model=network(), **(TIM | {"eval_steps": 0})).adapt(params, episode.support)(episode.query.x)
    torch.testing.assert_close(of_tim, 8.0 / 2 * expected, rtol=0, atol=1e-12)
    of_laplacian = LEARNERS["laplacian_shot"](network()).adapt(params, episode.support, 0)(episode.query.x)
    torch.testing.assert_close(of_laplacian, expected, rtol=0, atol=1e-12)


# LaplacianShot


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def updated(queries: Array, means: Array, *, strength: float, neighbours: int, steps: int) -> Array:
    """The logits after the bound updates, query by query."""
    distances = np.array([[np.sum((query - mean) ** 2) for mean in means] for query in queries])
    order = [np.argsort([np.sum((query - other) ** 2) for other in queries]) for query in queries]
    nearest = [[p for p in order[q] if p != q][:neighbours] for q in range(len(queries))]
    logits = -distances
    for _ in range(steps):
        y = softmax(logits)
        logits = np.array([strength * y[nearest[q]].sum(axis=0) - distances[q] for q in range(len(queries))])
    return logits


def rectified(known: Array, queries: Array, means: Array) -> tuple[Array, Array]:
    """The shifted queries, and the means of all samples that each of the means is nearest to by cosine."""
    queries = queries + known.mean(axis=0) - queries.mean(axis=0)
    samples, weighted = np.concatenate([known, queries]), [[] for _ in means]  # type: ignore[var-annotated]
    for sample in samples:
        cosines = [sample @ mean / np.linalg.norm(sample) / np.linalg.norm(mean) for mean in means]
        best = int(np.argmax(cosines))
        weighted[best].append(softmax(10 * np.array([cosines]))[0, best] * sample)
    return queries, np.array([np.mean(group, axis=0) for group in weighted])


@pytest.mark.parametrize("name", ["laplacian_shot", "laplacian_shot_rectified"])
def test_bound_updates_are_those_of_numpy(name: str) -> None:
    learner = LEARNERS[name](network())
    params, episode = start_of(learner), tasks(1)
    ((sx, sy, qx, _),) = written_out.tasks_of(episode)
    known, queries = unit(params, sx), unit(params, qx).numpy()
    means = means_of(known, sy).numpy()
    if name.endswith("rectified"):
        queries, means = rectified(known.numpy(), queries, means)
    for steps in range(4):
        logits = learner.adapt(params, episode.support, steps)(episode.query.x)[0]
        expected = updated(queries, means, strength=0.7, neighbours=2, steps=steps)
        np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-11)


def test_affinities_by_hand() -> None:
    """Four points on a line, at 0, 1, 3 and 7; and equal points, which are neighbours, but none of itself."""
    line = torch.tensor([[[0.0], [1.0], [3.0], [7.0]]])
    assert affinities(line, 1).tolist() == [[[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]]
    assert affinities(line, 3).tolist() == affinities(line, 9).tolist() == (1 - torch.eye(4)).unsqueeze(0).tolist()
    assert affinities(torch.ones(1, 2, 3), 1).tolist() == [[[0, 1], [1, 0]]]
    assert affinities(line[:, :1], 3).tolist() == [[[0]]]


def test_the_mean_of_a_class_without_samples_stays() -> None:
    means = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]])
    after = rectified_means(torch.tensor([[[2.0, 0.1], [0.1, 3.0]]]), means)
    assert after[0, 2].tolist() == [-1, -1] and after[0, 0, 0] > 1.9


# BD-CSPN


def test_prototypes_are_rectified_as_by_numpy() -> None:
    """Sample by sample; the first column is by the class means of the support set."""
    learner = LEARNERS["bd_cspn"](network())
    params, episode = start_of(learner), tasks(1)
    ((sx, sy, qx, _),) = written_out.tasks_of(episode)
    support, queries = unit(params, sx).numpy(), unit(params, qx).numpy()
    queries = queries + support.mean(axis=0) - queries.mean(axis=0)
    prototypes = means_of(unit(params, sx), sy).numpy()

    def cosine(a: Array, b: Array) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    for steps in range(4):
        logits = learner.adapt(params, episode.support, steps)(episode.query.x)[0]
        expected = np.array([[10 * cosine(query, one) for one in prototypes] for query in queries])
        np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-11)
        labelled = [*zip(support, sy.tolist(), strict=True), *zip(queries, expected.argmax(axis=1), strict=True)]
        groups = [[sample for sample, label in labelled if label == way] for way in range(WAYS)]
        weights = [[np.exp(10 * cosine(s, prototypes[way])) for s in group] for way, group in enumerate(groups)]
        prototypes = np.array([np.average(g, axis=0, weights=w) for g, w in zip(groups, weights, strict=True)])


# All


def clustered(queries: int) -> Episode:
    """A task of two classes whose support samples lie askew; with features as they are."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.arange(2).repeat_interleave(queries)
    x = centres[y] + 0.4 * torch.randn(2 * queries, 4, dtype=torch.float64, generator=generator)
    support = torch.tensor([[1.5, 2.6, 0.0, 0.0], [-1.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
    return Episode(Batch(support[None], torch.tensor([[0, 1]])), Batch(x[None], y[None]))


@pytest.mark.parametrize("name", ["tim", "laplacian_shot"])
def test_queries_together_are_classified_better(name: str) -> None:
    """The boundary of the nearest means runs through a class."""
    identity: Any = lambda params, x, support_x=None: x  # noqa: E731
    model = network()._replace(features=identity)
    learner = (
        tim(model=model, **(TIM | {"inner_lr": 0.01, "eval_steps": 100}))
        if name == "tim"
        else laplacian_shot(model=model, strength=1.0, neighbours=3, eval_steps=20, rectified=False, centred=False)
    )
    episode = clustered(15)
    alone = simpleshot(model=model).evaluate({}, episode)["accuracy"].item()
    together = learner.evaluate({}, episode)["accuracy"][0, -1].item()
    assert alone < 0.95 < together


@pytest.mark.parametrize("name", ["tim", "bd_cspn", "laplacian_shot_rectified"])
def test_a_single_query_is_classified(name: str) -> None:
    learner = LEARNERS[name](network(transductive=False))
    episode = tasks(1)
    logits = learner.adapt(start_of(learner), episode.support)(episode.query.x[:, :1])
    assert logits.shape == (1, 1, WAYS) and logits.isfinite().all()


def test_tim_gives_a_single_query_the_nearest_mean() -> None:
    """Its entropies are those of the query, so each step would make it less certain."""
    identity: Any = lambda params, x, support_x=None: x  # noqa: E731
    moved, still = (tim(model=network()._replace(features=identity), **(TIM | {"eval_steps": k})) for k in (100, 0))
    episode = clustered(1)
    for x, same in ((episode.query.x[:, :1], True), (episode.query.x, False)):
        after, before = (learner.adapt({}, episode.support)(x) for learner in (moved, still))
        assert torch.equal(after, before) is same


@pytest.mark.parametrize("name", ["bd_cspn", "laplacian_shot_rectified"])
def test_single_queries_are_not_rectified(name: str) -> None:
    learner = LEARNERS[name](network(transductive=False))
    predict = learner.adapt(start_of(learner), tasks(1).support)
    first, second = (predict(tasks(1).query.x[:, i : i + 1]) for i in (0, 1))
    assert (first - second).abs().max() > 1e-3
