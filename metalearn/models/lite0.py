"""EfficientNet-Lite0 with the ImageNet weights that pip brings, as a frozen network."""

from torch import nn

from metalearn.checks import Invalid, one_of, whole_number
from metalearn.models.common.adapter import floats_of
from metalearn.models.common.frozen import frozen_model
from metalearn.models.common.lite0 import (
    COLOURS,
    INSTALL,
    LICENCE,
    PACKAGES,
    SIZE,
    WIDTH,
    Lite0Maps,
    brought_weights,
    lite0_network,
    missing_packages,
)
from metalearn.models.common.weights import load_whole, preparing, read_state
from metalearn.types import Model


def lite0(*, ways: int, channels: int, image_size: int, input_size: int | None = None) -> Model:
    """The features of EfficientNet-Lite0, which stay as they are, and a linear head.

    Learned are the head, and one factor for each feature, which starts at 1. Nothing is downloaded.

    Args:
        ways: outputs of the head.
        channels: of an image: 3, or 1, which is repeated three times.
        image_size: height and width of an image, in pixels.
        input_size: height and width to which pictures are scaled; None: 224, as in its training.

    Raises:
        ValueError: the packages are not installed, or a number is out of range.
    """
    whole_number("ways", ways, at_least=1)
    one_of("channels", channels, (3, 1))
    whole_number("image_size", image_size, at_least=1)
    size = SIZE if input_size is None else input_size
    whole_number("input_size", size, at_least=32)
    if missing := missing_packages(weights=True):
        raise Invalid(
            "_target_", "lite0", f"{' and '.join(missing)} are not installed", f"type {INSTALL}", quoted=False
        )
    network = lite0_network()
    weights = str(brought_weights())
    load_whole(network, read_state(weights), weights, "lite0")
    body = nn.Sequential(Lite0Maps(network), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    prepare = preparing(size, *COLOURS, "bicubic")
    floats = floats_of(body, name="lite0", shape=(3, size, size), advice="type model.input_size=224")
    model = frozen_model(body, prepare=prepare, ways=ways, width=WIDTH, activations=floats)
    return model._replace(note=f"EfficientNet-Lite0: ImageNet weights of {PACKAGES[1]}, {LICENCE}")
