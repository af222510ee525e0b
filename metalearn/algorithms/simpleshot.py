"""SimpleShot, Wang et al. 2019 (arXiv 1911.04623): a classifier of all training classes, then nearest means.

The network is trained as in supervised learning. A task compares features of length 1, "L2N" in the paper: a query
belongs to the class whose mean is nearest. With `centred`, "CL2N", the mean of the training features is subtracted
first. Nothing is trained on a task.

The centre is a meta-parameter, `state.centre`: step T moves it by max(1/T, 0.01) of the way towards the mean of the
features of its samples. The paper takes the mean of all training features after the training. No code of the authors
was compared.
"""

from collections.abc import Iterator

from torch import Tensor

from metalearn.algorithms.common.arithmetic import class_means, squared_distances
from metalearn.algorithms.common.inner import one_hot, pretrained
from metalearn.types import Algorithm, Batch, Model


def simpleshot(*, model: Model, centred: bool = False) -> Algorithm:
    """Supervised learning, then nearest means of features of length 1. Raises ValueError if `centred` is no bool, or
    the model has no linear head.

    Args:
        model: the network; its head has an output for every training class.
        centred: subtract the mean of the training features from all features.
    """

    def path(examples: Tensor, queries: Tensor, support: Batch, steps: int) -> Iterator[Tensor]:
        yield -squared_distances(queries, class_means(examples, one_hot(support, examples.dtype)))

    return pretrained(model, path, eval_steps=0, centred=centred)
