"""Plain classification: no tasks and no adaptation, one network for all samples.

The loss of a step is the mean over its samples; with `loss=auto` it is their cross-entropy. The trainer's chunks are
micro-batches here. In training, batch normalisation takes its statistics from one micro-batch; in evaluation, from a
fixed set of training samples, unless the model is transductive.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.algorithms.common.inner import FOR_SAMPLES, evaluated_once, gradient_of, refuse_ignored, total_of
from metalearn.algorithms.common.losses import by_sample
from metalearn.nn.layers import per_task
from metalearn.types import Algorithm, Batch, Episode, Metrics, Model, Params


def supervised(*, model: Model) -> Algorithm:
    """Learns to classify samples.

    Args:
        model: the network.

    Raises:
        ConfigError: the loss ignores a label.
    """
    refuse_ignored(model, FOR_SAMPLES)

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        support_x = support.x if support.x.shape[1] else None
        values = by_sample(model.apply(per_task(params, 1), query.x, support_x), query.y, model.loss)
        return {name: value[0] for name, value in values.items()}

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            return model.apply(per_task(params, 1), x, support.x)

        return predict

    learned = (gradient_of(outcome), evaluated_once(outcome), adapt, total_of(outcome), outcome)
    return Algorithm(model.init, *learned, trained_on="samples", evaluated_on="samples", computes=model.loss)
