"""Matching networks, Vinyals et al. 2016 (arXiv 1606.04080).

The class probabilities of a query are a sum over the support set, p(y | x) = Σ a(x, xᵢ) yᵢ (equation 1), where the
attention a is a softmax over cosine similarities of features (section 2.1.1). Its logarithm is what is computed, so a
class whose probability is below the smallest float has a gradient, too. One network gives the features of both. The
full context embeddings of section 2.1.2 are not here.

The head of the model is left out, and so is the fine-tuning of the paper's table 1. No code of the authors was found to
compare with.
"""

import torch
from torch import Tensor

from metalearn.algorithms.common.arithmetic import cosines
from metalearn.algorithms.common.inner import comparing_learner, one_hot, without_head
from metalearn.errors import positive
from metalearn.types import Algorithm, Batch, Model, Params


def matching(*, model: Model, scale: float) -> Algorithm:
    """Learns features by which a query attends to the support samples of its class. Raises ValueError for a scale that
    is not above 0, or a model without a linear head.

    Args:
        model: the network; its head is left out.
        scale: the factor of the cosine similarities in the attention; the paper's is 1.
    """
    positive(scale=scale)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        features = model.features_of(params, support.x.shape[0])
        support_features = features(support.x)
        attention = (scale * cosines(features(x, support.x), support_features)).log_softmax(dim=2)
        return log_sums(attention, support)

    return comparing_learner(model, compare, without_head(model))


def log_sums(attention: Tensor, support: Batch) -> Tensor:
    """log Σ exp(aᵢ) over the support samples i of each class, for `attention` [t, n, samples]: [t, n, ways]. A class
    without a sample is less probable than any other."""
    classes = one_hot(support, attention.dtype)
    labels = support.y.unsqueeze(1).expand_as(attention)
    fixed = attention.detach()
    least = fixed.amin(dim=2, keepdim=True).repeat(1, 1, classes.shape[2])
    largest = least.scatter_reduce(2, labels, fixed, "amax")
    shares = (attention - largest.gather(2, labels)).exp() @ classes
    return shares.clamp_min(torch.finfo(shares.dtype).tiny).log() + largest
