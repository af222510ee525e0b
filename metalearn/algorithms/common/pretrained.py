"""Learners on features of supervised learning: a classifier of all training classes is trained, and tasks compare its
features, each of length 1 ("L2N" of Wang et al. 2019, arXiv 1911.04623).

If they are `centred` ("CL2N"), the mean of the training features is subtracted first. It is a carried state: step T
moves it by max(1 / T, `RATE_OF_CENTRE`) of the way towards the mean of the features of that step's samples. So it
follows the network, and the features of the last hundred steps or so make it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.learners import (
    Evaluate,
    features_and_head,
    features_of,
    trained_on_samples,
    weights_of,
)
from metalearn.checks import true_or_false
from metalearn.types import STATE, Adapt, Algorithm, Batch, ChunkResult, Episode, Model, Params

CENTRE = f"{STATE}centre"
"""The meta-parameter of the mean of the training features, [d]."""

RATE_OF_CENTRE = 0.01


class PretrainedHeads(NamedTuple):
    """What a learner on supervised features is made of: `features(params, support, x)` gives those of the support set
    [t, s, d] and of the queries `x` [t, n, d], each of length 1; `learner(evaluate, adapt)` is the algorithm that
    trains the network on samples, and evaluates and adapts so."""

    features: Callable[[Params, Batch, Tensor], tuple[Tensor, Tensor]]
    learner: Callable[[Evaluate, Adapt], Algorithm]


def pretrained(model: Model, *, centred: bool) -> PretrainedHeads:
    """Supervised features of length 1.

    Args:
        model: the network; its head has an output for every training class.
        centred: subtract the mean of the training features from all features.

    Raises:
        ValueError: `centred` is no bool, or a model without a linear head.
    """
    true_or_false("centred", centred)
    _, head = features_and_head(model)

    def unit_features(params: Params, support: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
        features = features_of(model, weights_of(params), support.x.shape[0])
        known, queries = features(support.x), features(x, support.x)
        if centred:
            known, queries = known - params[CENTRE], queries - params[CENTRE]
        return F.normalize(known, dim=2), F.normalize(queries, dim=2)

    def init(generator: Generator) -> Params:
        params = model.init(generator)
        (vectors,) = (params[name] for name in head.params if params[name].dim() == 2)
        return params | {CENTRE: vectors.new_zeros(vectors.shape[1])}

    def learner(evaluate: Evaluate, adapt: Adapt) -> Algorithm:
        plain = trained_on_samples(model, evaluate, adapt)
        if not centred:
            return plain._replace(evaluated_on_features=True)

        @torch.no_grad()
        def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
            weights = weights_of(params)
            result = plain.meta_grad(weights, episode, step)
            (known,) = features_of(model, weights, 1)(episode.query.x)
            change = max(1 / step, RATE_OF_CENTRE) * (params[CENTRE] - known).sum(dim=0)
            return result._replace(grads=result.grads | {CENTRE: change})

        return plain._replace(init=init, meta_grad=meta_grad, loss=None, outcome=None)

    return PretrainedHeads(unit_features, learner)
