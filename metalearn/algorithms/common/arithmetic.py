"""Arithmetic on parameters by their names, and on features and linear systems of all tasks at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.types import Params

State = dict[str, Params]  # of an inner optimiser, such as its means of gradients

RATE = "inner_lr."  # the prefix of the names of learned inner rates


def prefixed(prefix: str, params: Params) -> Params:
    """The same tensors; every name gets the prefix."""
    return {f"{prefix}{name}": value for name, value in params.items()}


def part(prefix: str, params: Params) -> Params:
    """The tensors whose names have the prefix, under names without it."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def without(prefix: str, params: Params) -> Params:
    """The tensors whose names do not have the prefix."""
    return {name: value for name, value in params.items() if not name.startswith(prefix)}


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


def class_means(features: Tensor, classes: Tensor) -> Tensor:
    """The mean of the features [t, n, d] of each class: [t, ways, d], for `classes` [t, n, ways] as by
    `metalearn.algorithms.common.inner.one_hot`. It is NaN for a class without a sample."""
    return classes.transpose(1, 2) @ features / classes.sum(dim=1).unsqueeze(2)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """The cosines between the vectors `a` [t, n, d] and `b` [t, m, d]: [t, n, m]."""
    return F.normalize(a, dim=2) @ F.normalize(b, dim=2).transpose(1, 2)


def squared_distances(a: Tensor, b: Tensor, *, by_products: bool = False) -> Tensor:
    """‖aᵢ − bⱼ‖² for `a` [t, n, d] and `b` [t, m, d]: [t, n, m]. It takes less time and memory `by_products`, where
    rounding errors of ‖a‖² and ‖b‖² are all that is left if a and b are near to each other."""
    if not by_products:
        return (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(dim=3)
    squares = a.square().sum(dim=2, keepdim=True) + b.square().sum(dim=2).unsqueeze(1)
    return squares - 2 * a @ b.transpose(1, 2)


def cholesky(systems: Tensor) -> Tensor:
    """The Cholesky roots of symmetric systems [..., n, n]; NaN where there is none."""
    # torch.linalg.cholesky raises where a run diverges, for which it waits for a GPU. NaN makes the loss not finite,
    # which the run reports.
    roots, failed = torch.linalg.cholesky_ex(systems)
    return torch.where((failed > 0)[..., None, None], torch.nan, roots)


def conjugate_gradient(product: Callable[[Params], Params], right: Params, steps: int) -> tuple[Params, Tensor]:
    """Solves A x = b from x = b, for every task by itself (Hestenes and Stiefel 1952): `product` is v ↦ A v, and b is
    `right`, each [t, …]. Gives x, and ‖A x − b‖ / ‖b‖ [t]. A must be symmetric, and is solved if it is positive
    definite: a task stops early if its residual is zero, or if b or a direction shows that its A is not."""
    x, image = right, product(right)  # from b: iMAML's first solution is then first-order MAML's gradient
    residual = direction = {name: value - image[name] for name, value in right.items()}
    before, going = _dot(residual, residual), _dot(right, image) > 0
    for _ in range(steps):  # no early end: all tasks are computed together, and a GPU would have to be waited for
        image = product(direction)
        curvature = _dot(direction, image)
        going = going & (curvature > 0)
        length = torch.where(going, ratio(before, curvature), 0.0)
        x, residual = _along(x, direction, length), _along(residual, image, -length)
        now = _dot(residual, residual)
        direction = _along(residual, direction, ratio(now, before))
        before = now
    return x, ratio(before, _dot(right, right)).sqrt()


def _dot(a: Params, b: Params) -> Tensor:
    """The inner product of every task's parameters, [t]."""
    return torch.stack([(a[name] * b[name]).reshape(len(a[name]), -1).sum(dim=1) for name in a]).sum(dim=0)


def _along(start: Params, direction: Params, lengths: Tensor) -> Params:
    """start + length · direction; each task has its own length [t]."""
    return {name: p + lengths.view(-1, *[1] * (p.dim() - 1)) * direction[name] for name, p in start.items()}
