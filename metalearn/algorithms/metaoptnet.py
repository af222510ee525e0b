"""MetaOptNet, Lee et al. 2019 (arXiv 1904.03758), with a support vector machine.

The head of every task is the linear multi-class support vector machine of Crammer and Singer (2001), solved to its
optimum. Its dual has α [n, k] for n support samples with features X, K = X Xᵀ, and one-hot classes Y:

    minimise ½ tr(αᵀ (K + δ I) α) − tr(Yᵀ α)   so that   α ≤ C Y,   Σ_k α_ik = 0.

The weights are Xᵀ α, and the logits of a query are γ x′ᵀ Xᵀ α; γ is learned with the network. δ is the authors': it
makes the solution unique. The meta-gradient is the derivative of the solution itself, by the implicit function theorem;
it does not depend on how the solution was found.

With α = C (Y − P) a row of P has the probabilities of the classes. An interior point method finds them (Mehrotra 1992),
in about a dozen steps; in its linear systems the classes have only a sum in common, so a step solves one system of the
size of the support set for each class, and one for the sum. The derivative is that of one Newton step from the
solution.

Differences from the authors' code:

- Their solver is qpth, for all numbers of α at once, in float32 with at most 15 steps. Ours is in float64 and goes on
  until products of probabilities and multipliers are below 1e-13 of the largest slope.
- Their ridge is a constant 1.0, which the paper does not have. Ours is a key.
- They train with 15 shots and label smoothing by SGD, on ResNet-12 with DropBlock. They have no Omniglot.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import cholesky
from metalearn.algorithms.common.inner import comparing_learner, one_hot, without_head
from metalearn.errors import positive
from metalearn.types import Algorithm, Batch, Model, Params

SCALE = "svm.scale"  # the name of γ, which is learned beside the network
_TOLERANCE = 1e-13  # of the largest product of a probability and its multiplier, as a part of the largest first slope
_ROUNDING = 1e-12  # an eigenvalue below this part of the largest one counts as zero
_MOST_STEPS = 60  # of an interior point; it takes about a dozen


def metaoptnet(*, model: Model, cost: float, ridge: float, scale: float) -> Algorithm:
    """Learns features from which a support vector machine predicts the classes of a task. Raises ValueError for a cost,
    ridge or scale that is not above 0, or a model without a linear head.

    Args:
        model: the network; its head is left out.
        cost: C, the price of a support sample on the wrong side of its margin.
        ridge: δ, which is added to the diagonal of the kernel matrix.
        scale: the initial γ.
    """
    positive(cost=cost, ridge=ridge, scale=scale)
    network = without_head(model)

    def init(generator: Generator) -> Params:
        return network(generator) | {SCALE: torch.tensor([scale])}

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        features = model.features_of(params, support.x.shape[0])
        support_features, queries = features(support.x), features(x, support.x)
        exact = support_features.double()
        kernel = exact @ exact.transpose(1, 2)
        eye = torch.eye(kernel.shape[1], dtype=kernel.dtype, device=kernel.device)
        alpha = support_vectors(kernel + ridge * eye, one_hot(support, kernel.dtype), cost)
        weights = (exact.transpose(1, 2) @ alpha).to(support_features.dtype)
        return params[SCALE] * (queries @ weights)

    return comparing_learner(model, compare, init)


class Point(NamedTuple):
    """Probabilities P [t, n, k], the multipliers Z [t, n, k] of P ≥ 0, and those of Σ_k P_ik = 1, ν [t, n]."""

    p: Tensor
    z: Tensor
    nu: Tensor


def support_vectors(kernel: Tensor, y: Tensor, cost: float) -> Tensor:
    """α [t, n, k] of the dual, for a positive definite `kernel` [t, n, n] and classes `y` [t, n, k] as by `one_hot`, of
    float64. Its derivative by the kernel is exact where no p_ik and its multiplier are both zero.

    With α = C (Y − P), the rows of P are probabilities. They minimise ½ tr((Y − P)ᵀ K (Y − P)) + tr(Yᵀ P) / C.
    """
    with torch.no_grad():
        costs = effective_costs(kernel, cost)
        point = interior_point(kernel, y, costs)
        solve = newton_system(kernel, point)
    # A Newton step from the solution: zero, and its derivative by the kernel is that of the solution.
    p = point.p + solve(-dual_residual(kernel, y, costs, point), torch.zeros_like(point.nu))[0]
    return costs * (y - p)


def effective_costs(kernel: Tensor, cost: float) -> Tensor:
    """C of every task [t, 1, 1], or a smaller one that has the same solution: P of a needlessly large C differs from Y
    by less than it is accurate to.

    Without the bound α ≤ C Y, tr(αᵀ K α) = tr(Yᵀ α) at the solution, so that no entry is above √n / λ for the least
    eigenvalue λ of K. The bound never holds it back if C is twice that.
    """
    finite = kernel.isfinite().all(dim=(1, 2), keepdim=True)
    values = torch.linalg.eigvalsh(kernel.where(finite, 0.0)).unsqueeze(2)  # which raises for what is not finite
    least = torch.where(values[:, :1] > _ROUNDING * values[:, -1:], values[:, :1], 0.0)
    enough: Tensor = 2 * kernel.shape[1] ** 0.5 / least
    return enough.clamp_max(cost)


def dual_residual(kernel: Tensor, y: Tensor, cost: Tensor, point: Point) -> Tensor:
    """The slope of the objective minus Z and ν, [t, n, k]; zero at the solution."""
    return kernel @ (point.p - y) + y / cost - point.z - point.nu.unsqueeze(2)


def newton_system(kernel: Tensor, point: Point) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Solves (K + D_k) Δp_k − Δν = r_k for every class k, and Σ_k Δp_k = s, where D = Z / P: a function from r [t, n,
    k] and s [t, n] to Δp [t, n, k] and Δν [t, n]. Given Δν, each class has a system of its own; Δν solves the sum of
    these systems."""
    ratios = (point.z / point.p).transpose(1, 2)
    inverses = torch.cholesky_inverse(cholesky(kernel.unsqueeze(1) + torch.diag_embed(ratios)))
    root = cholesky(inverses.sum(dim=1))

    def by_class(r: Tensor) -> Tensor:
        return (inverses @ r.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)

    def solve(r: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        free = by_class(r)
        nu = torch.cholesky_solve((s - free.sum(dim=2)).unsqueeze(2), root)
        return free + by_class(nu.expand_as(r)), nu.squeeze(2)

    return solve


def interior_point(kernel: Tensor, y: Tensor, cost: Tensor) -> Point:
    """The solution, by the predictor and corrector steps of Mehrotra (1992). A task stops as soon as it is solved, so
    its bits do not depend on the others."""
    p = torch.full_like(y, 1 / y.shape[2])
    slope = kernel @ (p - y) + y / cost
    largest = slope.abs().amax(dim=(1, 2), keepdim=True)
    nu = slope.amin(dim=2) - largest.squeeze(2)
    point = Point(p, slope - nu.unsqueeze(2), nu)
    for _ in range(_MOST_STEPS):
        unsolved = (point.p * point.z).amax(dim=(1, 2), keepdim=True) > _TOLERANCE * largest
        if not unsolved.any():
            break
        after = _predicted_and_corrected(kernel, y, cost, point)
        moves = (unsolved, unsolved, unsolved.squeeze(2))
        point = Point(*map(torch.where, moves, after, point))
    return point


def _predicted_and_corrected(kernel: Tensor, y: Tensor, cost: Tensor, point: Point) -> Point:
    p, z, nu = point
    solve = newton_system(kernel, point)
    of_slope, of_sum = -dual_residual(kernel, y, cost, point), 1 - p.sum(dim=2)

    def towards(products: Tensor) -> Point:
        """The direction in which P ∘ Z would change by `products` [t, n, k]."""
        of_p, of_nu = solve(of_slope + products / p, of_sum)
        return Point(of_p, (products - z * of_p) / p, of_nu)

    gap = (p * z).mean(dim=(1, 2), keepdim=True)
    predicted = towards(-p * z)
    length = _length(point, predicted)
    left = ((p + length * predicted.p) * (z + length * predicted.z)).mean(dim=(1, 2), keepdim=True)
    corrected = towards(gap * (left / gap) ** 3 - p * z - predicted.p * predicted.z)
    length = 0.99 * _length(point, corrected)
    return Point(p + length * corrected.p, z + length * corrected.z, nu + length.squeeze(2) * corrected.nu)


def _length(point: Point, direction: Point) -> Tensor:
    """The longest step of at most 1, for each task [t, 1, 1], at whose end no probability or multiplier is negative."""
    steps = [
        torch.where(d < 0, -value / d, torch.inf).amin(dim=(1, 2), keepdim=True)
        for value, d in ((point.p, direction.p), (point.z, direction.z))
    ]
    return torch.minimum(*steps).clamp_max(1)
