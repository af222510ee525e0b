"""Pictures of any kind, given the form in which a dataset has shown its own to the network; and folders of pictures."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from metalearn.errors import DataError
from metalearn.saved.form import digest_of
from metalearn.tasks.common.pictures import PictureForm, decoded, first_few, formed, one_form, picture_folders, reason
from metalearn.types import TaskSource

# Datasets of ink on paper: the whole drawing is shown, and ink is 1. The others show photographs.
DRAWINGS = ("omniglot", "glyphs", "kanji", "scripts")
LARGEST_SIZE = 1024  # the most pixels of a side of a network's picture
TABLE = ("file", "label", "probability")  # the first columns of predictions.csv; the others are named by classes
PARTS = ("train", "val", "valid", "validation", "test")  # folders of downloads: each has the same class folders

Picture = Image.Image | str | os.PathLike[str] | bytes | IO[bytes] | NDArray[Any] | Tensor
"""A picture: one of Pillow's; the path of a file, its bytes, or an open file; an array [h, w], [h, w, c] or [c, h, w]
of 1, 3 or 4 channels. An array holds whole numbers from 0 (black) to 255 (white), or real numbers from 0 to 1."""


def form_of(source: TaskSource, dataset: Mapping[str, Any]) -> PictureForm | None:
    """The form in which a dataset shows pictures: the source's `form` if it has one, else that by its group of the
    config; None if it has no pictures."""
    if isinstance(form := getattr(source, "form", None), PictureForm):
        return form
    if "image_size" not in dataset:
        return None
    drawings = str(dataset.get("_target_")).rpartition(".")[2] in DRAWINGS
    return PictureForm(dataset["image_size"], dataset.get("channels", 1), whole=drawings, inverted=drawings)


def prepared(images: Sequence[Picture], form: PictureForm) -> Tensor:
    """The pictures as the network takes them: float32 [n, channels, size, size] in [0, 1]. Raises ValueError, which
    names the picture, if one cannot be read, or something is no picture."""
    x = torch.stack(all_seen(images, form, "images")).to(torch.float32).div_(255)
    return x.unsqueeze(1) if form.channels == 1 else x.permute(0, 3, 1, 2).contiguous()


def all_seen(images: Sequence[Picture], form: PictureForm, what: str) -> list[Tensor]:
    """The pictures in their form: uint8 [size, size] or [size, size, 3]. Raises ValueError if one cannot be read; the
    message names it by its place in `what`, and by its path."""
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
    files: list[Path | bytes | None] = []  # None for what is decoded already
    for image in images:
        if isinstance(image, str | os.PathLike):
            files.append(Path(image))
            continue
        content: Any = image.read() if hasattr(image, "read") and not isinstance(image, type) else image
        files.append(bytes(content) if isinstance(content, bytes | bytearray | memoryview) else None)
    in_files = decoded([file for file in files if file is not None], form)
    pictures: list[Tensor | str] = []
    for image, file in zip(images, files, strict=True):
        picture: NDArray[np.uint8] | str
        if file is not None:
            picture = next(in_files)
        else:
            try:
                picture = formed(image if isinstance(image, Image.Image) else _from_array(image), form)
            except Exception as error:  # Pillow raises many types for broken pictures
                picture = reason(error)
        pictures.append(picture if isinstance(picture, str) else torch.tensor(picture))
    return pictures


def listed(images: object, what: str) -> list[Any]:
    """The pictures, or the labels, as a list. Raises ValueError for one picture or text, or what has no members."""
    shape = tuple(getattr(images, "shape", ()))
    colours = len(shape) == 3 and shape[2] in (3, 4)
    if isinstance(images, str | os.PathLike | Image.Image) or getattr(images, "ndim", None) in (0, 2) or colours:
        raise ValueError(f"{what}: must be a list, and is a single {type(images).__name__}; type [{what}]")
    if not isinstance(images, Iterable):
        raise ValueError(f"{what}={images!r}: must be a list; type [{what}]")
    return list(images)


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


class Found(NamedTuple):
    """Pictures by their paths from `root`, with the class that each one's folder names. If these are not known,
    `classes` is None, and `why` is the reason."""

    root: Path
    files: list[str]
    classes: list[str] | None
    why: str = ""

    @property
    def paths(self) -> list[Path]:
        return [self.root / file for file in self.files]


def support_in(root: Path, key: str = "--support ", least: int = 2, *, strict: bool = False) -> Found:
    """The pictures of every class folder below `root`, of which there must be `least`. Messages put `key` before the
    folder. Raises DataError if there are no pictures, pictures outside class folders, other files, one class, folders
    train and val of the same classes, or a class that has the name of a column of predictions.csv."""
    folders = picture_folders(root, key, strict=strict)
    if loose := folders.get("."):
        raise DataError(
            f"{key}{root}: {len(loose)} pictures lie in no class folder: {first_few(loose)}; put them into a folder "
            "named by their class"
        )
    parts = {name.partition("/")[0] for name in folders}
    if len(parts) > 1 and parts <= set(PARTS) and all("/" in name for name in folders):
        raise DataError(
            f"{key}{root}: its folders {', '.join(sorted(parts))} divide the pictures of each class, and would make "
            f"classes of their own; type {key}{root / min(parts, key=PARTS.index)}"
        )
    if taken := sorted(set(TABLE) & folders.keys()):
        raise DataError(
            f"{key}{root}: the class {taken[0]} has the name of a column of predictions.csv; rename its folder"
        )
    if len(folders) < least:
        raise DataError(
            f"{key}{root}: has one class, {first_few(sorted(folders))}; put a folder of another class beside it"
        )
    pairs = [(file, name) for name, files in folders.items() for file in files]
    return Found(root, [file for file, _ in pairs], [name for _, name in pairs])


def queries_in(root: Path, classes: list[str], key: str = "--query ") -> Found:
    """All pictures below `root`, at any depth. Their classes are known if each one's folder has the name of one. Raises
    DataError if there are no pictures."""
    folders = picture_folders(root, key)
    files = [file for pictures in folders.values() for file in pictures]
    by_form = {one_form(name): name for name in classes}
    folders = {by_form.get(one_form(name), name): pictures for name, pictures in folders.items()}
    unknown = sorted(folders.keys() - set(classes))
    if unknown:
        why = "its pictures lie in no class folders" if "." in unknown else f"no support for {first_few(unknown)}"
        return Found(root, files, None, why)
    return Found(root, files, [name for name, pictures in folders.items() for _ in pictures])


def in_support(queries: Found, support: Found) -> int:
    """The number of queries whose file is, under any name, also that of a support picture."""
    digests = set(map(digest_of, support.paths))
    return sum(digest_of(path) in digests for path in queries.paths)


def summary(support: Found) -> str:
    """`5 classes, 1 to 3 support pictures of each`."""
    counts = Counter(support.classes)
    low, high = min(counts.values()), max(counts.values())
    pictures = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(counts)} classes, {pictures} support pictures of each"
