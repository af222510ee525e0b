"""An ensemble: several trainings of one learner, whose predictions are averaged.

Each member adapts to a task by itself. The prediction is the mean of the members' probabilities after the last inner
step, as in the figures of MAML++ (Antoniou et al. 2019, arXiv 1810.09502), or the mean of their real numbers.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.functional import objective
from metalearn.algorithms.common.learners import evaluated_once, part, prefixed
from metalearn.errors import ConfigError
from metalearn.types import Algorithm, Batch, ChunkResult, Episode, Metrics, Params


def ensemble(algorithm: Algorithm, members: int) -> Algorithm:
    """The learner whose parameters are those of `members` trainings, as `joined` gives them. It only evaluates.

    Raises:
        ConfigError: the algorithm is evaluated on plain samples.
    """
    if algorithm.evaluated_on != "tasks":
        raise ConfigError("ensemble: this algorithm is evaluated on plain samples, and an ensemble needs tasks")

    of_labels = algorithm.computes is not None and "labels" in algorithm.computes.allows

    def mean(outputs: Sequence[Tensor], y: Tensor) -> Tensor:
        if not y.is_floating_point():  # the logarithm of the mean of the probabilities, which are logits, too
            logs = torch.stack([logits.log_softmax(dim=2) for logits in outputs])
            return logs.logsumexp(dim=0) - math.log(len(outputs))
        stacked = torch.stack(list(outputs))
        if not of_labels:
            return stacked.mean(dim=0)
        yes, no = (F.logsigmoid(sign * stacked).logsumexp(dim=0) for sign in (1, -1))
        return yes - no  # the logits of the mean of each label's probabilities

    def init(generator: Generator) -> Params:
        return joined([algorithm.init(generator) for _ in range(members)])

    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        raise NotImplementedError("an ensemble is not trained")

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        tasks = zip(support.x.split(1), support.y.split(1), query.x.split(1), strict=True)
        outputs = torch.cat([adapt(params, Batch(known, y))(x) for known, y, x in tasks])
        return objective(outputs, query.y, algorithm.computes)

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        adapted = [algorithm.adapt(part(f"{number}.", params), support, steps) for number in range(members)]

        def predict(x: Tensor) -> Tensor:
            return mean([member(x) for member in adapted], support.y)

        return predict

    evaluated = (evaluated_once(outcome), adapt)
    return Algorithm(
        init, meta_grad, *evaluated, loss=None, transductive=algorithm.transductive, computes=algorithm.computes
    )


def joined(members: Sequence[Params]) -> Params:
    """The parameters of all members under names of their own."""
    parts = (prefixed(f"{number}.", params) for number, params in enumerate(members))
    return functools.reduce(dict.__or__, parts, {})
