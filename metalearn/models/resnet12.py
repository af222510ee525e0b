"""The twelve-layer residual network of few-shot learning.

Oreshkin et al. 2018 (TADAM, arXiv 1805.10123); widths and leaky ReLU as in Lee et al. 2019 (MetaOptNet,
arXiv 1904.03758), section 4.1, and their code.
"""

import math
from collections.abc import Sequence

import torch
from torch import Generator

from metalearn.errors import Invalid, counts, one_of, switches, whole_numbers
from metalearn.models.common.stages import HEAD, draw_head, stage_of, staged_model
from metalearn.nn.layers import LINEAR, Activation, ChannelsLast, Convolution, Layer, MaxPool, Mean, Norm, Residual
from metalearn.types import Model, Params, Stage

BLOCKS = 4
# The convolutions of a block, each with a norm behind it: three of 3×3 in a row, and the 1×1 shortcut around them.
LAYERS = ("layer1", "layer2", "layer3", "shortcut")

# Activations, and the slope of the leaky ReLU in the norm. The norm before a softplus is linear.
SLOPES = {"leaky_relu": 0.1, "relu": 0.0, "softplus": LINEAR}


def resnet12(
    *, ways: int, channels: int, image_size: int, widths: Sequence[int] = (64, 160, 320, 640),
    activation: str = "leaky_relu", transductive: bool = True,
) -> Model:  # fmt: skip
    """Four residual blocks, each ending in 2×2 max pooling; a spatial mean and a linear head. Raises ValueError for an
    image too small for four poolings, a choice that does not exist, or widths that are not four.

    A block is three 3×3 convolutions (no bias: the norm would cancel it) with batch norm, an activation
    between them, the block's input added through a 1×1 convolution with batch norm, and an activation.
    There is no DropBlock, which Lee et al. add for regularisation. The leaky ReLU has the slope 0.1.
    """
    counts(ways=ways, channels=channels, image_size=image_size)
    whole_numbers("widths", widths, example=[64, 160, 320, 640], count=BLOCKS)
    one_of("activation", activation, tuple(SLOPES))
    switches(transductive=transductive)
    if image_size < 2**BLOCKS:
        reason = f"must be at least {2**BLOCKS}, since images are halved {BLOCKS} times"
        raise Invalid("image_size", image_size, reason, f"type dataset.image_size={2**BLOCKS} or more")

    def init(generator: Generator) -> Params:
        params: Params = {}
        for number, width in enumerate(widths, start=1):
            for layer in LAYERS:
                fan_in = width if layer in ("layer2", "layer3") else channels if number == 1 else widths[number - 2]
                size = 1 if layer == "shortcut" else 3
                weight, scale, shift = _names(number, layer)
                std = math.sqrt(2 / (width * size**2))  # He et al. 2015 (arXiv 1502.01852), equation 14
                params[weight] = torch.empty(width, fan_in, size, size).normal_(0, std, generator=generator)
                params[scale] = torch.ones(width)
                params[shift] = torch.zeros(width)
        return params | draw_head(ways, widths[-1], generator)

    stages = (*(_block(number, activation) for number in range(1, BLOCKS + 1)), HEAD)
    activations = sum(len(LAYERS) * width * (image_size // 2**halvings) ** 2 for halvings, width in enumerate(widths))
    norms = [name for stage in stages for name in stage.params if ".norm." in name]
    return staged_model(init, stages, transductive=transductive, activations=activations, norms=norms)


def _block(number: int, activation: str) -> Stage:
    """A block; the first one takes images [t, n, c, h, w], the last one gives features [t, n, d]."""
    slope, smooth = SLOPES[activation], activation == "softplus"

    def normed(layer: str, slope: float) -> tuple[Layer, ...]:
        weight, scale, shift = _names(number, layer)
        padding = 0 if layer == "shortcut" else 1
        return Convolution(weight, padding=padding), Norm(scale, shift, slope=slope)

    def activated(layer: str) -> tuple[Layer, ...]:
        return *normed(layer, slope), *((Activation("softplus"),) if smooth else ())

    main = (*activated("layer1"), *activated("layer2"), *normed("layer3", LINEAR))
    return stage_of(
        f"block{number}",
        *([ChannelsLast()] if number == 1 else []),
        Residual(main, around=normed("shortcut", LINEAR)),
        Activation("softplus") if smooth else Activation("leaky_relu", slope),
        MaxPool(),
        *([Mean()] if number == BLOCKS else []),
    )


def _names(block: int, layer: str) -> tuple[str, str, str]:
    """The parameters of one convolution and its norm: weight, scale, shift."""
    prefix = f"block{block}.{layer}"
    return f"{prefix}.conv.weight", f"{prefix}.norm.weight", f"{prefix}.norm.bias"
