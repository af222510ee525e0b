"""Sets that `metalearn data` has written: pictures of classes that several people have drawn, or photographs.

A folder holds `pictures.npy`, an array uint8 [n, side, side] or [n, side, side, 3], class after class, and
`index.json`, which names the classes, and of each its split and who has drawn its pictures. Of photographs, one
"drawer" says where they come from.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from metalearn.checks import Invalid
from metalearn.errors import DataError
from metalearn.storage.files import writing
from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.episodes import SPLITS, Classes, EpisodeShape, Images, check_read
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.written import INDEX, check_pictures, mapped, read_index, write_index, write_pictures

PICTURES = "pictures.npy"
FORMAT = "metalearn drawn 1"

PARTLY = ", not as published"
"""The end of the name of the layout, in the index of photographs that are not whole."""

log = logging.getLogger(__name__)


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

    @property
    def is_partial(self) -> bool:
        """Whether these are photographs that are not all of the published ones."""
        return self.drawers[0].endswith(PARTLY)


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

    def noted() -> Iterator[Images]:
        for one, pictures in classes:
            assert pictures.shape == (len(one.drawers), *shape) and pictures.dtype == np.uint8
            written.append(one._replace(digest=digest_of(pictures)))
            yield pictures

    with writing(folder / PICTURES):
        digest = write_pictures(folder / PICTURES, (count, *shape), noted())
    made = DrawnSet(name, shape, drawers, written, digest)
    assert made.total == count
    index = {
        "format": FORMAT, "name": name, "picture": shape, "drawers": drawers,
        "classes": [one._asdict() for one in written], "array": digest,
    }  # fmt: skip
    write_index(folder, index)
    return made


def read_set(folder: Path, advice: str) -> DrawnSet:
    """The index of a set; `advice` says how to get one, for messages.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        content = read_index(folder, FORMAT)
    except ValueError as error:
        raise DataError(f"{folder}: {error}; {advice}") from error
    classes = [DrawnClass(**fields) for fields in content["classes"]]
    return DrawnSet(content["name"], tuple(content["picture"]), content["drawers"], classes, content["array"])


def read_pictures(folder: Path, index: DrawnSet, advice: str) -> Images:
    """The array of a set, mapped, after its digest has been checked.

    Raises:
        DataError: it is missing, or another than the index says.
    """
    try:
        check_pictures(folder / PICTURES, index.digest)
    except ValueError as error:
        raise DataError(f"{folder}: {error}; {advice}") from error
    return mapped(folder / PICTURES)


def pictures_by_split(
    folder: Path, index: DrawnSet, size: int, channels: int, advice: str, *, ink: bool = False
) -> dict[str, tuple[list[DrawnClass], Callable[[int], Images]]]:
    """The classes of each split, and the pictures of one by its number there: those of the set, or of another size or
    number of channels. These are made once and kept in the cache.

    Args:
        channels: 1: grey, [n, size, size]; 3: [n, size, size, 3].
        ink: grey pictures of the set are ink on paper, with ink as the largest value; those in colour lie on white.

    Raises:
        DataError: as `read_pictures`; or no cache folder can be used.
    """
    is_own = (size, channels) == (index.shape[0], 3 if len(index.shape) == 3 else 1)
    pictures = read_pictures(folder, index, advice) if is_own else _resized(folder, index, size, channels, advice, ink)
    ends = np.cumsum([0, *(len(one.drawers) for one in index.classes)])

    def part(split: str) -> tuple[list[DrawnClass], Callable[[int], Images]]:
        numbers = [number for number, one in enumerate(index.classes) if one.split == split]
        classes = [index.classes[number] for number in numbers]
        return classes, lambda label: pictures[ends[numbers[label]] : ends[numbers[label] + 1]]

    return {split: part(split) for split in SPLITS}


def _resized(folder: Path, index: DrawnSet, size: int, channels: int, advice: str, ink: bool) -> Images:
    own = 3 if len(index.shape) == 3 else 1
    mode = {1: "L", 3: "RGB"}[channels]
    shape = (index.total, size, size, *([3] if channels == 3 else []))

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

    form = f"{size}" if channels == own else f"{size}-{mode}{'-ink' if ink else ''}"
    return cached_array(f"{index.name}-{index.digest[:16]}-{form}", shape, make, title=index.name)


def written_photographs(
    name: str, root: Path, shapes: Mapping[str, EpisodeShape], family: str, decoder: str, *, image_size: int,
    channels: int,
) -> dict[str, Classes] | None:  # fmt: skip
    """The classes of every split of the photographs `name`, in the folder of that name in `root`, or in `root` itself;
    None if they are not there.

    Args:
        family: that of the classes' identities; see `metalearn.tasks.common.identities.identity`.

    Raises:
        DataError: the set is damaged, or too small for the episodes or for `image_size`.
    """
    advice = f"remove this folder, and type metalearn data {name} --from=/path/to/what/you/have"
    for folder in (root / name, root):
        if (folder / PICTURES).is_file() and (folder / INDEX).is_file():
            index = read_set(folder, advice)
            if index.name == name:
                break
    else:
        return None
    if index.is_partial:
        log.warning("%s: is not as published, as ATTRIBUTION.txt says in %s", name, folder)
    if image_size > index.shape[0]:
        allowed = f"the pictures in {folder} have {index.shape[0]} pixels"
        advice = f"type dataset.image_size={index.shape[0]} or less"
        raise DataError(str(Invalid("dataset.image_size", image_size, allowed, advice)))

    def part(classes: Sequence[DrawnClass], pictures: Callable[[int], Images]) -> Classes:
        identities = [identity(family, one.key) for one in classes]
        fewest = min((len(one.drawers) for one in classes), default=0)
        return Classes(identities, fewest, pictures, decoder, names=[one.name for one in classes])

    by_split = pictures_by_split(folder, index, image_size, channels, advice)
    splits = {split: part(*of_split) for split, of_split in by_split.items()}
    check_read(shapes, splits, str(folder))
    sizes = " / ".join(str(len(classes.identities)) for classes in splits.values())
    log.info("%s: %s classes, %d pictures", folder, sizes, index.total)
    return splits
