"""A multi-layer perceptron, as in Finn et al. 2017 (arXiv 1703.03400), section 5.1, for the sinusoid."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Generator

from metalearn.errors import counts, one_of, whole_numbers
from metalearn.models.common.stages import stage_of, staged_model
from metalearn.nn.layers import Activation, Flatten, Layer, Linear
from metalearn.types import Model, Params, Stage


def mlp(*, inputs: int, outputs: int, hidden: Sequence[int] = (40, 40), activation: str = "relu") -> Model:
    """Linear layers with an activation between them; inputs of any shape are flattened. Raises ValueError for a width
    below 1, or an activation that does not exist."""
    counts(inputs=inputs, outputs=outputs)
    whole_numbers("hidden", hidden, example=[40, 40])
    one_of("activation", activation, ("relu", "tanh"))
    widths = [inputs, *hidden, outputs]

    def init(generator: Generator) -> Params:
        params: Params = {}
        for layer, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
            bound = math.sqrt(6 / (fan_in + fan_out))
            params[f"layer{layer}.weight"] = torch.empty(fan_out, fan_in).uniform_(-bound, bound, generator=generator)
            params[f"layer{layer}.bias"] = torch.zeros(fan_out)
        return params

    stages: list[Stage] = []
    for number in range(1, len(widths)):
        layers: list[Layer] = [Flatten()] if number == 1 else []
        layers.append(Linear(f"layer{number}.weight", f"layer{number}.bias"))
        if number < len(widths) - 1:
            layers.append(Activation("leaky_relu" if activation == "relu" else "tanh"))
        stages.append(stage_of(f"layer{number}", *layers))
    return staged_model(init, stages, transductive=False, activations=sum(widths[1:]))
