"""R2-D2, Bertinetto et al. 2019 (arXiv 1805.08136).

The head of every task is a ridge regression from the features X of the support set to its classes Y, as one-hot rows:
W = (Xᵀ X + λ I)⁻¹ Xᵀ Y, a linear system of the number of features, or, in its Woodbury form W = Xᵀ (X Xᵀ + λ I)⁻¹ Y, of
the size of the support set. The smaller one is solved. The logits of a query are a X′ W. λ and a are learned with the
network. The paper also adds one number b to all logits of a query; it does not change the softmax and is left out.
"""

import math

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.functional import cholesky
from metalearn.algorithms.common.learners import comparing_learner, features_of, one_hot, without_head
from metalearn.checks import real_number
from metalearn.types import Algorithm, Batch, Model, Params

LOG_STRENGTH, SCALE = "ridge.log_strength", "ridge.scale"

_ROUNDINGS = 8
"""Beside one for each row of the system. With 4, 2 of 2000 singular systems of float32 (two samples, one a multiple of
the other, λ = 0) had no Cholesky root; with 8, none of 2000 each of 30 kinds."""


def r2d2(*, model: Model, strength: float, scale: float) -> Algorithm:
    """Learns features from which ridge regression predicts the classes of a task.

    Args:
        model: the network; its head is left out.
        strength: the initial λ; its logarithm is learned.
        scale: the initial a.

    Raises:
        ValueError: a strength or scale that is not above 0, or a model without a linear head.
    """
    real_number("strength", strength, above=0)
    real_number("scale", scale, above=0)
    network = without_head(model)

    def init(generator: Generator) -> Params:
        scalars = {LOG_STRENGTH: math.log(strength), SCALE: scale}
        return network(generator) | {name: torch.tensor([value]) for name, value in scalars.items()}

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        features = features_of(model, params, support.x.shape[0])
        known = _with_ones(features(support.x))
        weights = ridge(known, one_hot(support, known.dtype), params[LOG_STRENGTH].exp())
        return params[SCALE] * (_with_ones(features(x, support.x)) @ weights)

    return comparing_learner(model, compare, init)


def ridge(x: Tensor, y: Tensor, strength: Tensor) -> Tensor:
    """The weights W [t, d, k] that minimise ‖X W − Y‖² + λ ‖W‖² for `x` [t, n, d], `y` [t, n, k].

    Where the rounding of the products leaves no digit of a task's system, λ is raised: see `_strengths`.
    """
    across, woodbury = x.transpose(1, 2), x.shape[1] <= x.shape[2]
    products = x @ across if woodbury else across @ x
    system = products + torch.diag_embed(_strengths(products, strength))
    root = cholesky(system)
    weights: Tensor = across @ torch.cholesky_solve(y, root) if woodbury else torch.cholesky_solve(across @ y, root)
    return weights


def _strengths(products: Tensor, strength: Tensor) -> Tensor:
    """λ for each diagonal entry [t, m] of the systems `products` [t, m, m]: the given one, if the systems with it have
    Cholesky roots whose pivots are above the rounding of their entries.

    In the other tasks, as those with equal support pictures and a tiny λ, it is at least that rounding. Its derivative
    stays that of λ, so that a learned λ can grow again.
    """
    with torch.no_grad():
        entries = products.diagonal(dim1=1, dim2=2)
        rounding = (products.shape[1] + _ROUNDINGS) * torch.finfo(products.dtype).eps * entries
        roots, failed = torch.linalg.cholesky_ex(products + torch.diag_embed(strength.expand_as(entries)))
        lost = (failed > 0) | (roots.diagonal(dim1=1, dim2=2).square() < rounding).any(dim=1)
        missing = torch.where(lost.unsqueeze(1), rounding - strength, 0).clamp(min=0)
    return strength + missing


def _with_ones(features: Tensor) -> Tensor:
    """A last feature that is always 1: the bias of the linear head."""
    return torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)
