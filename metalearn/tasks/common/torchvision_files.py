"""Data sets that torchvision knows, read from their published files, which it may download."""

import fcntl
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.errors import DataError
from metalearn.tasks.common.samples import Labelled

TEST = 10_000
"""Pictures of the test set, of every data set here."""


class Published(NamedTuple):
    """A data set: torchvision's name for it, its files in `folder`, and what its pictures are like."""

    name: str
    folder: str
    files: str
    train: int
    size: int
    channels: int


class Found(NamedTuple):
    """The training set, the test set, and the names of the classes in the order of their numbers."""

    train: Labelled
    test: Labelled
    names: list[str]


def _read(published: Published, root: Path, download: bool) -> Found:
    import torchvision  # takes a second

    shape = (published.size, published.size) if published.channels == 1 else (published.size, published.size, 3)
    names: list[str] = []
    parts = []
    for train, count in ((True, published.train), (False, TEST)):
        # The CIFAR sets unpickle their files, but first compare their md5: only the published bytes are unpickled.
        read = getattr(torchvision.datasets, published.name)(str(root), train=train, download=download)
        part = Labelled(np.asarray(read.data), np.asarray(read.targets, np.int64))
        if part.pictures.shape != (count, *shape) or part.classes.shape != (count,):
            what = "training" if train else "test"
            found = f"{part.pictures.shape} and {len(part.classes)} labels"
            raise DataError(f"the {what} set should be {(count, *shape)} and {count} labels, and is {found}")
        parts.append(part)
        names = list(map(str, read.classes))
    return Found(parts[0], parts[1], names)


def read_published(published: Published, root: Path, download: bool) -> Found:
    """The whole data set; downloaded, by one process at a time, where it cannot be read.

    Raises:
        DataError: files missing or damaged, and `download` false or of no avail.
    """
    advice = (
        f"Put {published.files}, unpacked, into {root / published.folder}, or name the folder that holds "
        f"{published.folder}: METALEARN_DATA=/path/to/data or dataset.root=/path/to/data"
    )
    try:
        return _read(published, root, download=False)
    except Exception as error:  # torchvision raises many types for broken files
        if not download:
            raise DataError(
                f"dataset.root={root}: {published.name} is not there or damaged ({error!r}). {advice}; "
                "or type dataset.download=true"
            ) from error
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f".{published.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _read(published, root, download=True)
    except Exception as error:  # the network fails in many ways
        raise DataError(
            f"dataset.root={root}: {published.name} is not there or damaged, and a download did not help ({error!r}). "
            f"{advice}"
        ) from error
