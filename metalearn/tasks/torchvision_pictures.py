"""Plain classification of MNIST (LeCun et al. 1998), Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) and
CIFAR-10 (Krizhevsky 2009), read by torchvision from the published files."""

from pathlib import Path

import numpy as np

from metalearn.checks import only, true_or_false, whole_number
from metalearn.tasks.common.samples import Labelled, samples
from metalearn.tasks.common.torchvision_files import TEST, Published, read_published
from metalearn.types import TaskSource

CLASSES = 10
_HELD_OUT = 8
"""Seeds the choice of the pictures that validate."""

_IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"

_MNIST = Published("MNIST", "MNIST/raw", _IDX_FILES, 60_000, 28, 1)
_FASHION_MNIST = Published("FashionMNIST", "FashionMNIST/raw", _IDX_FILES, 60_000, 28, 1)
_CIFAR10 = Published(
    "CIFAR10", "cifar-10-batches-py", "data_batch_1 to data_batch_5, test_batch and batches.meta", 50_000, 32, 3
)


def _source(
    published: Published, *, root: str, ways: int, val_samples: int, image_size: int, channels: int, download: bool,
    known: int, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    only("ways", ways, CLASSES, published.name)
    only("image_size", image_size, published.size, published.name)
    only("channels", channels, published.channels, published.name)
    whole_number("val_samples", val_samples, at_least=1, at_most=published.train - 1)
    true_or_false("download", download)
    sizes = {"train": published.train - val_samples, "val": val_samples, "test": TEST}

    def load() -> dict[str, Labelled]:
        (pictures, classes), test, _ = read_published(published, Path(root), download)
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
        known, seed, eval_seed: as for `metalearn.tasks.common.samples.samples`.

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
