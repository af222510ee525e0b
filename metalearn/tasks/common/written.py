"""Pictures that this program has written into a folder: arrays, and the index.json that says what they are.

The index has the SHA-256 of every array and of itself, and is written last: a folder without it is not whole. What has
its digest is what was written, and is not looked at again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from metalearn.storage.files import write_atomically
from metalearn.tasks.common.cache import array_header
from metalearn.tasks.common.episodes import Images

INDEX = "index.json"


def write_pictures(path: Path, shape: tuple[int, ...], parts: Iterable[Images]) -> str:
    """Writes pictures, part after part, as one array of this shape; returns its SHA-256. The parts may be more than
    memory holds."""
    head = array_header(shape)
    digest = hashlib.sha256(head)
    with path.open("wb") as file:
        file.write(head)
        for pictures in parts:
            content = np.ascontiguousarray(pictures).reshape(-1).data
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def check_pictures(path: Path, digest: str) -> None:
    """Raises ValueError if a file is missing, or is another than the one with this SHA-256."""
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{path.name} is damaged (another SHA-256 than {INDEX} says)")
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from error


def mapped(path: Path) -> Images:
    """The array in a file, mapped; not as a memmap, of which every access takes a microsecond longer."""
    pictures: Images = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(pictures)


def write_index(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes the index.

    Raises:
        RunError: it cannot be written.
    """
    index = {**content, "sha256": _digest_of(content)}
    write_atomically(folder / INDEX, json.dumps(index, ensure_ascii=False))


def read_index(folder: Path, kind: str) -> dict[str, Any]:
    """The index of a folder, whose field `format` is to be `kind`.

    Raises:
        ValueError: there is none, or it is damaged or of another kind.
    """
    try:
        content = json.loads((folder / INDEX).read_bytes())
    except OSError as error:
        raise ValueError(f"{INDEX} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{INDEX} holds no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != kind:
        raise ValueError(f"{INDEX} is none of {kind!r}")
    if content.pop("sha256", None) != _digest_of(content):
        raise ValueError(f"{INDEX} is damaged (another SHA-256)")
    return content


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
