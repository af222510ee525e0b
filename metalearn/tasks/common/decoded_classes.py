"""Decodes the pictures of class folders once. One array in a cache file keeps them; all workers of a host map it into
memory."""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import PIL

from metalearn.checks import Invalid, whole_number
from metalearn.errors import DataError
from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.episodes import Classes, EpisodeShape, Images, check_filled
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.picture_folders import first_few
from metalearn.tasks.common.pictures import PictureForm, decoded

DECODER = 1
"""Version of the decoded pictures. Raise it if decoding changes; caches and shards of older ones are not read then."""
FAMILY = "folder"
"""The family of class identities that are made of folder names."""

log = logging.getLogger(__name__)


def decoder(name: str) -> str:
    """The name and version of the decoder of the dataset `name`."""
    return f"{name}-v{DECODER}"


def check_picture_shape(image_size: int, channels: int) -> None:
    """Raises ValueError for a size or a number of channels that pictures cannot be decoded to."""
    whole_number("image_size", image_size, at_least=8)
    if isinstance(channels, bool) or channels not in (1, 3):
        raise Invalid("channels", channels, "must be 1 (grey) or 3 (red, green, blue)", "type KEY=3")


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
    members = {label: files for classes in splits.values() for label, files in classes.items()}
    if shapes is not None:
        if single := [name for name, files in members.items() if len(files) < 2]:
            raise DataError(
                f"dataset.root={root}: {len(single)} classes have fewer than 2 pictures, and an episode needs one for "
                f"its support set and one for its query set: {first_few(single)}; remove these folders or add pictures"
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
    labels = sorted(members)
    files = [file for label in labels for file in members[label]]
    shape = (len(files), image_size, image_size) + ((3,) if channels == 3 else ())

    def decode() -> Images:
        megabytes = np.prod(shape) / 1e6
        log.info("decoding %d pictures of %s, %.1f MB, once: they are kept in the cache", len(files), root, megabytes)
        pictures, broken = np.empty(shape, np.uint8), []
        each = decoded([root / file for file in files], PictureForm(image_size, channels))
        for number, picture in enumerate(each):
            if isinstance(picture, str):
                broken.append(f"{files[number]} ({picture})")
            else:
                pictures[number] = picture
        if broken:
            count = f"{len(broken)} of {len(files)} pictures cannot be read"
            raise DataError(f"dataset.root={root}: {count}: {first_few(broken)}; repair or remove them")
        return pictures

    pictures = cached_array(f"{dataset}-{_digest(root, files, shape)}", shape, decode, title=str(root))
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
