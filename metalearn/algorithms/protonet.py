"""Prototypical networks, Snell et al. 2017 (arXiv 1703.05175).

A class is the mean of the features of its support samples (equation 1). The class probabilities of a query are a
softmax over its negative squared distances to these means (equation 2).
"""

from torch import Tensor

from metalearn.algorithms.common.functional import per_task
from metalearn.algorithms.common.learners import comparing_learner, features_and_head, one_hot, without_head
from metalearn.types import Algorithm, Batch, Model, Params


def protonet(*, model: Model) -> Algorithm:
    """Learns features in which the samples of a class lie around their mean.

    Args:
        model: the network; its head is left out.

    Raises:
        ValueError: a model without a linear head.
    """
    features, _ = features_and_head(model)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        theta = per_task(params, support.x.shape[0])
        known = features(theta, support.x)
        classes = one_hot(support, known.dtype)
        prototypes = classes.transpose(1, 2) @ known / classes.sum(dim=1).unsqueeze(2)
        return -squared_distances(features(theta, x, support.x), prototypes)

    return comparing_learner(model, compare, without_head(model))


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """‖aᵢ − bⱼ‖² for `a` [t, n, d] and `b` [t, m, d]: [t, n, m]."""
    return (a.unsqueeze(2) - b.unsqueeze(1)).square().sum(dim=3)
