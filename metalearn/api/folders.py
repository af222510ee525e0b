"""Folders of pictures: a class folder each for the support set; class folders, or just pictures, for the queries."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from metalearn.errors import DataError
from metalearn.saved.form import digest_of
from metalearn.tasks.common.picture_folders import first_few, one_form, picture_folders

TABLE = ("file", "label", "probability")
"""The first columns of predictions.csv; the others are named by classes."""

PARTS = ("train", "val", "valid", "validation", "test")
"""Folders of the usual layout of downloads: each has the same class folders."""


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
    folder.

    Raises:
        DataError: there are no pictures, pictures outside class folders, other files, one class, folders train and
            val of the same classes, or a class that has the name of a column of predictions.csv.
    """
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


def queries_in(root: Path, known: list[str], key: str = "--query ") -> Found:
    """All pictures below `root`, at any depth. Their classes are known if each one's folder is named by one of `known`.

    Raises:
        DataError: there are no pictures.
    """
    folders = picture_folders(root, key)
    files = [file for pictures in folders.values() for file in pictures]
    by_form = {one_form(name): name for name in known}
    folders = {by_form.get(one_form(name), name): pictures for name, pictures in folders.items()}
    unknown = sorted(folders.keys() - set(known))
    if unknown:
        why = "its pictures lie in no class folders" if "." in unknown else f"no support for {first_few(unknown)}"
        return Found(root, files, None, why)
    return Found(root, files, [name for name, pictures in folders.items() for _ in pictures])


def in_support(queries: Found, support: Found) -> int:
    """The number of queries whose file is, under any name, also that of a support picture."""
    known = set(map(digest_of, support.paths))
    return sum(digest_of(path) in known for path in queries.paths)


def summary(support: Found) -> str:
    """`5 classes, 1 to 3 support pictures of each`."""
    counts = Counter(support.classes)
    low, high = min(counts.values()), max(counts.values())
    pictures = f"{low}" if low == high else f"{low} to {high}"
    return f"{len(counts)} classes, {pictures} support pictures of each"
