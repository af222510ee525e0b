"""Finds and reads Omniglot's pictures, in the published folders or in the published archives."""

import os
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from metalearn.errors import DataError

COLLECTIONS = ("images_background", "images_evaluation")
_DEPTH = 5


class Drawings(NamedTuple):
    """One of the two collections of pictures, in the archive or folder `where`.

    `drawings(character)` lists the paths of a character's pictures, in order; a character is named as
    "images_background/Alphabet/character01". `read(path)` gives the bytes of one picture.
    """

    where: Path
    drawings: Callable[[str], list[str]]
    read: Callable[[str], bytes]


def find_collections(root: Path) -> dict[str, Drawings]:
    """The collections under `root`, by name. If there is an archive and a folder, the archive is taken.

    Raises:
        DataError: a damaged archive.
    """
    folders: dict[str, Path] = {}
    archives: dict[str, Path] = {}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        here = Path(folder)
        for name in COLLECTIONS:
            if name in subfolders:
                subfolders.remove(name)
                folders.setdefault(name, here / name)
            if f"{name}.zip" in files:
                archives.setdefault(name, here / f"{name}.zip")
        subfolders.sort()
        if len(here.relative_to(root).parts) >= _DEPTH:
            subfolders.clear()
    unpacked = {name: _folder(path) for name, path in folders.items()}
    return unpacked | {name: _archive(path) for name, path in archives.items()}


def _folder(path: Path) -> Drawings:
    def drawings(character: str) -> list[str]:
        return sorted(f"{character}/{file.name}" for file in (path.parent / character).glob("*.png"))

    def read(name: str) -> bytes:
        return (path.parent / name).read_bytes()

    return Drawings(path, drawings, read)


def _archive(path: Path) -> Drawings:
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise DataError(f"{path}: the archive is damaged or not complete ({error}); fetch it again") from error
    members: dict[str, list[str]] = defaultdict(list)
    for name in sorted(archive.namelist()):
        if name.endswith(".png"):
            members[name.rpartition("/")[0]].append(name)

    def read(name: str) -> bytes:
        try:
            return archive.read(name)
        except Exception as error:  # zipfile and its decompressors raise many types
            raise DataError(f"{path}: {name} is damaged ({error}); fetch the archive again") from error

    return Drawings(path, lambda character: members[character], read)
