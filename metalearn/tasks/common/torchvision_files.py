"""The published files of datasets: where they lie, and torchvision's readers, which may download them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.errors import DataError
from metalearn.storage.files import held
from metalearn.tasks.common.samples import Labelled

TEST = 10_000
"""Pictures in the test set of every dataset here."""


class DataPlace(NamedTuple):
    """The files of a dataset lie in the folder `root`. With `download`, torchvision fetches them if they are missing or
    cannot be read. If `shards` names a folder that metalearn shard has written, the pictures come from there, and
    `root` is not read."""

    root: str
    download: bool
    shards: str | None = None


class PublishedDataset(NamedTuple):
    """A dataset: torchvision's `name` for it, the names of its `files` in `folder`, the number of pictures in its
    training set, and the `size` (height and width) and `channels` of a picture."""

    name: str
    folder: str
    files: str
    train: int
    size: int
    channels: int


class Contents(NamedTuple):
    """The training set, the test set, and the `names` of the classes in the order of their numbers."""

    train: Labelled
    test: Labelled
    names: list[str]


def _read(published: PublishedDataset, root: Path, download: bool) -> Contents:
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
    return Contents(train, test, list(map(str, sets[0].classes)))


def read_published(published: PublishedDataset, place: DataPlace) -> Contents:
    """The whole dataset. If it cannot be read and may be downloaded, one process at a time downloads it.

    Raises:
        DataError: files are missing or damaged, and are not downloaded.
    """
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
