"""Pictures of classes that several people have drawn, in one folder: `pictures.npy` and `index.json`.

`pictures.npy` is an array uint8 [n, side, side] or [n, side, side, 3], class after class. `index.json` names the
classes, and of each its split and who has drawn its pictures. It has the SHA-256 of the array and of itself, and is
written last: a folder without it is not whole. Of photographs, one "drawer" says where they come from.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from metalearn.errors import DataError
from metalearn.storage.files import read_object, write_atomically, writing
from metalearn.tasks.common.cache import array_header, cached_array
from metalearn.tasks.common.episodes import SPLITS, Images

INDEX, PICTURES = "index.json", "pictures.npy"
FORMAT = "metalearn drawn 1"

log = logging.getLogger(__name__)

_FIELDS = {"format": str, "name": str, "picture": list, "drawers": list, "classes": list, "array": str, "sha256": str}


class DrawnClass(NamedTuple):
    """A class: its `key`, which never changes, what people call it, its split, the numbers of those who have drawn its
    pictures, and a digest of these."""

    key: str
    name: str
    split: str
    drawers: Sequence[int]
    digest: str = ""


class DrawnSet(NamedTuple):
    """What index.json says. `digest` is the SHA-256 of the array; `shape` is that of a picture."""

    name: str
    shape: tuple[int, ...]
    drawers: Sequence[str]
    classes: Sequence[DrawnClass]
    digest: str

    @property
    def total(self) -> int:
        """The number of pictures."""
        return sum(len(one.drawers) for one in self.classes)


def digest_of(pictures: Images) -> str:
    """A digest of the pictures of a class."""
    return hashlib.sha256(np.ascontiguousarray(pictures).data).hexdigest()[:16]


def write_set(
    folder: Path, name: str, drawers: Sequence[str], shape: tuple[int, ...],
    classes: Iterable[tuple[DrawnClass, Images]], count: int,
) -> DrawnSet:  # fmt: skip
    """Writes a set of `count` pictures, class after class; returns its index.

    Raises:
        DiskError, RunError: it cannot be written.
    """
    written: list[DrawnClass] = []
    digest, temporary = hashlib.sha256(), folder / f".{PICTURES}.tmp"
    with writing(temporary), temporary.open("wb") as file:
        head = array_header((count, *shape))
        digest.update(head)
        file.write(head)
        for one, pictures in classes:
            assert pictures.shape == (len(one.drawers), *shape) and pictures.dtype == np.uint8
            content = np.ascontiguousarray(pictures).reshape(-1).data
            digest.update(content)
            file.write(content)
            written.append(one._replace(digest=digest_of(pictures)))
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(folder / PICTURES)
    made = DrawnSet(name, shape, drawers, written, digest.hexdigest())
    assert made.total == count
    index = {
        "format": FORMAT, "name": name, "picture": shape, "drawers": drawers,
        "classes": [one._asdict() for one in written], "array": made.digest,
    }  # fmt: skip
    write_atomically(folder / INDEX, json.dumps(index | {"sha256": _digest_of_index(index)}, ensure_ascii=False))
    return made


def _digest_of_index(index: dict[str, Any]) -> str:
    content = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_set(folder: Path, advice: str) -> DrawnSet:
    """The index of a set; `advice` says how to get one, for messages.

    Raises:
        DataError: there is none, or it is not as `write_set` has written it.
    """
    path = folder / INDEX
    try:
        content = read_object(path)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: there is no {INDEX}; {advice}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {advice}") from error
    wrong = [key for key, kind in _FIELDS.items() if not isinstance(content.get(key), kind)]
    if wrong or content.keys() != _FIELDS.keys() or content["format"] != FORMAT:
        raise DataError(f"{path}: is not what this program writes ({', '.join(wrong) or 'other fields'}); {advice}")
    if _digest_of_index(content) != content["sha256"]:
        raise DataError(f"{path}: is damaged (another SHA-256); {advice}")
    try:
        classes = [DrawnClass(**fields) for fields in content["classes"]]
        read = DrawnSet(content["name"], tuple(content["picture"]), content["drawers"], classes, content["array"])
        numbers = {number for one in classes for number in one.drawers}
        if not {one.split for one in classes} <= set(SPLITS) or not numbers <= set(range(len(read.drawers))):
            raise ValueError("a split or drawer")
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: has wrong classes ({error}); {advice}") from error
    return read


def read_pictures(folder: Path, index: DrawnSet, advice: str) -> Images:
    """The array of a set, mapped, after its digest has been checked.

    Raises:
        DataError: it is missing, or another than the index says.
    """
    path, shape = folder / PICTURES, (index.total, *index.shape)
    head = array_header(shape)
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != index.digest:
                raise DataError(f"{path}: is damaged (another SHA-256 than {INDEX} says); {advice}")
            return np.asarray(np.memmap(file, np.uint8, "r", len(head), shape))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: cannot be read ({error}); {advice}") from error


def pictures_of_size(
    folder: Path, index: DrawnSet, size: int, channels: int, advice: str, *, ink: bool = False
) -> Images:
    """The pictures in this size, grey or in colour: those of the set, or made from them once and kept in the cache.

    Args:
        channels: 1: grey, [n, size, size]; 3: [n, size, size, 3].
        ink: grey pictures of the set are ink on paper, with ink as the largest value; those in colour lie on white.

    Raises:
        DataError: as `read_pictures`; or no cache folder can be used.
    """
    own = 3 if len(index.shape) == 3 else 1
    if (size, channels) == (index.shape[0], own):
        return read_pictures(folder, index, advice)
    mode = {1: "L", 3: "RGB"}[channels]

    def make() -> Images:
        whole = read_pictures(folder, index, advice)
        log.info(
            "%s: %d pictures are brought to %d pixels and %d channels once; they are kept in the cache",
            folder, len(whole), size, channels,
        )  # fmt: skip
        made = np.empty(shape, np.uint8)
        for number, one in enumerate(whole):
            made[number] = np.asarray(Image.fromarray(one).convert(mode).resize((size, size), Image.Resampling.LANCZOS))
        return 255 - made if ink and channels != own else made

    shape = (index.total, size, size, *([3] if channels == 3 else []))
    form = f"{size}" if channels == own else f"{size}-{mode}{'-ink' if ink else ''}"
    return cached_array(f"{index.name}-{index.digest[:16]}-{form}", shape, make, title=index.name)
