"""Plain classification of MNIST (LeCun et al. 1998), Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) and
CIFAR-10 (Krizhevsky 2009)."""

from collections.abc import Callable

import numpy as np

from metalearn.errors import only, true_or_false, whole_number
from metalearn.tasks.common.episodes import Seeds, identity
from metalearn.tasks.common.samples import Labelled, SampleSource
from metalearn.tasks.common.stored import TEST, DataPlace, PublishedDataset, read_published
from metalearn.types import TaskSource

CLASSES = 10
_HELD_OUT = 8  # seeds the choice of the pictures that validate

# Those of the classes by their numbers, as the datasets' authors have them.
_NAMES = {
    "MNIST": "0 1 2 3 4 5 6 7 8 9",
    "FashionMNIST": "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot",
    "CIFAR10": "airplane automobile bird cat deer dog frog horse ship truck",
}

_IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte"
_CIFAR10_FILES = "data_batch_1 to data_batch_5, test_batch and batches.meta"


def _classification(published: PublishedDataset) -> Callable[..., TaskSource]:
    """The factory of the plain classification of a dataset of 10 classes."""

    def source(
        *, place: DataPlace, ways: int, val_samples: int, image_size: int, channels: int, known: int, seeds: Seeds
    ) -> TaskSource:
        """10000 pictures test; the training set trains, and `val_samples` of it validate, the same in every run."""
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
        return SampleSource(load, sizes, identities, known=known, seeds=seeds, names=names)

    return source


mnist = _classification(PublishedDataset("MNIST", "MNIST/raw", _IDX_FILES, 60_000, 28, 1))
"""Handwritten digits, 28×28, grey."""

fashion_mnist = _classification(PublishedDataset("FashionMNIST", "FashionMNIST/raw", _IDX_FILES, 60_000, 28, 1))
"""Pieces of clothing, 28×28, grey."""

cifar10 = _classification(PublishedDataset("CIFAR10", "cifar-10-batches-py", _CIFAR10_FILES, 50_000, 32, 3))
"""Photographs, 32×32, of three colours."""
