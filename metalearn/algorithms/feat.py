"""FEAT, Ye et al. 2020 (arXiv 1812.03664): prototypes that see each other.

The class means P [ways, d] of a task are a set, which one layer of self-attention with a single head adapts:
P′ = LayerNorm(P + softmax(P W_q (P W_k)ᵀ / √d) P W_v W_o). The logits of a query are −‖z − P′_k‖² / T.

The head of the model is left out.

Differences from the authors' code:

- They begin with a network that was trained to classify all training classes, and teach the attention ten times as fast
  as the network: `init_from` takes any run of the same network, and the rate is one.
- Their loss has a second term, which adapts the samples of each class as a set, and their layer has dropout.
- Their prototypes and queries may be compared by cosine.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import class_means, part, prefixed, squared_distances, without
from metalearn.algorithms.common.inner import comparing_learner, features_and_head, one_hot, without_head
from metalearn.errors import positive
from metalearn.nn.attention import set_attention
from metalearn.nn.layers import shared_linear
from metalearn.types import Algorithm, Batch, Model, Params

SET = "set."  # the prefix of the names of the attention's parameters


def feat(*, model: Model, temperature: float) -> Algorithm:
    """Learns features, and to adapt the class means of a task to each other. Raises ValueError for a temperature that
    is not above 0, or a model without a linear head.

    Args:
        model: the network; its head is left out.
        temperature: T, which divides the squared distances.
    """
    positive(temperature=temperature)
    network, (_, head) = without_head(model), features_and_head(model)

    def init(generator: Generator) -> Params:
        width = model.init(Generator().manual_seed(0))[head.params[0]].shape[1]
        drawn = torch.empty(4 * width, width).normal_(0, width**-0.5, generator=generator)
        layer = {"in": drawn[: 3 * width], "out.weight": drawn[3 * width :], "out.bias": torch.zeros(width)}
        norm = {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
        return network(generator) | prefixed(SET, layer | norm)

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        layer, features = part(SET, params), model.features_of(without(SET, params), support.x.shape[0])
        examples = features(support.x)
        prototypes = class_means(examples, one_hot(support, examples.dtype))
        queries, keys, values = shared_linear(prototypes, layer["in"]).unsqueeze(1).chunk(3, dim=3)
        mixed = set_attention(queries, keys, values, prototypes.shape[1]).squeeze(1)
        mixed = prototypes + shared_linear(mixed, layer["out.weight"], layer["out.bias"])
        adapted = F.layer_norm(mixed, mixed.shape[2:], layer["norm.weight"], layer["norm.bias"])
        return -squared_distances(features(x, support.x), adapted) / temperature

    return comparing_learner(model, compare, init)
