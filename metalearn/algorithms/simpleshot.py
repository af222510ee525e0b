"""SimpleShot, Wang et al. 2019 (arXiv 1911.04623): a classifier of all training classes, then nearest means.

The network is trained as in supervised learning. A task compares features of length 1, "L2N" in the paper: a query
belongs to the class whose mean is nearest. With `centred`, "CL2N", the mean of the training features is subtracted
first. Nothing is trained on a task.

The centre is a meta-parameter, `state.centre`: step T moves it by max(1/T, 0.01) of the way towards the mean of the
features of its samples. The paper takes the mean of all training features after the training. No code of the authors
was compared.
"""

from torch import Tensor

from metalearn.algorithms.common.arithmetic import class_means, squared_distances
from metalearn.algorithms.common.inner import comparing_learner, one_hot, pretrained
from metalearn.types import Algorithm, Batch, Model, Params


def simpleshot(*, model: Model, centred: bool = False) -> Algorithm:
    """Supervised learning, then nearest means of features of length 1. Raises ValueError if `centred` is no bool, or
    the model has no linear head.

    Args:
        model: the network; its head has an output for every training class.
        centred: subtract the mean of the training features from all features.
    """
    features, learner = pretrained(model, centred=centred)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        support_features, queries = features(params, support, x)
        return -squared_distances(queries, class_means(support_features, one_hot(support, support_features.dtype)))

    nearest = comparing_learner(model, compare, model.init)
    return learner(nearest.evaluate, nearest.adapt)
