"""Pretrained weights of torchvision's classifiers: their names, how they are read, the pictures that they expect."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from metalearn.checks import Invalid, first_line
from metalearn.nn.surroundings import constant
from metalearn.saved.form import digest_of

HEADS = {
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_large": "classifier.3",
    "mobilenet_v3_small": "classifier.3",
    "regnet_y_400mf": "fc",
    "resnet18": "fc",
    "resnet34": "fc",
    "resnet50": "fc",
    "resnet101": "fc",
    "swin_t": "head",
    "vit_b_16": "heads.head",
}
"""The networks that take pretrained weights, and the name of the last linear layer of each."""

_NAME = re.compile(r"(\w+_Weights)\.(\w+)")
"""torchvision's names of weights, such as ResNet18_Weights.IMAGENET1K_V1."""

NAMED, LICENCE = "weights", "licence"
"""Entries of a safetensors file's header: torchvision's name of its weights, and their licence."""

_FORMER = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.")
"""Names of layers in torchvision's published file of densenet121, which its function for that file changes so."""

_INSIDE = ("state_dict", "model_state_dict", "model")
"""Entries of training checkpoints that hold a state dict."""

_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DataParallel, torch.compile and a LightningModule put before the names of a network within them."""

UNUSED = "num_batches_tracked"
"""The buffer of a batch norm that its outputs do not depend on; not every file has it."""

_LARGEST_SIZE = 224
"""Height and width that torchvision's networks are made for, in pixels."""

Prepare = Callable[[Tensor], Tensor]


class PretrainedWeights(NamedTuple):
    """The weights of a network without its head, by name; a function from pictures [n, 1 or 3, h, w] in [0, 1] to the
    inputs that the network was trained on; and a line for the log."""

    state: Mapping[str, Tensor]
    prepare: Prepare
    note: str


def pretrained(name: str, weights: str, input_size: int | None) -> PretrainedWeights:
    """Pretrained weights, checked against the network.

    Args:
        name: a key of `HEADS`.
        weights: the path of a state dict, saved by torch.save or safetensors; or torchvision's name of weights, which
            are downloaded unless torch's own cache has them.
        input_size: height and width to which pictures are scaled; None: those that the weights were trained with.

    Raises:
        ValueError: no such weights; they cannot be read or downloaded; or they belong to another network.
    """
    from torchvision import models  # takes a second

    known = models.get_model_weights(name)
    # vit_b_16 has a size of its own, which not all its weights are for.
    sizes = {f"{known.__name__}.{one.name}": (one, one.meta.get("min_size", (1, 1))) for one in known}
    members = {full: one for full, (one, least) in sizes.items() if max(least) <= _LARGEST_SIZE}
    if weights in members:
        chosen, note = members[weights], f"{name}: weights {weights} of torchvision"
        try:
            state = chosen.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:  # no connection, or a file that is damaged
            advice = "bring the file to this disk and type KEY=/path/to/file"
            raise _invalid(weights, f"cannot be downloaded ({error})", advice) from error
    elif _NAME.fullmatch(weights):
        advice = f"type one of {', '.join(members)}, or weights=/path"
        raise _invalid(weights, f"are not those of name={name}", advice)
    else:
        state, unpacked = _read(weights)
        chosen = members.get(meant_as(weights), known.DEFAULT)
        note = f"{name}: weights of {weights}{unpacked}, SHA-256 {digest_of(Path(weights))[:12]}…"
    asked = chosen.transforms()
    size, head = input_size or asked.crop_size[0], f"{HEADS[name]}."
    prepare = preparing(size, tuple(asked.mean), tuple(asked.std), asked.interpolation.value)
    with torch.device("meta"):
        network = models.get_model(name, weights=None)
    _load(network, state, weights, name, f"type the name=… of their network, one of {', '.join(HEADS)}", head)
    body = {key: value for key, value in network.state_dict().items() if not key.startswith(head)}
    return PretrainedWeights({key: value for key, value in body.items() if not key.endswith(UNUSED)}, prepare, note)


def meant_as(weights: str) -> str:
    """torchvision's name of weights, which asks for its own preparation of pictures: as it was typed, or as the header
    of a safetensors file has it; else empty."""
    name = header_of(weights).get(NAMED, weights)
    return name if _NAME.fullmatch(name) else ""


def header_of(weights: str) -> dict[str, str]:
    """The notes in the header of a safetensors file; of other files, none."""
    if not weights.endswith(".safetensors"):
        return {}
    with safe_open(weights, "pt") as file:
        return dict(file.metadata() or {})


def cut_head(network: nn.Module, name: str) -> int:
    """Cuts the head off the network called `name`, which then gives its inputs: the features; returns their number."""
    parent, _, last = HEADS[name].rpartition(".")
    head = network.get_submodule(HEADS[name])
    assert isinstance(head, nn.Linear)
    setattr(network.get_submodule(parent), last, nn.Identity())
    return head.in_features


def load_body(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies the weights that `pretrained` gives into the network, whose head stays as it is."""
    network.load_state_dict(dict(state), strict=False)


def load_whole(network: nn.Module, state: Mapping[str, Tensor], weights: str, name: str) -> None:
    """Copies all weights of a network, its head too.

    Raises:
        ValueError: they are those of another network.
    """
    _load(network, state, weights, name, "type the name of their network")


def _load(
    network: nn.Module, state: Mapping[str, Tensor], weights: str, name: str, advice: str, head: str | None = None
) -> None:
    """Loads all weights, or all but those of the `head`; a network on the meta device takes over the tensors."""

    def of_head(key: str) -> bool:
        return head is not None and key.startswith(head)

    body = {_FORMER.sub(r"\1\2.", key): value for key, value in state.items() if not of_head(key)}
    try:
        assign = next(network.parameters()).is_meta
        missing, unexpected = network.load_state_dict(body, strict=False, assign=assign)
        wrong = [f"{key} is missing" for key in missing if not of_head(key)]
        wrong += [f"{key} is of no layer" for key in unexpected]
    except RuntimeError as error:  # a line for each wrong shape
        wrong = [line.strip() for line in str(error).splitlines()[1:]] or [first_line(error)]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise _invalid(weights, f"are not those of {name}: {', '.join(wrong[:3])}{more}", advice)


def read_state(path: str) -> dict[str, Tensor]:
    """The state dict in a file of torch.save or safetensors; nothing in it is run.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    return _read(path)[0]


def _read(path: str) -> tuple[dict[str, Tensor], str]:
    """The state dict in a file, which may hold a checkpoint with a state dict in it, of a network in a wrapper; and
    what was made of the file, in words."""
    if not Path(path).is_file():
        advice = "or a name of torchvision's such as weights=ResNet18_Weights.IMAGENET1K_V1"
        raise _invalid(path, "there is no such file", f"type the path of a state dict, {advice}")
    state: Any
    try:
        if path.endswith(".safetensors"):
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise many types for what they cannot read
        reason = first_line(error).partition(". ")[0]
        advice = "type the path of a state dict that torch.save or safetensors has saved"
        raise _invalid(path, f"cannot be read ({reason})", advice) from error
    words = ""
    for name in _INSIDE:
        if not _is_state(state) and isinstance(state, dict) and _is_state(state.get(name)):
            state, words = state[name], f", entry {name}"
    if not _is_state(state):
        advice = f"save network.state_dict(), as the whole file or as its entry {' or '.join(_INSIDE)}"
        raise _invalid(path, "is no state dict: names with tensors", advice)
    while prefix := next((before for before in _WRAPPERS if all(name.startswith(before) for name in state)), ""):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
        words += f", without the prefix {prefix}"
    return dict(state), words


def _is_state(content: object) -> bool:
    pairs = content.items() if isinstance(content, dict) else ()
    return bool(pairs) and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs)


def _invalid(weights: str, allowed: str, advice: str) -> Invalid:
    return Invalid("weights", weights, allowed, advice, quoted=False)


def preparing(size: int, mean: Sequence[float], std: Sequence[float], mode: str) -> Prepare:
    """A function from pictures [n, 1 or 3, h, w] in [0, 1] to pictures [n, 3, size, size], normalised by the mean and
    deviation of each colour."""
    colours = [constant(torch.tensor(values, dtype=torch.float64).view(3, 1, 1)) for values in (mean, std)]

    def prepare(x: Tensor) -> Tensor:
        pictures = x.expand(-1, 3, -1, -1)
        if pictures.shape[2:] != (size, size):
            pictures = F.interpolate(pictures, size=(size, size), mode=mode, align_corners=False, antialias=True)
        centre, scale = (values(x.device, x.dtype) for values in colours)
        return (pictures - centre) / scale

    return prepare
