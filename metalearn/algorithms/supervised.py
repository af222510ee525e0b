"""Plain classification: no tasks and no adaptation, one network for all samples.

The loss of a step is the mean over its samples; with `loss=auto` it is their cross-entropy. The trainer's chunks are
micro-batches here. In training, batch normalisation takes its statistics from one micro-batch; in evaluation, from a
fixed set of training samples, unless the model is transductive.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.algorithms.common.inner import trained_on_samples
from metalearn.nn.layers import per_task
from metalearn.types import Algorithm, Batch, Model, Params


def supervised(*, model: Model) -> Algorithm:
    """Learns to classify samples. Raises ConfigError if the loss ignores a label."""

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        return torch.no_grad()(lambda x: model.apply(per_task(params, 1), x, support.x))

    return trained_on_samples(model, adapt)._replace(evaluated_on="samples")
