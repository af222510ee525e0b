"""LaplacianShot, Ziko et al. 2020 (arXiv 2006.15486).

The network is trained as in supervised learning. A query is compared with the class means of the support set, all in
features of length 1, and with the queries nearest to it, which should have its class. Their assignments y to the
classes are computed together, by bound updates, y ← softmax(−a + λ W y), from y = softmax(−a). Here a has
the squared distances of the queries to the means, and W[q, p] is 1 if p is among the nearest neighbours of q, else 0.
So the learner is transductive, whatever the model.

With `rectified`, the queries are first shifted by the difference of the means of both sets, and each class mean is
computed again over all samples, support and queries, that are nearest to it by cosine, weighted by a softmax of ten
times the cosines (Liu et al. 2020, arXiv 1911.10713).

Differences from the authors' code:

- They count the query itself as one of its 3 neighbours; so `neighbours=2` is theirs.
- They choose λ on validation tasks, and stop early where their energy hardly changes. Ours does all `eval_steps`.
- A class without samples keeps its mean when prototypes are rectified; theirs drops the class. A single query is not
  rectified: shifted to the mean of the support set, every query would be the same.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.arithmetic import class_means, cosines, squared_distances
from metalearn.algorithms.common.inner import one_hot, pretrained
from metalearn.errors import counts, not_negative, real_number, switches
from metalearn.types import Algorithm, Batch, Model

SHARPNESS = 10.0  # the factor of the cosines in the weights of `rectified_means`; that of both papers


def laplacian_shot(
    *, model: Model, strength: float, neighbours: int, eval_steps: int, rectified: bool, centred: bool
) -> Algorithm:
    """Supervised learning, then nearest means, where near queries get the same class. Raises ValueError for a negative
    strength or number of updates, no neighbours, a switch that is no bool, or a model without a linear head.

    Args:
        model: the network; its head has an output for every training class.
        strength: λ, the weight of the neighbours.
        neighbours: how many of the other queries are neighbours of a query; all, if a task has fewer.
        eval_steps: bound updates in validation and test. Without any, a query goes to the nearest mean.
        rectified: shift the queries to the mean of the support set, and take the class means over them, too; but not
            if there is a single query.
        centred: subtract the mean of the training features from all features.
    """
    real_number("strength", strength, at_least=0)
    counts(neighbours=neighbours)
    not_negative(eval_steps=eval_steps)
    switches(rectified=rectified)

    def path(examples: Tensor, queries: Tensor, support: Batch, steps: int) -> Iterator[Tensor]:
        means = class_means(examples, one_hot(support, examples.dtype))
        if rectified and queries.shape[1] > 1:  # the mean of a single query is the query itself
            queries = queries + examples.mean(dim=1, keepdim=True) - queries.mean(dim=1, keepdim=True)
            means = rectified_means(torch.cat([examples, queries], dim=1), means)
        distances, weights = squared_distances(queries, means), affinities(queries, neighbours)
        logits = -distances
        yield logits
        for _ in range(steps):
            logits = -distances + strength * weights @ logits.softmax(dim=2)
            yield logits

    return pretrained(model, path, eval_steps=eval_steps, centred=centred)._replace(transductive=True)


def affinities(z: Tensor, neighbours: int) -> Tensor:
    """W [t, n, n] of features [t, n, d]: W[q, p] is 1 if p is one of the nearest other samples of q, else 0."""
    distances = squared_distances(z, z, by_products=True)
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    nearest = distances.topk(min(neighbours, z.shape[1] - 1), dim=2, largest=False).indices
    return torch.zeros_like(distances).scatter_(2, nearest, 1.0)


def rectified_means(z: Tensor, means: Tensor) -> Tensor:
    """The means [t, ways, d] over the samples `z` [t, n, d] that are nearest to each of `means` by cosine, weighted by
    their softmax. The mean of a class without any such sample stays."""
    similar = cosines(z, means)
    nearest = F.one_hot(similar.argmax(dim=2), means.shape[1]).to(z.dtype)
    sums = (nearest * (SHARPNESS * similar).softmax(dim=2)).transpose(1, 2) @ z
    counts = nearest.sum(dim=1).unsqueeze(2)
    return torch.where(counts > 0, sums / counts.clamp_min(1), means)
