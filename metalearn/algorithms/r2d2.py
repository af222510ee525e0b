"""R2-D2, Bertinetto et al. 2019 (arXiv 1805.08136).

The head of every task is a ridge regression from the features X of the support set to its classes Y, as one-hot rows:
W = (Xᵀ X + λ I)⁻¹ Xᵀ Y, a linear system of the number of features, or, in its Woodbury form W = Xᵀ (X Xᵀ + λ I)⁻¹ Y, of
the size of the support set. The smaller one is solved. The logits of a query are a X′ W. λ and a are learned with the
network. The paper also adds one number b to all logits of a query; it does not change the softmax and is left out.

The system is built and solved in float64 whatever the precision: in float32 the rounding of large features hides a
small λ.

Differences from the authors' code:

- They divide the support's X and Y by √n, so their λ is n times as strong: their 50 is our 250 in 5-way 1-shot. They
  learn λ only if asked; we always do, by its logarithm.
- They learn a and b directly or as powers of a base; a starts at 10 in their Omniglot command, at 1 here.
- Below 4 roundings of the sum of all squared features, that value takes the place of λ, so equal pictures do no harm.
- Their network has 96 to 512 filters and gives 3584 features; the experiment has Conv4's 64. They train on 60 ways.
- Norms, as with prototypical networks: both sets together in training, running statistics in the test.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import cholesky
from metalearn.algorithms.common.inner import comparing_learner, one_hot, without_head
from metalearn.errors import positive
from metalearn.types import Algorithm, Batch, Model, Params

LOG_STRENGTH, SCALE = "ridge.log_strength", "ridge.scale"  # the names of what is learned beside the network
_FLOOR = 4  # roundings. With 1/2, 4 of 2000 systems with equal samples and λ = 0 had no Cholesky root; with 1, none


def r2d2(*, model: Model, strength: float, scale: float) -> Algorithm:
    """Learns features from which ridge regression predicts the classes of a task. Raises ValueError for a strength or
    scale that is not above 0, or a model without a linear head.

    Args:
        model: the network; its head is left out.
        strength: the initial λ; its logarithm is learned.
        scale: the initial a.
    """
    positive(strength=strength, scale=scale)
    network = without_head(model)

    def init(generator: Generator) -> Params:
        scalars = {LOG_STRENGTH: math.log(strength), SCALE: scale}
        return network(generator) | {name: torch.tensor([value]) for name, value in scalars.items()}

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        features = model.features_of(params, support.x.shape[0])
        # A last feature that is always 1: the bias of the linear head.
        support_features, queries = (F.pad(z, (0, 1), value=1) for z in (features(support.x), features(x, support.x)))
        weights = ridge(support_features, one_hot(support, support_features.dtype), params[LOG_STRENGTH].exp())
        return params[SCALE] * (queries @ weights)

    return comparing_learner(model, compare, init)


def ridge(x: Tensor, y: Tensor, strength: Tensor) -> Tensor:
    """The weights W [t, d, k] that minimise ‖X W − Y‖² + λ ‖W‖² for `x` [t, n, d], `y` [t, n, k], computed in float64.
    λ counts as no less than `_FLOOR` roundings of the sum of the squares in x."""
    features, labels = x.double(), y.double()
    across, woodbury = features.transpose(1, 2), x.shape[1] <= x.shape[2]
    products = features @ across if woodbury else across @ features
    squares = products.detach().diagonal(dim1=1, dim2=2).sum(dim=1).view(-1, 1, 1)
    floored = torch.maximum(strength, _FLOOR * torch.finfo(products.dtype).eps * squares)
    root = cholesky(products + floored * torch.eye(products.shape[1], dtype=products.dtype, device=x.device))
    weights = across @ _solved(labels, root) if woodbury else _solved(across @ labels, root)
    return weights.to(x.dtype)


def _solved(b: Tensor, root: Tensor) -> Tensor:
    """The solutions of systems whose Cholesky roots these are."""
    if not b.is_cuda:
        return torch.cholesky_solve(b, root)
    # There, torch's function waits for the host, so no graph can hold it.
    between = torch.linalg.solve_triangular(root, b, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(root.mT, between, upper=True)
    return solved
