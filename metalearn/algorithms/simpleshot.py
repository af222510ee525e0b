"""SimpleShot, Wang et al. 2019 (arXiv 1911.04623): a classifier of all training classes, then nearest means.

The network is trained as in supervised learning. A task compares features of length 1, "L2N" in the paper: a query
belongs to the class whose mean is nearest. Nothing is trained on a task. The paper's "CL2N", which first subtracts the
mean of all training features, is not here.
"""

import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.functional import per_task
from metalearn.algorithms.common.learners import (
    class_means,
    comparing_learner,
    features_and_head,
    one_hot,
    squared_distances,
    trained_on_samples,
)
from metalearn.types import Algorithm, Batch, Model, Params


def simpleshot(*, model: Model) -> Algorithm:
    """Supervised learning, then nearest means of features of length 1.

    Args:
        model: the network; its head has an output for every training class.

    Raises:
        ValueError: a model without a linear head.
    """
    features, _ = features_and_head(model)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        theta = per_task(params, support.x.shape[0])
        known, queries = features(theta, support.x), features(theta, x, support.x)
        means = class_means(F.normalize(known, dim=2), one_hot(support, known.dtype))
        return -squared_distances(F.normalize(queries, dim=2), means)

    nearest = comparing_learner(model, compare, model.init)
    return trained_on_samples(model.apply, model.init, nearest.evaluate, nearest.adapt)
