"""Plain classification of MNIST (LeCun et al. 1998), Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) and
CIFAR-10 (Krizhevsky 2009), read by torchvision from the published files."""

import fcntl
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.checks import true_or_false, whole_number
from metalearn.errors import DataError
from metalearn.samples import Labelled, samples
from metalearn.types import TaskSource

CLASSES = 10
TEST = 10_000
_HELD_OUT = 8
"""Seeds the choice of the pictures that validate."""

_IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"


class _Published(NamedTuple):
    """A data set: torchvision's name for it, its files in `folder`, and what its pictures are like."""

    name: str
    folder: str
    files: str
    train: int
    size: int
    channels: int


_MNIST = _Published("MNIST", "MNIST/raw", _IDX_FILES, 60_000, 28, 1)
_FASHION_MNIST = _Published("FashionMNIST", "FashionMNIST/raw", _IDX_FILES, 60_000, 28, 1)
_CIFAR10 = _Published(
    "CIFAR10", "cifar-10-batches-py", "data_batch_1 to data_batch_5, test_batch and batches.meta", 50_000, 32, 3
)


def _read(published: _Published, root: Path, download: bool) -> list[Labelled]:
    """The training set and the test set."""
    import torchvision  # takes a second

    shape = (published.size, published.size) if published.channels == 1 else (published.size, published.size, 3)
    parts = []
    for train, count in ((True, published.train), (False, TEST)):
        # CIFAR10 unpickles its files, but first compares their md5: only the published bytes are unpickled.
        read = getattr(torchvision.datasets, published.name)(str(root), train=train, download=download)
        part = Labelled(np.asarray(read.data), np.asarray(read.targets, np.int64))
        if part.pictures.shape != (count, *shape) or part.classes.shape != (count,):
            what = "training" if train else "test"
            found = f"{part.pictures.shape} and {len(part.classes)} labels"
            raise DataError(f"the {what} set should be {(count, *shape)} and {count} labels, and is {found}")
        parts.append(part)
    return parts


def _find(published: _Published, root: Path, download: bool) -> list[Labelled]:
    """The training set and the test set; downloaded, by one process at a time, where they cannot be read."""
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


def _source(
    published: _Published, *, root: str, ways: int, val_samples: int, image_size: int, channels: int, download: bool,
    known: int, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    for name, value, right in (
        ("ways", ways, CLASSES),
        ("image_size", image_size, published.size),
        ("channels", channels, published.channels),
    ):
        if value != right:
            raise ValueError(f"{name}={value!r}: for {published.name} it is {right}; type {name}={right}")
    whole_number("val_samples", val_samples, at_least=1, at_most=published.train - 1)
    true_or_false("download", download)
    sizes = {"train": published.train - val_samples, "val": val_samples, "test": TEST}

    def load() -> dict[str, Labelled]:
        (pictures, classes), test = _find(published, Path(root), download)
        order = np.random.default_rng(_HELD_OUT).permutation(published.train)
        val, train = np.sort(order[:val_samples]), np.sort(order[val_samples:])
        return {
            "train": Labelled(pictures[train], classes[train]),
            "val": Labelled(pictures[val], classes[val]),
            "test": test,
        }

    return samples(load, sizes, CLASSES, known=known, seed=seed, eval_seed=eval_seed)


def mnist(
    *, root: str, ways: int, val_samples: int, image_size: int, channels: int, download: bool, known: int, seed: int,
    eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Plain classification of MNIST's handwritten digits: 60000 to train and validate, 10000 to test.

    Args:
        root: the folder that holds MNIST/raw.
        ways: must be 10.
        val_samples: pictures of the training set that validate instead, the same in every run.
        image_size: height and width in pixels, must be 28.
        channels: must be 1.
        download: fetch the files by torchvision where they cannot be read.
        known, seed, eval_seed: as for `metalearn.samples.samples`.

    Raises:
        ValueError: another number of classes, pixels or channels, or more samples than there are.
        DataError: when the first sample is made: files missing or unreadable.
    """
    return _source(
        _MNIST, root=root, ways=ways, val_samples=val_samples, image_size=image_size, channels=channels,
        download=download, known=known, seed=seed, eval_seed=eval_seed,
    )  # fmt: skip


def fashion_mnist(
    *, root: str, ways: int, val_samples: int, image_size: int, channels: int, download: bool, known: int, seed: int,
    eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Plain classification of Fashion-MNIST's pieces of clothing: 60000 to train and validate, 10000 to test.

    Arguments and errors are those of `mnist`, with FashionMNIST/raw for the folder.
    """
    return _source(
        _FASHION_MNIST, root=root, ways=ways, val_samples=val_samples, image_size=image_size, channels=channels,
        download=download, known=known, seed=seed, eval_seed=eval_seed,
    )  # fmt: skip


def cifar10(
    *, root: str, ways: int, val_samples: int, image_size: int, channels: int, download: bool, known: int, seed: int,
    eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Plain classification of CIFAR-10's photographs: 50000 to train and validate, 10000 to test.

    Arguments and errors are those of `mnist`, with cifar-10-batches-py for the folder, 32 pixels and
    3 channels (red, green, blue).
    """
    return _source(
        _CIFAR10, root=root, ways=ways, val_samples=val_samples, image_size=image_size, channels=channels,
        download=download, known=known, seed=seed, eval_seed=eval_seed,
    )  # fmt: skip
