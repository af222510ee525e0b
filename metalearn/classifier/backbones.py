"""Pretrained networks that stay as they are: they give the features of pictures, from which a head learns."""

import copy
import difflib
import hashlib
import importlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metalearn.api.pictures import LARGEST_SIZE
from metalearn.errors import ConfigError, Invalid, first_line, install, one_of, whole_number
from metalearn.models import lite0
from metalearn.models.common import pretrained as files
from metalearn.storage import cache
from metalearn.tasks.common.pictures import PictureForm

DEFAULT = "efficientnet_lite0"  # the backbone that pip brings with its weights
OF_CODE = "module "  # begins the names of backbones that code has made
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_BY_NAME = "pretrained"  # stands for the weights that timm brings for a name

log = logging.getLogger("metalearn")


@dataclass(frozen=True, eq=False)
class Backbone:
    """A pretrained network."""

    name: str  # as it was typed
    named: str  # the name of its weights that torchvision, timm or a hub has; empty for others
    state: Mapping[str, Tensor]  # the weights, by name, if these and `name` are enough to build it; else empty
    packaged: bool  # whether the weights come with a package, so that no folder needs them
    digest: str  # the SHA-256 of its weights, and of how it is shown a picture
    form: PictureForm  # how it is shown a picture
    width: int  # the number of features
    note: str  # a line on where the weights come from, with their licence where it is known
    licence: str | None  # of the weights; None if it is not known
    network: nn.Module  # from pictures float32 [n, 3, size, size] in [0, 1] to features float32 [n, width]

    def features(self, pictures: Sequence[Tensor]) -> Tensor:
        """The features of pictures, uint8 [size, size, 3] each: float32 [n, width]."""
        if not len(pictures):
            return torch.empty(0, self.width)
        # One by one, so that no other picture changes the bits of an answer. On a CPU it is as fast as 4 or 16 at once.
        with torch.inference_mode():
            features = [self.network(picture[None].permute(0, 3, 1, 2).float() / 255) for picture in pictures]
        return torch.cat(features).clone()


def backbone_of(name: str | nn.Module | Backbone = DEFAULT, weights: str | None = None) -> Backbone:
    """A backbone by its name: `efficientnet_lite0`; a key of `HEADS`, a network of torchvision; or `timm:NAME`. Or one
    of code: a module is shown pictures as `of_module` does by default. Raises ValueError for a name that is not known,
    weights that are not there or not of this network, a missing package.

    Args:
        weights: None: those that the name stands for, downloaded by its library if they are not there. Of
            `efficientnet_lite0`, or a network of torchvision or timm: the path of a state dict, or torchvision's name
            of weights, or for timm `pretrained`.
    """
    if not isinstance(name, str):
        if weights is not None:
            raise ConfigError(f"weights={weights}: the backbone is a module, which has its own; load them into it")
        return name if isinstance(name, Backbone) else of_module(name)
    library, _, rest = name.partition(":")
    if library == "timm":
        return _of_timm(rest, weights)
    ours = name.lower()
    if ours not in (DEFAULT, *files.HEADS):
        allowed = ", ".join([DEFAULT, *files.HEADS, "timm:NAME"])
        raise ConfigError(f"backbone={name}: is not known; allowed: {allowed}")
    return _efficientnet_lite0(weights) if ours == DEFAULT else _of_torchvision(ours, weights)


def of_module(
    network: nn.Module, *, size: int = 224, mean: Sequence[float] = IMAGENET_MEAN, std: Sequence[float] = IMAGENET_STD,
    crop: float = 1.0, resample: str = "bicubic", whole: bool = False,
) -> Backbone:  # fmt: skip
    """A network of code, with the weights that it has. A copy of it is used, in eval mode. Raises ValueError if it
    cannot take such pictures, or gives something else.

    Args:
        network: from pictures [n, 3, size, size] to features [n, width], or [n, width, h, w], which are averaged.
        mean, std: of the colours, by which values in [0, 1] are normalised.
        size, crop, resample, whole: as in `PictureForm`.
    """
    used = copy.deepcopy(network).float().cpu().eval().requires_grad_(False)
    name = f"{OF_CODE}{type(network).__name__}"
    note = f"its own weights; pictures of {size} × {size} less the mean {[*mean]}, by {[*std]}; its output"
    form = PictureForm(size, 3, whole, False, crop, resample)
    return _backbone(name, "", used, form, (mean, std), note, None, {})


def _backbone(
    name: str, named: str, network: nn.Module, form: PictureForm, colours: Sequence[Sequence[float]], note: str,
    licence: str | None, state: Mapping[str, Tensor], *, packaged: bool = False,
) -> Backbone:  # fmt: skip
    """A backbone of a network from normalised pictures [n, 3, h, w] to features [n, width], or to maps of them."""
    whole_number("size", form.size, at_least=1, at_most=LARGEST_SIZE)
    one_of("resample", form.resample, ("lanczos", "bicubic", "bilinear", "box", "hamming", "nearest"))
    if not 0 < form.crop <= 1 or len(colours) != 2 or any(len(values) != 3 for values in colours):
        raise ConfigError(f"backbone={name}: crop={form.crop} must be in (0, 1], mean and std must have 3 numbers")
    whole, weights = _Normalised(network, *colours).eval().requires_grad_(False), network.state_dict()
    try:
        with torch.inference_mode():
            features = whole(torch.zeros(1, 3, form.size, form.size))
    except Exception as error:  # of any type: the network may be anybody's
        takes = f"[n, 3, {form.size}, {form.size}]"
        raise ConfigError(f"backbone={name}: cannot take pictures {takes}: {first_line(error)}") from error
    if features.dim() != 2:
        gives = f"gives {[*features.shape]} for a picture"
        raise ConfigError(f"backbone={name}: {gives}; it must give [1, width] or [1, width, h, w]")
    if not features.isfinite().all():
        raise ConfigError(f"backbone={name}: its features of a black picture are not finite; take other weights")
    note = f"{name}, {note}; licence: {licence or 'not known'}"
    digest = hashlib.sha256(repr((form, colours)).encode())
    for key in sorted(weights):
        digest.update(key.encode())
        digest.update(weights[key].contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    width = features.shape[1]
    return Backbone(name, named, state, packaged, digest.hexdigest(), form, width, note, licence, whole)


def features_from_cache(backbone: Backbone, pictures: Sequence[Tensor]) -> Tensor:
    """The features of pictures, float32 [n, width]; from the cache if they are there."""
    digest = hashlib.sha256(f"{backbone.digest} {backbone.form}".encode())
    for picture in pictures:
        digest.update(hashlib.sha256(picture.numpy().tobytes()).digest())

    def content() -> cache.Parts:
        buffer = io.BytesIO()
        np.save(buffer, backbone.features(pictures).numpy())
        return [buffer.getvalue()]

    try:
        file, _, _ = cache.get(f"features-{digest.hexdigest()[:24]}.npy", content)
    except cache.CacheError as error:
        log.warning("%s", error)
        return backbone.features(pictures)
    with file:
        return torch.from_numpy(np.load(file, allow_pickle=False))


def _efficientnet_lite0(weights: str | None) -> Backbone:
    """EfficientNet-Lite0, trained on ImageNet."""
    if missing := lite0.missing_packages(weights=weights is None):
        raise ConfigError(
            f"backbone={DEFAULT}: {' and '.join(missing)} are not installed; type {lite0.INSTALL}, or another backbone "
            "with its weights, such as --backbone resnet18 --weights /path/to/resnet18.pth"
        )
    network, licence = lite0.lite0_network(), lite0.LICENCE
    if weights is None:
        brought, note = str(lite0.brought_weights()), f"ImageNet weights of {lite0.PACKAGES[1].replace('_', '-')}"
    else:
        brought, note, licence = weights, f"weights of {weights}", files.header_of(weights).get(files.LICENCE) or ""
    state, _ = files.read_state(brought)
    files.load_whole(network, state, brought, DEFAULT)
    network.eval().requires_grad_(False)
    form, packaged, maps = PictureForm(lite0.SIZE, 3), weights is None, lite0.Lite0Maps(network)
    return _backbone(DEFAULT, "", maps, form, lite0.COLOURS, note, licence or None, state, packaged=packaged)


def _of_torchvision(name: str, weights: str | None) -> Backbone:
    from torchvision import models  # takes a second

    available = models.get_model_weights(name)
    source = f"{available.__name__}.{available.DEFAULT.name}" if weights is None else weights
    try:
        state, _, note = files.pretrained(name, source, None)
    except Invalid as error:
        if weights is not None:
            raise
        advice = (
            f"type --weights /path/to/{name}.pth; or take the default network, whose weights come with {lite0.INSTALL}"
        )
        raise _not_there(f"backbone={name}", error.__cause__ or error, advice) from error
    network: nn.Module = models.get_model(name, weights=None)
    network.load_state_dict(state, strict=False)
    files.cut_head(network, name)
    network.eval().requires_grad_(False)
    named = files.meant_as(source)
    asked = (available[named.rpartition(".")[2]] if named else available.DEFAULT).transforms()
    size = asked.crop_size[0]
    form = PictureForm(size, 3, crop=size / asked.resize_size[0], resample=asked.interpolation.value)
    note, licence = note.removeprefix(f"{name}: "), files.header_of(source).get(files.LICENCE) or None
    return _backbone(name, named, network, form, (asked.mean, asked.std), note, licence, network.state_dict())


def _of_timm(name: str, weights: str | None) -> Backbone:
    """A network of timm without its classifier: its features are pooled as timm does."""
    key = f"backbone=timm:{name}"
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise ConfigError(f"{key}: timm is not installed; type {install('backbones')}") from error
    if not timm.is_model(name):
        near = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0))
        raise ConfigError(f"{key}: timm has no such network; nearest are {near}")
    named = weights in (None, _BY_NAME)
    try:
        network: Any = timm.create_model(name, pretrained=named, num_classes=0)
    except Exception as error:  # no connection, no weights of this name, a damaged file
        raise _not_there(key, error, "type --weights /path/to/its/state_dict") from error
    asked = network.pretrained_cfg
    if not named:
        assert weights is not None
        state, heads = files.read_state(weights)[0], asked.get("classifier") or ()
        heads = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
        files.load_whole(network, {k: v for k, v in state.items() if not k.startswith(heads)}, weights, f"timm:{name}")
    data = timm.data.resolve_model_data_config(network)
    (channels, high, wide), mode = data["input_size"], data["crop_mode"]
    if channels != 3 or high != wide or mode not in ("center", "squash"):
        raise ConfigError(f"{key}: takes {data['input_size']} by {mode}; only squares of 3 colours can be shown")
    form = PictureForm(high, 3, mode == "squash", False, data["crop_pct"], data["interpolation"])
    licence = asked.get("license") if named else files.header_of(weights or "").get(files.LICENCE)
    note = f"{'timm’s weights' if named else weights}; its features before the classifier"
    colours, origin, state = (data["mean"], data["std"]), _BY_NAME if named else "", network.state_dict()
    return _backbone(f"timm:{name}", origin, network, form, colours, note, licence or None, state)


class _Normalised(nn.Module):
    """A network that is shown pictures [n, 3, size, size] in [0, 1], normalised; maps of features are averaged."""

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(list(values)).view(3, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        features: Tensor = self.network((pictures - self.get_buffer("mean")) / self.get_buffer("std"))
        return features.mean(dim=(2, 3)) if features.dim() == 4 else features


def _not_there(key: str, error: BaseException, advice: str) -> ConfigError:
    return ConfigError(f"{key}: its weights cannot be had ({first_line(error)}); bring them to this disk and {advice}")
