"""The four-block convolutional network of few-shot learning.

Vinyals et al. 2016 (arXiv 1606.04080), section 4.1; with stride 2 in place of pooling and a spatial
mean before the head as in Finn et al. 2017 (arXiv 1703.03400), section 5.2 (Omniglot).
"""

import math

import torch
from torch import Generator

from metalearn.errors import Invalid, one_of, true_or_false, whole_number
from metalearn.models.common.stages import HEAD, draw_head, stage_of, staged_model
from metalearn.nn.layers import LINEAR, Activation, ChannelsLast, Convolution, Flatten, Layer, MaxPool, Mean, Norm
from metalearn.types import Model, Params, Stage

BLOCKS = 4

# Activations, and the slope of the leaky ReLU in the norm. The norm before a softplus is linear.
SLOPES = {"relu": 0.0, "leaky_relu": 0.01, "softplus": LINEAR}


def conv4(
    *, ways: int, channels: int, image_size: int, filters: int = 64, downsample: str = "stride",
    activation: str = "relu", transductive: bool = True,
) -> Model:  # fmt: skip
    """Four blocks of 3×3 convolution (no bias: the norm would cancel it), batch norm, activation. Raises ValueError for
    an image too small for four poolings, or a choice that does not exist.

    With `downsample=stride` features are the mean over space, with `pool` (2×2, the largest) they are flattened maps.
    The leaky ReLU has the slope 0.01, as in the code of MAML++ (Antoniou et al. 2019, arXiv 1810.09502).
    """
    for name, value in (("ways", ways), ("channels", channels), ("image_size", image_size), ("filters", filters)):
        whole_number(name, value, at_least=1)
    one_of("downsample", downsample, ("stride", "pool"))
    one_of("activation", activation, tuple(SLOPES))
    true_or_false("transductive", transductive)
    if downsample == "pool" and image_size < 2**BLOCKS:
        reason = f"images of {image_size} pixels cannot be halved {BLOCKS} times"
        raise Invalid("downsample", downsample, reason, "type KEY=stride")
    if downsample == "stride":
        map_sizes = [math.ceil(image_size / 2**halvings) for halvings in range(1, BLOCKS + 1)]
        features = filters
    else:
        map_sizes = [image_size // 2**halvings for halvings in range(BLOCKS)]
        features = filters * (image_size // 2**BLOCKS) ** 2

    def init(generator: Generator) -> Params:
        params: Params = {}
        for block in range(1, BLOCKS + 1):
            fan_in = (channels if block == 1 else filters) * 9
            bound = math.sqrt(6 / (fan_in + filters * 9))
            shape = (filters, fan_in // 9, 3, 3)
            params[f"conv{block}.weight"] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            params[f"norm{block}.weight"] = torch.ones(filters)
            params[f"norm{block}.bias"] = torch.zeros(filters)
        return params | draw_head(ways, features, generator)

    stages = (*(_block(number, downsample, activation) for number in range(1, BLOCKS + 1)), HEAD)
    norms = [name for stage in stages for name in stage.params if name.startswith("norm")]
    activations = filters * sum(size**2 for size in map_sizes)
    return staged_model(init, stages, transductive=transductive, activations=activations, norms=norms)


def _block(number: int, downsample: str, activation: str) -> Stage:
    """A block; the first one takes images [t, n, c, h, w], the last one gives features [t, n, d]."""
    strided = downsample == "stride"
    layers: list[Layer] = [ChannelsLast()] if number == 1 else []
    layers.append(Convolution(f"conv{number}.weight", stride=2 if strided else 1, padding=1))
    layers.append(Norm(f"norm{number}.weight", f"norm{number}.bias", slope=SLOPES[activation]))
    if activation == "softplus":
        layers.append(Activation("softplus"))
    if not strided:
        layers.append(MaxPool())
    if number == BLOCKS:
        layers.append(Mean() if strided else Flatten(channels_last=True))
    return stage_of(f"block{number}", *layers)
