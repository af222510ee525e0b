"""Prototypical networks, Snell et al. 2017 (arXiv 1703.05175).

A class is the mean of the features of its support samples (equation 1). The class probabilities of a query are a
softmax over its negative squared distances to these means (equation 2).

The head of the model is left out.

Differences from the authors' code:

- In training they normalise support and queries together; in the test, by running statistics. We normalise each set by
  itself; `model.transductive=false` normalises queries by the support set.
- In their split every rotated character is a separate class: `dataset.split=vinyals`. The experiment rotates drawn
  classes.
- They halve Adam's rate every 2000 episodes and stop when validation does not improve; their validation has 15 queries.
"""

from torch import Tensor

from metalearn.algorithms.common.arithmetic import class_means, squared_distances
from metalearn.algorithms.common.inner import comparing_learner, one_hot, without_head
from metalearn.types import Algorithm, Batch, Model, Params


def protonet(*, model: Model) -> Algorithm:
    """Learns features in which the samples of a class lie around their mean. The head of the model is left out. Raises
    ValueError for a model without a linear head."""

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        features = model.features_of(params, support.x.shape[0])
        support_features = features(support.x)
        prototypes = class_means(support_features, one_hot(support, support_features.dtype))
        return -squared_distances(features(x, support.x), prototypes)

    return comparing_learner(model, compare, without_head(model))
