"""A prior-fitted network: a network that reads the known rows of a task with their labels, and answers for others.

Müller et al. 2022 (arXiv 2112.10510), Algorithm 1: over tasks drawn from a prior, the log-likelihood of the asked rows'
labels is maximised. Its optimum is the posterior predictive distribution of the prior (insight 1). There is no inner
loop. `model=table` is such a network. For pictures, or any other encoder, take `algorithm=in_context`.

The loss is that of the network's head (`metalearn.models.table`), or cross-entropy for classes.

Differences from the paper: the numbers of known and asked rows are those of the dataset's tasks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.algorithms.common.inner import comparing_learner
from metalearn.errors import Invalid
from metalearn.types import Algorithm, Batch, InContext, Model, Params

# How many queries a prediction computes at once. The last of them are filled up: the shape of a product decides in
# which order it adds, so only equal shapes give a row the same bits in a call of any size.
TOGETHER = 64


def pfn(*, model: Model) -> Algorithm:
    """Trains a network that reads labelled rows (`Model.in_context`), by the log-likelihood of its answers. Raises
    ValueError for another network, or a loss or metric that is not that of its head."""
    reads = model.in_context
    if reads is None:
        advice = "type model=table, or algorithm=in_context for this network"
        raise Invalid("model", "", "has no use for labels", advice, False)
    if reads.loss is not None and model.loss is not None:
        raise Invalid(
            "loss", model.loss.name, f"model.head={reads.loss.name} has a loss of its own, and the metric mse",
            "type loss=auto metric=auto", False,
        )  # fmt: skip

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        """Answers for classes are logits, one for each class up to the last known one; of numbers their mean."""
        with torch.no_grad():
            context = reads.remember(params, support)
        classes = None if support.y.is_floating_point() else int(support.y.max()) + 1

        @torch.no_grad()
        def predict(x: Tensor) -> Tensor:
            outputs = answers(reads, params, context, x)
            return outputs[..., :classes] if reads.predictive is None else reads.predictive.mean(outputs)

        return predict

    measured = model if reads.loss is None else model._replace(loss=reads.loss)
    return comparing_learner(measured, reads.outputs, model.init)._replace(adapt=adapt, computes=model.loss)


def answers(reads: InContext, params: Params, context: object, x: Tensor) -> Tensor:
    """The outputs [t, n, d] for `x` [t, n, …], computed `TOGETHER` rows at a time: the bits of a row do not depend on
    the others."""
    parts = []
    for some in x.split(TOGETHER, dim=1):
        # By copies of the last query, not zeros: their values are as harmless as its own.
        filled = torch.cat([some, some[:, -1:].expand(-1, TOGETHER - some.shape[1], *some.shape[2:])], dim=1)
        parts.append(reads.answer(params, context, filled)[:, : some.shape[1]])
    return torch.cat(parts, dim=1)
