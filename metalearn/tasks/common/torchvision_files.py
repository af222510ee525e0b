"""Reads the published files of datasets by torchvision, which may download them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.errors import DataError
from metalearn.storage.locks import held
from metalearn.tasks.common.place import DataPlace
from metalearn.tasks.common.samples import Labelled

TEST = 10_000
"""Pictures in the test set of every dataset here."""


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

    shape = (published.size, published.size) if published.channels == 1 else (published.size, published.size, 3)
    processed = (root / published.folder).with_name("processed")
    if published.folder.endswith("/raw") and processed.exists():  # torchvision prefers it, and checks nothing there
        raise DataError(f"{processed}: only the published files in {published.folder} are read; move it away")
    names: list[str] = []
    parts = []
    for train, count in ((True, published.train), (False, TEST)):
        # torchvision unpickles the files of CIFAR, but compares their md5 first: only published bytes are unpickled.
        read = getattr(torchvision.datasets, published.name)(str(root), train=train, download=download)
        part = Labelled(np.asarray(read.data), np.asarray(read.targets, np.int64))
        if part.pictures.shape != (count, *shape) or part.classes.shape != (count,):
            what = "training" if train else "test"
            actual = f"{part.pictures.shape} and {len(part.classes)} labels"
            raise DataError(f"the {what} set should be {(count, *shape)} and {count} labels, and is {actual}")
        parts.append(part)
        names = list(map(str, read.classes))
    return Contents(parts[0], parts[1], names)


def read_published(published: PublishedDataset, place: DataPlace) -> Contents:
    """The whole dataset. If it cannot be read and may be downloaded, one process at a time downloads it.

    Raises:
        DataError: files are missing or damaged, and are not downloaded.
    """
    root = Path(place.root)
    advice = (
        f"Put {published.files}, unpacked, into {root / published.folder}, or name the folder that holds "
        f"{published.folder}: METALEARN_DATA=/path/to/data or dataset.root=/path/to/data"
    )
    try:
        return _read(published, root, download=False)
    except Exception as error:  # torchvision raises many types for broken files
        if not place.download:
            raise DataError(
                f"dataset.root={root}: {published.name} is not there or damaged ({error!r}). {advice}; "
                "or type dataset.download=true"
            ) from error
    try:
        root.mkdir(parents=True, exist_ok=True)
        with held(root / f".{published.name}.lock", f"{published.name} is being downloaded"):
            return _read(published, root, download=True)
    except Exception as error:  # the network fails in many ways
        raise DataError(
            f"dataset.root={root}: {published.name} is not there or damaged, and the download failed ({error!r}). "
            f"{advice}"
        ) from error
