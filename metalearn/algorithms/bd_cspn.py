"""BD-CSPN, Liu et al. 2020 (arXiv 1911.10713): class means that the queries rectify, compared by cosine.

The network is trained as in supervised learning, and features have length 1. The queries X of a task are shifted to
the mean of its support set, which diminishes the bias between both sets. Each gets the class of the prototype that is
nearest by cosine as its label. The prototype of class n is then the mean of all samples of this label, support and
queries, with weights: P′_n = Σ_i w_i X_i with w_i ∝ exp(ε cos(X_i, P_n)), which diminishes the bias within the class.
The logits of a query are ε cos(X, P′_n). So the learner is transductive, whatever the model.

Without rectification this is the paper's CSPN. Several are what the paper does not have: the labels of the next one are
by the prototypes of the last. A single query is not shifted: it would be the mean of the support set.

No code of the authors was found to compare with; in that of easyfsl, too, every query gets a label.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from metalearn.algorithms.common.arithmetic import class_means, cosines
from metalearn.algorithms.common.inner import one_hot, pretrained
from metalearn.errors import not_negative, positive
from metalearn.types import Algorithm, Batch, Model


def bd_cspn(*, model: Model, eval_steps: int, scale: float) -> Algorithm:
    """Supervised learning, then prototypes that the queries of a task rectify. Raises ValueError for a negative number
    of rectifications, a scale that is not above 0, or a model without a linear head.

    Args:
        model: the network; its head has an output for every training class.
        eval_steps: rectifications in validation and test; the paper's is one.
        scale: ε, the factor of the cosines.
    """
    not_negative(eval_steps=eval_steps)
    positive(scale=scale)

    def path(examples: Tensor, queries: Tensor, support: Batch, steps: int) -> Iterator[Tensor]:
        labels = one_hot(support, examples.dtype)
        prototypes = class_means(examples, labels)
        if queries.shape[1] > 1:
            queries = queries + examples.mean(dim=1, keepdim=True) - queries.mean(dim=1, keepdim=True)
        samples = torch.cat([examples, queries], dim=1)
        yield scale * cosines(queries, prototypes)
        for _ in range(steps):
            logits = scale * cosines(samples, prototypes)
            guessed = F.one_hot(logits[:, examples.shape[1] :].argmax(dim=2), labels.shape[2]).to(examples.dtype)
            prototypes = class_means(samples, torch.cat([labels, guessed], dim=1) * logits.exp())
            yield scale * cosines(queries, prototypes)

    return pretrained(model, path, eval_steps=eval_steps, centred=False)._replace(transductive=True)
