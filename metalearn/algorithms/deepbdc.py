"""DeepBDC, Xie et al. 2022 (arXiv 2204.04567), as "Meta DeepBDC": classes are compared by how their channels depend.

A picture is the Brownian distance covariance of its feature maps. Of c channels x_k, each with the values of all p
pixels, a_kl = sqrt(τ ‖x_k − x_l‖² + ε) (equation 5); the matrix A is a_kl, less the means of its row and of its column,
plus the mean of all. The picture's vector is the upper triangle of A with its diagonal.

A class is the mean of the vectors of its support samples. The logit of a query is its inner product with this mean;
with more shots than one it is the negative squared distance, as in the authors' code. τ begins as 1 / (2 p) and is
learned.

The head of the model is left out.

Difference from the authors' code: a layer of 1×1 convolutions reduces their channels first, from 640; ours takes the
network's channels as they are.
"""

import math

import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import class_means, squared_distances, without
from metalearn.algorithms.common.inner import comparing_learner, features_and_head, one_hot, without_head
from metalearn.errors import Invalid, whole_number
from metalearn.types import Algorithm, Batch, Model, Params

EPSILON = 1e-5  # ε, which keeps the derivative of the root finite
SCALE = "bdc.log_scale"  # log τ


def deepbdc(*, model: Model, channels: int | None) -> Algorithm:
    """Learns features whose channels depend on each other in the same way in all samples of a class. A picture takes
    the memory of channels² · pixels floats. Raises ValueError for maps of one pixel, channels that do not divide the
    features, or a model without a linear head.

    Args:
        model: the network; its head is left out. Its features are feature maps [channels, height, width], flattened.
        channels: the channels of these maps; None: those of the last normalisation layer.
    """
    network, (_, head) = without_head(model), features_and_head(model)
    drawn = model.init(Generator().manual_seed(0))
    width = drawn[head.params[0]].shape[1]
    if channels is not None:
        whole_number("channels", channels, at_least=2)
    maps = channels or (len(drawn[model.norms[-1]]) if model.norms else width)
    pixels, rest = divmod(width, maps)
    if rest or pixels < 2:
        reason = f"{width} features are not the pixels, at least two, of {maps} feature maps"
        raise Invalid(
            "channels", channels, reason, "type model=conv4 model.downsample=pool, and pictures of 32 pixels or more"
        )

    def init(generator: Generator) -> Params:
        return network(generator) | {SCALE: torch.tensor([-math.log(2 * pixels)])}

    def covariances(features: Tensor, log_scale: Tensor) -> Tensor:
        """Features [t, n, c p] → the upper triangles [t, n, c (c + 1) / 2]."""
        x = features.reshape(-1, maps, pixels)
        distances = (log_scale.exp() * squared_distances(x, x) + EPSILON).sqrt()
        rows = distances.mean(dim=2, keepdim=True)  # the matrix is symmetric, so these are the columns' means, too
        centred = distances - rows - rows.transpose(1, 2) + rows.mean(dim=1, keepdim=True)
        row, column = torch.triu_indices(maps, maps, device=features.device)
        return centred[:, row, column].view(*features.shape[:2], -1)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        scale = params[SCALE]
        features = model.features_of(without(SCALE, params), support.x.shape[0])
        examples = covariances(features(support.x), scale)
        classes = one_hot(support, examples.dtype)
        queries, prototypes = covariances(features(x, support.x), scale), class_means(examples, classes)
        if classes.shape[1] > classes.shape[2]:  # more shots than one
            return -squared_distances(queries, prototypes)
        return queries @ prototypes.transpose(1, 2)

    return comparing_learner(model, compare, init)
