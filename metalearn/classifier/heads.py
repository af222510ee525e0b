"""Heads: what learns the classes from features. Each is a pair of pure functions.

Features are centred by the mean of the training pictures and scaled to length 1 (Wang et al. 2019, SimpleShot, CL2N).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]  # what a head has learned, by name; float64

_NEIGHBOURS = 5
_SHARPNESS = 10.0  # factor of the cosine similarities in the votes of neighbours
_ITERATIONS = 200


class HeadRule(NamedTuple):
    """How a head learns and scores."""

    # From features z [n, d], labels y [n] and the number of classes k to what it has learned.
    fit: Callable[[Tensor, Tensor, int], State]
    # From that and features [n, d] to scores [n, k]; the highest is the answer.
    score: Callable[[State, Tensor], Tensor]


def class_means(z: Tensor, y: Tensor, k: int) -> Tensor:
    """The mean of each class, scaled to length 1: [k, d]."""
    members = F.one_hot(y, k).to(z.dtype)
    return F.normalize(members.T @ z, dim=1)


def _means(z: Tensor, y: Tensor, k: int) -> State:
    """The cosine similarity to the mean of each class (Snell et al. 2017, with cosines)."""
    return {"weights": class_means(z, y, k), "biases": z.new_zeros(k)}


def _ridge(strength: float) -> Callable[[Tensor, Tensor, int], State]:
    """Ridge regression on the labels, in closed form (Bertinetto et al. 2019, R2-D2, equation 4)."""

    def fit(z: Tensor, y: Tensor, k: int) -> State:
        rows = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        kernel = rows @ rows.T + strength * torch.eye(len(z), dtype=z.dtype)
        w = rows.T @ torch.linalg.solve(kernel, F.one_hot(y, k).to(z.dtype))
        return {"weights": w[:-1].T.contiguous(), "biases": w[-1].clone()}  # a view is not exported as it is

    return fit


def _logistic(strength: float) -> Callable[[Tensor, Tensor, int], State]:
    """Multinomial logistic regression: mean cross-entropy + strength/2 · ‖weights‖², by L-BFGS."""

    def fit(z: Tensor, y: Tensor, k: int) -> State:
        basis, rows = torch.linalg.qr(z.T)  # the weights lie in the span of the pictures: fewer numbers to search
        weights, biases = z.new_zeros(k, len(rows), requires_grad=True), z.new_zeros(k, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights, biases], max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(rows.T @ weights.T + biases, y) + strength / 2 * weights.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        return {"weights": weights.detach() @ basis.T, "biases": biases.detach()}

    return fit


def _linear(state: State, z: Tensor) -> Tensor:
    return z @ state["weights"].T + state["biases"]


def _remember(z: Tensor, y: Tensor, k: int) -> State:
    # A tensor for a maximum: the exporter to ONNX makes plain numbers float32, so this one 0, and leaves out a sum with
    # so small a number.
    floor = z.new_tensor(torch.finfo(z.dtype).tiny ** 0.5)
    return {"pictures": z, "labels": F.one_hot(y, k).to(z.dtype), "floor": floor}


def _votes(state: State, z: Tensor) -> Tensor:
    """The votes of the nearest pictures, weighted by their similarity; as logarithms."""
    near = (z @ state["pictures"].T).topk(min(_NEIGHBOURS, len(state["pictures"])), dim=1)
    weights = torch.exp(_SHARPNESS * (near.values - 1))
    votes = torch.einsum("np,npk->nk", weights, state["labels"][near.indices])
    return torch.log(torch.maximum(votes, state["floor"]))


AUTO = "auto"  # stands for the head that is right most often in cross-validation
HEADS: dict[str, HeadRule] = {
    "class means": HeadRule(_means, _linear),
    "ridge 0.1": HeadRule(_ridge(0.1), _linear),
    "ridge 1": HeadRule(_ridge(1.0), _linear),
    "logistic 0.001": HeadRule(_logistic(0.001), _linear),
    "logistic 0.0001": HeadRule(_logistic(0.0001), _linear),
    "nearest pictures": HeadRule(_remember, _votes),
}
"""The heads that are compared, the simplest first: of equal ones the first is taken."""


def centred(features: Tensor, centre: Tensor) -> Tensor:
    """Features [n, d] less the centre [d], each of length 1; float64."""
    return F.normalize(features.double() - centre, dim=1)
