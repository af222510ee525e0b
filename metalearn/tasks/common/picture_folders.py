"""Finds pictures in folders, one folder for each class, and decodes them once. One array in a cache file keeps them;
all workers of a host map it into memory."""

import hashlib
import logging
import os
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import PIL

from metalearn.checks import Invalid, whole_number
from metalearn.errors import DataError
from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.episodes import Classes, EpisodeShape, Images, check_filled
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.pictures import PictureForm, decoded

SUFFIXES = tuple(
    f".{name}"
    for name in (
        "png", "jpg", "jpeg", "jpe", "jfif", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "tga",
        "jp2", "avif",
    )
)  # fmt: skip
DECODER = 1
"""Version of the decoded pictures. Raise it if decoding changes; caches and shards of older ones are not read then."""
FAMILY = "folder"
"""The family of class identities that are made of folder names."""

_LEFT_BY_SYSTEMS = ("thumbs.db", "desktop.ini", "icon\r")
_OF_SYSTEMS = (".", "@eaDir", "__MACOSX")
"""Beginnings of the names of hidden folders, and of those in which a NAS or an archive of a Mac keeps previews."""
_NAMED = 5
"""A message names this many of the files or folders that are wrong, and counts the others."""

log = logging.getLogger(__name__)


class PictureFolder(NamedTuple):
    """The paths, from the root, of a folder's `pictures` and of its `others`, the files that are not pictures."""

    pictures: list[str]
    others: list[str]


def first_few(names: Sequence[str]) -> str:
    """The first names, and an ellipsis if there are more."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def is_picture(name: str) -> bool:
    """Whether the name of a file ends like that of a picture."""
    return name.lower().endswith(SUFFIXES)


# Finding


def picture_folders(root: Path, key: str = "dataset.root=", *, strict: bool = False) -> dict[str, PictureFolder]:
    """Every folder that holds pictures itself, at any depth below `root`, by its path from `root`.

    Hidden files and folders, and files that file managers leave behind, are ignored. A line names the folders below
    `root` whose files are no pictures, as those of a phone may be. Messages put `key`, as a user types it, before the
    folder.

    Raises:
        DataError: `root` is missing or holds no pictures, a folder cannot be read, or links lead to a folder twice; or,
            if `strict`, there are folders whose files are no pictures.
    """
    if not root.is_dir():
        raise DataError(f"{key}{root}: there is no such folder; type {key}/path/to/pictures")

    def refuse(error: OSError) -> None:
        raise DataError(f"{key}{root}: {error.filename} cannot be read: {error.strerror}") from error

    folders: dict[str, PictureFolder] = {}
    without: list[str] = []
    visited: dict[str, str] = {}
    for path, subfolders, files in os.walk(root, followlinks=True, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(_OF_SYSTEMS))
        first = visited.setdefault(os.path.realpath(path), path)
        if first != path:
            raise DataError(f"{key}{root}: {path} and {first} are the same folder; remove the link")
        name = Path(path).relative_to(root).as_posix()
        before = "" if name == "." else f"{name}/"
        visible = sorted(f for f in files if not f.startswith(".") and f.lower() not in _LEFT_BY_SYSTEMS)
        pictures = [f"{before}{file}" for file in visible if is_picture(file)]
        if pictures:
            folders[name] = PictureFolder(pictures, [f"{before}{file}" for file in visible if not is_picture(file)])
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
    if without:
        _pass_over(root, key, f"{len(without)} folders hold files, but no pictures", without, strict)
    return folders


def one_form(name: str) -> str:
    """A name in the composed form of Unicode: some systems write é as e and an accent, and others as one sign."""
    return unicodedata.normalize("NFC", name)


def _pass_over(root: Path, key: str, what: str, files: Sequence[str], strict: bool) -> None:
    """Says in a line what is passed over; raises DataError if it is to be `strict`."""
    if strict:
        raise DataError(f"{key}{root}: --strict: {what}: {first_few(files)}; convert them to {SUFFIXES[0]}, or remove")
    log.warning("%s%s: %s, and are passed over: %s", key, root, what, first_few(files))


def only_pictures(
    root: Path, folders: Mapping[str, PictureFolder], key: str = "dataset.root=", *, strict: bool = False
) -> dict[str, list[str]]:
    """The pictures of every class. A line says which other files are passed over, and which class folders lie within
    another one, as a folder of copies may.

    Raises:
        DataError: there are other files, and it is to be `strict`.
    """
    others = [file for folder in folders.values() for file in folder.others]
    if others:
        what = f"{len(others)} files in class folders do not have the names of pictures"
        _pass_over(root, key, what, others, strict)
    above = {name: [str(folder) for folder in PurePosixPath(name).parents][:-1] for name in folders}
    inner = [name for name in folders if any(folder in folders for folder in above[name])]
    if inner:
        log.warning(
            "%s%s: %d folders within class folders count as classes of their own: %s; take them out if they hold the "
            "same pictures", key, root, len(inner), first_few(inner),
        )  # fmt: skip
    return {name: folder.pictures for name, folder in folders.items()}


# Decoding


def _decode(root: Path, files: Sequence[str], shape: tuple[int, ...]) -> Images:
    """All pictures, uint8 [len(files), size, size] or [len(files), size, size, 3]."""
    log.info(
        "decoding %d pictures of %s, %.1f MB, once: they are kept in the cache", len(files), root, np.prod(shape) / 1e6
    )
    form = PictureForm(shape[1], 1 if len(shape) == 3 else 3)
    pictures = np.empty(shape, np.uint8)
    broken = []
    for number, picture in enumerate(decoded([root / file for file in files], form)):
        if isinstance(picture, str):
            broken.append(f"{files[number]} ({picture})")
        else:
            pictures[number] = picture
    if broken:
        raise DataError(
            f"dataset.root={root}: {len(broken)} of {len(files)} pictures cannot be read: {first_few(broken)}; repair "
            "or remove them"
        )
    return pictures


def _digest(root: Path, files: Sequence[str], shape: tuple[int, ...]) -> str:
    """A digest of everything that the decoded array depends on. Names, sizes and times of change stand for the contents
    of the files: of these times, programs can set back one, and not the other."""
    digest = hashlib.sha256(f"{DECODER} {PIL.__version__} {shape} {root.resolve()}".encode(errors="surrogateescape"))
    for file in files:
        try:
            status = (root / file).stat()
            digest.update(os.fsencode(f"\n{file}\0{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"))
        except OSError:  # decoding will report it
            digest.update(os.fsencode(f"\n{file}"))
    return digest.hexdigest()[:24]


# Checking


def check_picture_shape(image_size: int, channels: int) -> None:
    """Raises ValueError for a size or a number of channels that pictures cannot be decoded to."""
    whole_number("image_size", image_size, at_least=8)
    if isinstance(channels, bool) or channels not in (1, 3):
        raise Invalid("channels", channels, "must be 1 (grey) or 3 (red, green, blue)", "type KEY=3")


def _check_enough(
    root: Path, splits: Mapping[str, Mapping[str, Collection[str]]], shapes: Mapping[str, EpisodeShape]
) -> None:
    single = [name for classes in splits.values() for name, files in classes.items() if len(files) < 2]
    if single:
        raise DataError(
            f"dataset.root={root}: {len(single)} classes have fewer than 2 pictures, and an episode needs one for its "
            f"support set and one for its query set: {first_few(single)}; remove these folders or add pictures"
        )
    counts = {split: (len(classes), min(map(len, classes.values()))) for split, classes in splits.items()}
    try:
        check_filled(shapes, counts, group="dataset.")
    except ValueError as error:
        small = [
            f"{name} ({len(files)})"
            for split, classes in splits.items()
            for name, files in classes.items()
            if len(files) < shapes[split].most
        ]
        which = f": {len(small)} classes have too few pictures: {first_few(small)}" if small else ""
        raise DataError(f"{error}. This is dataset.root={root}{which}") from error


def decoder(name: str) -> str:
    """The name and version of the decoder of the dataset `name`."""
    return f"{name}-v{DECODER}"


def decoded_classes(
    dataset: str,
    root: Path,
    splits: Mapping[str, Mapping[str, Sequence[str]]],
    shapes: Mapping[str, EpisodeShape] | None,
    *,
    image_size: int,
    channels: int,
    class_name: Callable[[str], str] = str,
) -> dict[str, Classes]:
    """The classes of every split, in the order of their names; from the cache if they are there.

    Args:
        dataset: the beginning of the cache file's name.
        root: the folder from which the paths of pictures start.
        splits: split → class → its pictures; no class is in two splits, no split is empty.
        shapes: the shape of each split's episodes; None: there are none.
        image_size: height and width of the decoded pictures.
        channels: 1 (grey) or 3.
        class_name: gives the name of a class in other divisions of the same pictures.

    Raises:
        DataError: too few classes or pictures for the episodes; pictures that cannot be read: the message counts them
            and names the first.
    """
    if shapes is not None:
        _check_enough(root, splits, shapes)
    members = {label: files for classes in splits.values() for label, files in classes.items()}
    labels = sorted(members)
    files = [file for label in labels for file in members[label]]
    shape = (len(files), image_size, image_size) + ((3,) if channels == 3 else ())
    cache_name = f"{dataset}-{_digest(root, files, shape)}"
    pictures = cached_array(cache_name, shape, lambda: _decode(root, files, shape), title=str(root))
    ends = accumulate((len(members[label]) for label in labels), initial=0)
    range_of = dict(zip(labels, pairwise(ends), strict=True))

    def part(classes: Mapping[str, Sequence[str]]) -> Classes:
        ranges = [range_of[label] for label in sorted(classes)]

        def class_pictures(label: int) -> Images:
            first, end = ranges[label]
            return pictures[first:end]

        names = [class_name(label) for label in sorted(classes)]
        identities, fewest = [identity(FAMILY, name) for name in names], min(map(len, classes.values()))
        return Classes(identities, fewest, class_pictures, decoder(dataset), names=names)

    return {split: part(classes) for split, classes in splits.items()}
