"""The support vector machine of MetaOptNet: its conditions of optimality, finite differences, and another solver."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.metaoptnet import metaoptnet, support_vectors
from metalearn.types import Batch
from tests.metalearn import written_out
from tests.metalearn.learners import FLOAT64, LEARNERS, network, random, start_of, tasks


def problem(ways: int, shots: int, features: int, *, size: float = 1.0, count: int = 4) -> tuple[Tensor, Tensor]:
    """Features [t, n, d] of which many are zero, as behind a ReLU, and classes [t, n, ways]."""
    y = F.one_hot(torch.arange(ways).repeat_interleave(shots)).to(FLOAT64).repeat(count, 1, 1)
    return size * random(count, ways * shots, features, seed=ways + shots).relu(), y


def kernel_of(x: Tensor, ridge: float) -> Tensor:
    return x @ x.transpose(1, 2) + ridge * torch.eye(x.shape[1], dtype=FLOAT64)


PROBLEMS = {
    "5 ways 1 shot": (problem(5, 1, 64), 1.0, 0.1),
    "5 ways 5 shots": (problem(5, 5, 64), 1.0, 0.1),
    "20 ways 1 shot": (problem(20, 1, 64), 1.0, 0.1),
    "more samples than features": (problem(3, 9, 4), 1e-3, 0.1),
    "large features": (problem(5, 2, 16, size=30.0), 1.0, 10.0),
    "small features": (problem(5, 2, 16, size=1e-3), 1e-6, 0.1),
    "equal samples": ((problem(4, 1, 8)[0].repeat(1, 2, 1), problem(4, 1, 8)[1].repeat(1, 2, 1)), 1e-3, 0.5),
    "no features": ((torch.zeros(1, 6, 8, dtype=FLOAT64), problem(3, 2, 8, count=1)[1]), 1.0, 0.1),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_solution_is_optimal(name: str) -> None:
    """The conditions of Karush, Kuhn and Tucker, which hold at the solution of a convex program only: α ≤ C Y, rows of
    sum 0, and Y − K α, the slope, is the same, and smallest, wherever α is below its bound."""
    (x, y), ridge, cost = PROBLEMS[name]
    kernel = kernel_of(x, ridge)
    alpha = support_vectors(kernel, y, cost)
    room = cost * y - alpha
    slope = y - kernel @ alpha
    above_least = slope - slope.amin(dim=2, keepdim=True)
    scale = kernel.abs().max() * cost + 1
    assert room.min() > -1e-8 * cost and alpha.sum(dim=2).abs().max() < 1e-8 * cost
    assert (room / cost * above_least / scale).max() < 1e-8
    assert (room < 1e-6 * cost).any() or name in ("no features", "small features")


@pytest.mark.parametrize("cost", [1e2, 1e4, 1e6, 1e9])
def test_a_bound_that_never_holds_does_not_blur_the_solution(cost: float) -> None:
    """The conditions of the problem without α ≤ C for a sample's own class, and the derivative at such a solution."""
    x, y = problem(5, 2, 16)
    alpha = support_vectors(kernel_of(x, 1.0), y, cost)
    others = -alpha * (1 - y)
    slope = y - kernel_of(x, 1.0) @ alpha
    above_least = slope - slope.amin(dim=2, keepdim=True)
    assert alpha.max() < 10 and others.min() > -1e-9 and alpha.sum(dim=2).abs().max() < 1e-9
    assert ((others + y) * above_least).abs().max() < 1e-7
    few, of_few = problem(3, 1, 5, count=1)
    few.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: support_vectors(kernel_of(x, 1.0), of_few, cost), (few,), eps=1e-6, atol=1e-7, rtol=1e-6
    )


def test_the_derivative_is_a_finite_difference() -> None:
    """Of the solution by the features, in float64; samples with and without bounds that hold."""
    for x, y in (problem(3, 2, 5, count=1), problem(4, 2, 3, count=1)):
        alpha = support_vectors(kernel_of(x, 0.3), y, 0.4)
        bound = 0.4 * y - alpha < 1e-9
        assert bound.any() and not bound.all()
        x.requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, y=y: support_vectors(kernel_of(x, 0.3), y, 0.4), (x,), eps=1e-6, atol=1e-7, rtol=1e-6
        )


@pytest.mark.parametrize("name", ["5 ways 1 shot", "5 ways 5 shots"])
def test_solution_and_derivative_are_those_of_qpth(name: str) -> None:
    """The dual as the authors write it, over all n k numbers at once. Its derivative is exact but for 1e-8, the least
    multiplier that it counts with."""
    qp = pytest.importorskip("qpth.qp", reason="qpth is not installed: pip install qpth cvxpy")
    (x, y), ridge, cost = PROBLEMS[name]
    count, samples, ways = y.shape
    ours, theirs = (kernel_of(x, ridge).requires_grad_() for _ in range(2))
    alpha = support_vectors(ours, y, cost)
    whole = torch.einsum("tij,kl->tikjl", theirs, torch.eye(ways, dtype=FLOAT64)).reshape(count, samples * ways, -1)
    eye = torch.eye(samples * ways, dtype=FLOAT64).expand(count, -1, -1)
    sums = torch.kron(torch.eye(samples, dtype=FLOAT64), torch.ones(1, ways, dtype=FLOAT64)).expand(count, -1, -1)
    flat = y.reshape(count, -1)
    zeros = torch.zeros(count, samples, dtype=FLOAT64)
    expected = qp.QPFunction(verbose=-1, maxIter=50)(whole, -flat, eye, cost * flat, sums, zeros).view_as(alpha)
    torch.testing.assert_close(alpha, expected, rtol=0, atol=1e-8)
    direction = random(*alpha.shape, seed=3)
    grads = [torch.autograd.grad((value * direction).sum(), by)[0] for value, by in ((alpha, ours), (expected, theirs))]
    symmetric = [grad + grad.transpose(1, 2) for grad in grads]
    torch.testing.assert_close(*symmetric, rtol=0, atol=1e-4 * symmetric[0].abs().max().item())


def test_logits_are_those_of_the_machine_written_out() -> None:
    """Weights Xᵀ α from the features of torch, and the margins: a sample that is not at its bound of C is on it, where
    the machine has no ridge to speak of."""
    learner = metaoptnet(model=network(), cost=0.3, ridge=1e-9, scale=2.0)
    params, episode = start_of(learner), tasks(1)
    ((sx, sy, qx, _),) = written_out.tasks_of(episode)
    known, queries = (written_out.features(params, part, part, F.softplus) for part in (sx, qx))
    y = F.one_hot(sy).to(FLOAT64)
    alpha = support_vectors(kernel_of(known.unsqueeze(0), 1e-9), y.unsqueeze(0), 0.3)[0]
    weights = known.T @ alpha
    logits = learner.adapt(params, episode.support)
    torch.testing.assert_close(logits(episode.query.x)[0], params["svm.scale"] * queries @ weights, rtol=0, atol=1e-9)
    scores = known @ weights
    right = scores.gather(1, sy.unsqueeze(1))
    slacks = (scores + 1 - y - right).amax(dim=1).clamp_min(0)
    at_bound = alpha[y.bool()] > 0.3 * (1 - 1e-6)
    assert slacks[~at_bound].max() < 1e-6 if (~at_bound).any() else slacks.min() >= 0
    primal = weights.square().sum() / 2 + 0.3 * slacks.sum()
    dual = (y * alpha).sum() - weights.square().sum() / 2
    assert primal.item() == pytest.approx(dual.item(), rel=1e-6)  # no gap: both are optimal


def test_float32_features_are_solved_in_float64() -> None:
    """The gradient of float32 parameters is that of float64 but for rounding."""
    learner = LEARNERS["metaoptnet"](network())
    exact, episode = start_of(learner), tasks(2)
    params = {name: value.float() for name, value in exact.items()}
    of_double = learner.meta_grad(exact, episode, 1).grads
    single = type(episode)(*(Batch(part.x.float(), part.y) for part in episode))
    grads = learner.meta_grad(params, single, 1).grads
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert (grad - of_double[name]).abs().max() < 1e-4 * of_double[name].abs().max().clamp_min(1e-2)
