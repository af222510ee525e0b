"""Plain classification of MNIST (LeCun et al. 1998), Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) and
CIFAR-10 (Krizhevsky 2009), and torchvision's readers of published files, which may download them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.checks import only, true_or_false, whole_number
from metalearn.errors import DataError
from metalearn.storage.locks import held
from metalearn.tasks.common.episodes import Seeds
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.samples import Labelled, samples
from metalearn.types import TaskSource

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


# Datasets of 10 classes

CLASSES = 10
_HELD_OUT = 8
"""Seeds the choice of the pictures that validate."""

_NAMES = {
    "MNIST": "0 1 2 3 4 5 6 7 8 9",
    "FashionMNIST": "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot",
    "CIFAR10": "airplane automobile bird cat deer dog frog horse ship truck",
}
"""Those of the classes by their numbers, as the datasets' authors have them."""

_IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
_CIFAR10_FILES = "data_batch_1 to data_batch_5, test_batch and batches.meta"


def _classification(published: PublishedDataset) -> Callable[..., TaskSource]:
    """The factory of the plain classification of a dataset of 10 classes."""

    def source(
        *, place: DataPlace, ways: int, val_samples: int, image_size: int, channels: int, known: int, seeds: Seeds
    ) -> TaskSource:
        """10000 pictures test; the training set trains and validates.

        Args:
            place: its root holds `published.folder`.
            ways: must be 10.
            val_samples: how many pictures of the training set validate instead, the same in every run.
            image_size: height and width in pixels, must be `published.size`.
            channels: must be `published.channels`: 1 (grey) or 3 (red, green, blue).
            known, seeds: as for `metalearn.tasks.common.samples.samples`.

        Raises:
            ValueError: another number of classes, pixels or channels, or more samples than there are.
            DataError: when the first sample is made: files are missing or unreadable.
        """
        only("ways", ways, CLASSES, published.name)
        only("image_size", image_size, published.size, published.name)
        only("channels", channels, published.channels, published.name)
        whole_number("val_samples", val_samples, at_least=1, at_most=published.train - 1)
        true_or_false("download", place.download)
        sizes = {"train": published.train - val_samples, "val": val_samples, "test": TEST}

        def load() -> dict[str, Labelled]:
            (pictures, classes), test, _ = read_published(published, place)
            order = np.random.default_rng(_HELD_OUT).permutation(published.train)
            val, train = np.sort(order[:val_samples]), np.sort(order[val_samples:])
            return {
                "train": Labelled(pictures[train], classes[train]),
                "val": Labelled(pictures[val], classes[val]),
                "test": test,
            }

        identities = [identity(published.name, number) for number in range(CLASSES)]
        names = [name.replace("_", " ") for name in _NAMES[published.name].split()]
        return samples(load, sizes, identities, known=known, seeds=seeds, names=names)

    return source


mnist = _classification(PublishedDataset("MNIST", "MNIST/raw", _IDX_FILES, 60_000, 28, 1))
"""Handwritten digits, 28×28, grey."""

fashion_mnist = _classification(PublishedDataset("FashionMNIST", "FashionMNIST/raw", _IDX_FILES, 60_000, 28, 1))
"""Pieces of clothing, 28×28, grey."""

cifar10 = _classification(PublishedDataset("CIFAR10", "cifar-10-batches-py", _CIFAR10_FILES, 50_000, 32, 3))
"""Photographs, 32×32, of three colours."""
