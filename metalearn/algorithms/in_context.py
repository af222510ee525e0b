"""An in-context learner: a transformer reads the support set and the queries, and answers. There is no inner loop.

GPICL, Kirsch et al. 2022 (arXiv 2212.04458): a transformer that is trained on many tasks learns to learn in its forward
pass. CAML, Fifty et al. 2024 (arXiv 2310.10971), section 3: samples and labels as one set without an order; a query has
a learned token in place of its label. What differs here: the encoder is trained with the transformer, and a query
attends to the support set and itself only.

The order of the support set changes nothing, and no query depends on another; with `model.transductive=true` the
encoder's norms still do. At first, queries and keys of the attention have the same weights, so that a sample attends to
those like it.

Differences from the papers:

- GPICL's inputs are a sequence with a causal mask, whose every position is a prediction. Ours is a set, as CAML's.
- GPICL embeds pixels by a linear map; CAML has a large pretrained encoder. Ours is any network, trained along.
- CAML's class embeddings are fixed vectors at equal angles; ours are learned. Theirs are far larger.
"""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import part, prefixed, without
from metalearn.algorithms.common.inner import comparing_learner, features_and_head
from metalearn.errors import ConfigError, Invalid, counts
from metalearn.nn.attention import draw_transformer, transformer
from metalearn.nn.layers import shared_linear
from metalearn.nn.surroundings import surroundings
from metalearn.types import Algorithm, Batch, Model, Params

SET = "set."  # the prefix of the names of the transformer's parameters


def in_context(*, model: Model, width: int, heads: int, layers: int) -> Algorithm:
    """Learns to predict queries from a support set in one forward pass; of classes or of real numbers. Raises
    ValueError for a number below 1, heads that do not divide the width, or a model without a linear head.

    Args:
        model: the encoder of the samples. Its head is left out, but says how many outputs there are.
        width: numbers in the token of a sample.
        heads: heads of the attention; a divisor of `width`.
        layers: blocks of the transformer.
    """
    counts(width=width, heads=heads, layers=layers)
    if width % heads:
        divisor = next(number for number in range(min(heads, width), 0, -1) if width % number == 0)
        raise Invalid("heads", heads, f"must divide width={width}", f"type KEY={divisor}")
    _, head = features_and_head(model)

    def init(generator: Generator) -> Params:
        drawn = model.init(generator)
        outputs, inputs = drawn[head.params[0]].shape
        body = {name: value for name, value in drawn.items() if name not in head.params}
        of_features = torch.empty(width, inputs).normal_(0, inputs**-0.5, generator=generator)
        of_label = torch.empty(width, outputs + 1).normal_(0, 1, generator=generator)
        token = {"token.weight": torch.cat([of_features, of_label], dim=1), "token.bias": torch.zeros(width)}
        blocks = draw_transformer(width, layers, generator)
        weight = torch.empty(outputs, width).normal_(0, 0.01, generator=generator)
        return body | prefixed(SET, token | blocks | {"head.weight": weight, "head.bias": torch.zeros(outputs)})

    def compare(params: Params, support: Batch, x: Tensor) -> Tensor:
        weights, context_size = part(SET, params), support.x.shape[1]
        features = model.features_of(without(SET, params), support.x.shape[0])
        seen = torch.cat([features(support.x), features(x, support.x)], dim=1)
        tokens = torch.cat([seen, label_tokens(support, x.shape[1], len(weights["head.bias"]), seen.dtype)], dim=2)
        tokens = shared_linear(tokens, weights["token.weight"], weights["token.bias"])
        tokens = transformer(weights, tokens, context_size=context_size, heads=heads, layers=layers)
        outputs = shared_linear(tokens[:, context_size:], weights["head.weight"], weights["head.bias"])
        return outputs[..., : surroundings().present]

    return comparing_learner(model, compare, init)


def label_tokens(support: Batch, queries: int, outputs: int, dtype: torch.dtype) -> Tensor:
    """What a token has of its sample's label, [t, n + queries, outputs + 1]: for the support set the class as one-hot,
    or the numbers, and 0; for the queries nothing but a 1, which says that the label is unknown. Raises ConfigError
    unless the targets are as many numbers as the model has outputs."""
    y = support.y
    if y.is_floating_point():
        if y.shape[2] != outputs:
            reason = f"it has {outputs} outputs, and targets here are {y.shape[2]} numbers"
            raise ConfigError(f"model: {reason}; type model.outputs={y.shape[2]}")
        labels = y.to(dtype)
    else:
        labels = (y.unsqueeze(2) == torch.arange(outputs, device=y.device)).to(dtype)
    unknown = torch.cat([labels.new_zeros(len(y), queries, outputs), labels.new_ones(len(y), queries, 1)], dim=2)
    return torch.cat([F.pad(labels, (0, 1)), unknown], dim=1)
