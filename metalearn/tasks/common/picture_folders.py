"""Finds pictures in folders, one folder for each class."""

import logging
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from metalearn.errors import DataError

SUFFIXES = tuple(
    f".{name}"
    for name in (
        "png", "jpg", "jpeg", "jpe", "jfif", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "tga",
        "jp2", "avif",
    )
)  # fmt: skip

_LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini", "icon\r")
_OF_SYSTEMS = (".", "@eaDir", "__MACOSX")
"""Beginnings of the names of hidden folders, and of those in which a NAS or an archive of a Mac keeps previews."""
_NAMED = 5
"""A message names this many of the files or folders that are wrong, and counts the others."""

log = logging.getLogger(__name__)


def first_few(names: Sequence[str]) -> str:
    """The first names, and an ellipsis if there are more."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def is_picture(name: str) -> bool:
    """Whether the name of a file ends like that of a picture."""
    return name.lower().endswith(SUFFIXES)


def one_form(name: str) -> str:
    """A name in the composed form of Unicode: some systems write é as e and an accent, and others as one sign."""
    return unicodedata.normalize("NFC", name)


def picture_folders(root: Path, key: str = "dataset.root=", *, strict: bool = False) -> dict[str, list[str]]:
    """The pictures of every folder that holds some itself, at any depth below `root`; both by their paths from `root`.

    Hidden files and folders, and files that file managers leave behind, are ignored. Lines name other files beside
    pictures, folders below `root` whose files are no pictures, as those of a phone may be, and class folders within
    another one, as a folder of copies may be. Messages put `key`, as a user types it, before the folder.

    Raises:
        DataError: `root` is missing or holds no pictures, a folder cannot be read, links lead to a folder twice, or two
            folders differ only in the form of Unicode; or, if `strict`, there are other files.
    """
    if not root.is_dir():
        raise DataError(f"{key}{root}: there is no such folder; type {key}/path/to/pictures")

    def refuse(error: OSError) -> None:
        raise DataError(f"{key}{root}: {error.filename} cannot be read: {error.strerror}") from error

    folders: dict[str, list[str]] = {}
    beside, without = list[str](), list[str]()
    visited: dict[str, str] = {}
    for path, subfolders, files in os.walk(root, followlinks=True, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(_OF_SYSTEMS))
        first = visited.setdefault(os.path.realpath(path), path)
        if first != path:
            raise DataError(f"{key}{root}: {path} and {first} are the same folder; remove the link")
        name = Path(path).relative_to(root).as_posix()
        before = "" if name == "." else f"{name}/"
        visible = sorted(f for f in files if not f.startswith(".") and f.lower() not in _LEFT_BY_SYSTEMS)
        if pictures := [f"{before}{file}" for file in visible if is_picture(file)]:
            folders[name] = pictures
            beside += [f"{before}{file}" for file in visible if not is_picture(file)]
        elif visible and before:
            without.append(f"{before}{visible[0]}")
    if not folders:
        raise DataError(
            f"{key}{root}: there are no pictures below it ({' '.join(SUFFIXES)}); put them there, a "
            f"folder for each class, or type {key}/path/to/pictures"
        )
    forms: dict[str, str] = {}
    for name in folders:
        if (other := forms.setdefault(one_form(name), name)) != name:
            raise DataError(
                f"{key}{root}: two folders have the name {name}, in two forms of Unicode: {name!a} and "
                f"{other!a}; put their pictures into one"
            )
    for passed, what in (
        (without, f"{len(without)} folders hold files, but no pictures"),
        (beside, f"{len(beside)} files in class folders do not have the names of pictures"),
    ):
        if passed and strict:
            advice = f"convert them to {SUFFIXES[0]}, or remove"
            raise DataError(f"{key}{root}: --strict: {what}: {first_few(passed)}; {advice}")
        if passed:
            log.warning("%s%s: %s, and are passed over: %s", key, root, what, first_few(passed))
    above = {name: [str(folder) for folder in PurePosixPath(name).parents][:-1] for name in folders}
    if inner := [name for name in folders if any(folder in folders for folder in above[name])]:
        log.warning(
            "%s%s: %d folders within class folders count as classes of their own: %s; take them out if they hold the "
            "same pictures", key, root, len(inner), first_few(inner),
        )  # fmt: skip
    return folders
