"""Pictures on disk: arrays in the cache, sets that `metalearn data` writes, and published files that torchvision reads.

Every array is uint8 [n, h, w] or [n, h, w, 3] in a .npy file, which all workers of a host map into memory. Folders of
ours have an index.json with the SHA-256 of every array and of itself. It is written last, so a folder without it is not
whole; what has its digest is what was written, and is not checked further.
"""

import functools
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from metalearn.errors import DataError, Invalid, whole_number
from metalearn.storage import cache
from metalearn.storage.files import held, write_atomically, writing
from metalearn.tasks.common.episodes import SPLITS, Images
from metalearn.tasks.common.samples import Labelled

INDEX = "index.json"
SET_FORMAT = "metalearn drawn 1"

PICTURES = "pictures.npy"
PARTLY = ", not as published"  # the end of the name of the layout, in the index of photographs that are not whole
FAMILY = "folder"  # the family of class identities that are made of folder names
TEST = 10_000  # pictures in the test set of each of torchvision's data sets here

log = logging.getLogger(__name__)


def cached_array(
    name: str, shape: tuple[int, ...], make: Callable[[], Images], *, title: str, unread: str | None = None
) -> Images:
    """The uint8 array `name`, mapped read-only from the cache. `make` makes it if it is not there yet, in one process;
    else a message names the file.

    Args:
        title: what the message calls the data.
        unread: the `dataset.root`, if `name` does not depend on it: the message says that it is not read. If there is
            no such folder, the message is a warning.
    """
    head = _npy_header(shape)

    def content() -> cache.Parts:
        array = make()
        assert array.shape == shape and array.dtype == np.uint8
        return [head, np.ascontiguousarray(array).reshape(-1).data]

    try:
        file, path, made = cache.get(f"{name}.npy", content, head=head)
    except cache.CacheError as error:
        raise DataError(str(error)) from error
    if not made:
        _log_read(title, path, unread)
    # A plain array, here and in `read_pictures`: every access to a memmap takes a microsecond longer.
    with file:
        return np.asarray(np.memmap(file, np.uint8, "r", len(head), shape))


@functools.cache  # one line for each file
def _log_read(title: str, path: Path, unread: str | None) -> None:
    gone = unread is not None and not Path(unread).is_dir()
    note = "" if unread is None else f"; dataset.root={unread} is not read" + ", and there is no such folder" * gone
    log.log(logging.WARNING if gone else logging.INFO, "%s: decoded before, read from %s%s", title, path, note)


def _npy_header(shape: tuple[int, ...]) -> bytes:
    """The first bytes of the file that `np.save` writes for a uint8 array."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def check_picture_shape(image_size: int, channels: int) -> None:
    """Raises ValueError for a size or a number of channels that pictures cannot be decoded to."""
    whole_number("image_size", image_size, at_least=8)
    if isinstance(channels, bool) or channels not in (1, 3):
        raise Invalid("channels", channels, "must be 1 (grey) or 3 (red, green, blue)", "type KEY=3")


# Sets of `metalearn data`: classes that several people have drawn; or photographs, with one "drawer": their origin


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


def write_set(
    folder: Path, name: str, drawers: Sequence[str], shape: tuple[int, ...],
    classes: Iterable[tuple[DrawnClass, Images]], count: int,
) -> DrawnSet:  # fmt: skip
    """Writes a set of `count` pictures, class after class; returns its index. Raises DiskError or RunError if it cannot
    be written."""
    written, head = list[DrawnClass](), _npy_header((count, *shape))
    digest = hashlib.sha256(head)
    with writing(folder / PICTURES), (folder / PICTURES).open("wb") as file:
        file.write(head)
        for one, pictures in classes:  # they may be more than memory holds
            assert pictures.shape == (len(one.drawers), *shape) and pictures.dtype == np.uint8
            content = np.ascontiguousarray(pictures).reshape(-1).data
            written.append(one._replace(digest=hashlib.sha256(content).hexdigest()[:16]))
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    made = DrawnSet(name, shape, drawers, written, digest.hexdigest())
    assert made.total == count
    index = {
        "format": SET_FORMAT, "name": name, "picture": shape, "drawers": drawers,
        "classes": [one._asdict() for one in written], "array": made.digest,
    }  # fmt: skip
    write_atomically(folder / INDEX, json.dumps({**index, "sha256": _digest_of(index)}, ensure_ascii=False))
    return made


def _digest_of(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def read_set(folder: Path, advice: str) -> DrawnSet:
    """The index of a set; `advice` says how to get one, for messages. Raises DataError if there is none, or it is
    damaged."""
    try:
        content = json.loads((folder / INDEX).read_bytes())
    except OSError as error:
        raise DataError(f"{folder}: {INDEX} cannot be read ({error.strerror}); {advice}") from error
    except ValueError as error:
        raise DataError(f"{folder}: {INDEX} holds no JSON ({error}); {advice}") from error
    if not isinstance(content, dict) or content.get("format") != SET_FORMAT:
        raise DataError(f"{folder}: {INDEX} is none of {SET_FORMAT!r}; {advice}")
    if content.pop("sha256", None) != _digest_of(content):
        raise DataError(f"{folder}: {INDEX} is damaged (another SHA-256); {advice}")
    classes = [DrawnClass(**fields) for fields in content["classes"]]
    return DrawnSet(content["name"], tuple(content["picture"]), content["drawers"], classes, content["array"])


def read_pictures(folder: Path, index: DrawnSet, advice: str) -> Images:
    """The array of a set, mapped, after its digest has been checked. Raises DataError if it is missing, or another than
    the index says."""
    try:
        with (folder / PICTURES).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{folder}: {PICTURES} cannot be read ({error.strerror}); {advice}") from error
    if digest != index.digest:
        raise DataError(f"{folder}: {PICTURES} is damaged (another SHA-256 than {INDEX} says); {advice}")
    return np.asarray(np.load(folder / PICTURES, mmap_mode="r", allow_pickle=False))


def pictures_by_split(
    folder: Path, index: DrawnSet, size: int, channels: int, advice: str, *, ink: bool = False
) -> dict[str, tuple[list[DrawnClass], Callable[[int], Images]]]:
    """The classes of each split, and the pictures of one by its number there: [n, size, size] for one of `channels`,
    [n, size, size, 3] for three. If those of the set are others, they are made once and kept in the cache. With `ink`,
    grey pictures are ink on paper, with ink as the largest value, and those in colour lie on white. Raises DataError as
    `read_pictures`; or if no cache folder can be used."""
    colours = 3 if len(index.shape) == 3 else 1
    mode = {1: "L", 3: "RGB"}[channels]
    shape = (index.total, size, size, *([3] if channels == 3 else []))

    def resized() -> Images:
        whole = read_pictures(folder, index, advice)
        log.info(
            "%s: %d pictures are brought to %d pixels and %d channels once; they are kept in the cache",
            folder, len(whole), size, channels,
        )  # fmt: skip
        made = np.empty(shape, np.uint8)
        for number, one in enumerate(whole):
            made[number] = np.asarray(Image.fromarray(one).convert(mode).resize((size, size), Image.Resampling.LANCZOS))
        return 255 - made if ink and channels != colours else made

    if (size, channels) == (index.shape[0], colours):
        pictures = read_pictures(folder, index, advice)
    else:
        form = f"{size}" if channels == colours else f"{size}-{mode}{'-ink' if ink else ''}"
        pictures = cached_array(f"{index.name}-{index.digest[:16]}-{form}", shape, resized, title=index.name)
    ends = np.cumsum([0, *(len(one.drawers) for one in index.classes)])

    def part(split: str) -> tuple[list[DrawnClass], Callable[[int], Images]]:
        numbers = [number for number, one in enumerate(index.classes) if one.split == split]
        classes = [index.classes[number] for number in numbers]
        return classes, lambda label: pictures[ends[numbers[label]] : ends[numbers[label] + 1]]

    return {split: part(split) for split in SPLITS}


# Published files, by torchvision's readers, which may download them


class DataPlace(NamedTuple):
    """The files of a dataset lie in the folder `root`. With `download`, torchvision fetches them if they are missing or
    cannot be read."""

    root: str
    download: bool


class PublishedDataset(NamedTuple):
    """A dataset: torchvision's `name` for it, the names of its `files` in `folder`, the number of pictures in its
    training set, and the `size` (height and width) and `channels` of a picture."""

    name: str
    folder: str
    files: str
    train: int
    size: int
    channels: int


def _read(published: PublishedDataset, root: Path, download: bool) -> tuple[Labelled, Labelled, list[str]]:
    import torchvision  # takes a second

    # torchvision unpickles the files of CIFAR, but compares their md5 first: only published bytes are unpickled.
    factory = getattr(torchvision.datasets, published.name)
    sets = [factory(str(root), train=train, download=download) for train in (True, False)]
    train, test = (Labelled(np.asarray(one.data), np.asarray(one.targets, np.int64)) for one in sets)
    # Of MNIST it compares nothing: other files in the same format are read too.
    for part, count in ((train, published.train), (test, TEST)):
        shape = (count, published.size, published.size, *([3] if published.channels == 3 else []))
        if part.pictures.shape != shape or part.classes.shape != (count,):
            actual = f"{part.pictures.shape} and {len(part.classes)} labels"
            raise DataError(f"a set should be {shape} and {count} labels, and is {actual}")
    return train, test, list(map(str, sets[0].classes))


def read_published(published: PublishedDataset, place: DataPlace) -> tuple[Labelled, Labelled, list[str]]:
    """The training set, the test set, and the names of the classes in the order of their numbers. If they cannot be
    read and may be downloaded, one process at a time downloads them. Raises DataError if files are missing or damaged,
    and are not downloaded."""
    root, why = Path(place.root), ""
    try:
        return _read(published, root, download=False)
    except Exception as error:  # torchvision raises many types for broken files
        fault: Exception = error
    if place.download:
        try:
            root.mkdir(parents=True, exist_ok=True)
            with held(root / f".{published.name}.lock", f"{published.name} is being downloaded"):
                return _read(published, root, download=True)
        except Exception as error:  # the network fails in many ways
            fault, why = error, ", and the download failed"
    advice = "" if place.download else "; or type dataset.download=true"
    raise DataError(
        f"dataset.root={root}: {published.name} is not there or damaged{why} ({fault!r}). Put {published.files}, "
        f"unpacked, into {root / published.folder}, or name the folder that holds {published.folder}: "
        f"METALEARN_DATA=/path/to/data or dataset.root=/path/to/data{advice}"
    ) from fault
