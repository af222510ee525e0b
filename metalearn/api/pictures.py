"""Pictures of any kind, given the form in which a dataset has shown its own to the network."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from metalearn.tasks.common.pictures import PictureForm, Pixels, decoded, formed, reason
from metalearn.types import TaskSource

DRAWINGS = (
    "omniglot", "omniglot_pretraining", "omniglot_drawers", "glyphs", "glyph_pretraining", "kanji", "scripts",
)  # fmt: skip
"""Datasets of ink on paper: the whole drawing is shown, and ink is 1. The others show photographs."""

LARGEST_SIZE = 1024
"""The most pixels of a side of a network's picture."""

Picture = Image.Image | str | os.PathLike[str] | bytes | IO[bytes] | NDArray[Any] | Tensor
"""A picture: one of Pillow's; the path of a file, its bytes, or an open file; an array [h, w], [h, w, c] or [c, h, w]
of 1, 3 or 4 channels. An array holds whole numbers from 0 (black) to 255 (white), or real numbers from 0 to 1."""


def form_of(source: TaskSource, dataset: Mapping[str, Any]) -> PictureForm | None:
    """The form in which a dataset shows pictures: the source's own `form` if it has one, else the form by its group of
    the config; None if it has no pictures."""
    own = getattr(source, "form", None)
    if isinstance(own, PictureForm):
        return own
    if "image_size" not in dataset:
        return None
    drawings = str(dataset.get("_target_")).rpartition(".")[2] in DRAWINGS
    return PictureForm(dataset["image_size"], dataset.get("channels", 1), whole=drawings, inverted=drawings)


def prepared(images: Sequence[Picture], form: PictureForm, what: str = "images") -> Tensor:
    """The pictures as the network takes them: float32 [n, channels, size, size] in [0, 1].

    Args:
        what: the argument that messages name.

    Raises:
        ValueError: a picture cannot be read, or something is no picture. The message names it.
    """
    x = torch.stack(all_seen(images, form, what)).to(torch.float32).div_(255)
    return x.unsqueeze(1) if form.channels == 1 else x.permute(0, 3, 1, 2).contiguous()


def all_seen(images: Sequence[Picture], form: PictureForm, what: str) -> list[Tensor]:
    """The pictures in their form: uint8 [size, size] or [size, size, 3].

    Raises:
        ValueError: one cannot be read. The message names it by its place in `what`, and by its path.
    """
    pictures: list[Tensor] = []
    for number, (image, picture) in enumerate(zip(images, seen(images, form), strict=True)):
        if isinstance(picture, str):
            path = f"={os.fspath(image)}" if isinstance(image, str | os.PathLike) else ""
            advice = "; replace the file, or leave it out" if path and ";" not in picture else ""
            raise ValueError(f"{what}[{number}]{path}: cannot be read: {picture}{advice}")
        pictures.append(picture)
    return pictures


def seen(images: Sequence[Picture], form: PictureForm) -> list[Tensor | str]:
    """As `all_seen`; in place of a picture that cannot be read, the reason."""
    files = [_file_of(image) for image in images]
    in_files = decoded([file for file in files if file is not None], form)
    each = (_shown(x, form) if file is None else next(in_files) for x, file in zip(images, files, strict=True))
    return [picture if isinstance(picture, str) else torch.tensor(picture) for picture in each]


def _file_of(image: Any) -> Path | bytes | None:
    """The path of a picture, or the bytes of its file; None for what is decoded already."""
    if isinstance(image, str | os.PathLike):
        return Path(image)
    if hasattr(image, "read") and not isinstance(image, type):
        image = image.read()
    return bytes(image) if isinstance(image, bytes | bytearray | memoryview) else None


def listed(images: object, what: str) -> list[Any]:
    """The pictures, or the labels, as a list.

    Raises:
        ValueError: it is one picture or one text, or nothing that has members.
    """
    shape = tuple(getattr(images, "shape", ()))
    colours = len(shape) == 3 and shape[2] in (3, 4)
    if isinstance(images, str | os.PathLike | Image.Image) or getattr(images, "ndim", None) in (0, 2) or colours:
        raise ValueError(f"{what}: must be a list, and is a single {type(images).__name__}; type [{what}]")
    if not isinstance(images, Iterable):
        raise ValueError(f"{what}={images!r}: must be a list; type [{what}]")
    return list(images)


def _shown(image: Any, form: PictureForm) -> Pixels | str:
    """A picture that is no file, in its form; if it is no picture, the reason."""
    try:
        return formed(image if isinstance(image, Image.Image) else _from_array(image), form)
    except Exception as error:  # Pillow raises many types for broken pictures
        return reason(error)


def _from_array(image: object) -> Image.Image:
    if isinstance(image, Tensor):
        image, first = image.detach().cpu().numpy(), True
    elif isinstance(image, np.ndarray):
        first = False
    else:
        raise ValueError(f"a {type(image).__name__} is no picture; take a PIL picture, a path, or an array [h, w, 3]")
    if image.size == 0:
        raise ValueError(f"an array of shape {image.shape} holds no pixel")
    if image.dtype == np.bool_:
        image = image.astype(np.uint8) * 255
    top = 1 if np.issubdtype(image.dtype, np.floating) else 255
    real = np.issubdtype(image.dtype, np.number) and not np.issubdtype(image.dtype, np.complexfloating)
    if not real or not (image.min() >= 0 and image.max() <= top):
        raise ValueError(f"an array of {image.dtype} must hold numbers from 0 (black) to {top} (white)")
    image = ((image * 255).round() if top == 1 else image).astype(np.uint8)
    # Channels come last or first; where both are possible, as torch and numpy have them.
    kinds = (1, 3, 4)
    if image.ndim == 3 and image.shape[0] in kinds and (first or image.shape[2] not in kinds):
        image = image.transpose(1, 2, 0)
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in kinds):
        raise ValueError(f"an array of shape {image.shape} must be [h, w], [h, w, 3] or [3, h, w]")
    return Image.fromarray(np.ascontiguousarray(image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image))
