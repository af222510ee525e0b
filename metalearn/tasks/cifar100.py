"""Few-shot classification of CIFAR-100's photographs (Krizhevsky 2009): CIFAR-FS and FC100, which divide its classes.

The divisions are columns of `cifar100_classes.csv`. A class has 600 pictures: 500 from the training file and 100 from
the test file. torchvision reads them. One array in a cache file keeps them; all workers of a host map it into memory.
A set that metalearn data has written is read in their place, if there is one.
"""

from collections.abc import Callable

import numpy as np

from metalearn.errors import only, true_or_false
from metalearn.tasks.common.episodes import (
    SPLITS,
    Classes,
    EpisodeSpec,
    Images,
    Seeds,
    check_filled,
    identity,
    published_list,
    shapes_of,
)
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.stored import DataPlace, PublishedDataset, cached_array, read_published
from metalearn.types import TaskSource

PICTURES = 600  # of each class
DECODER = "cifar100-v1"  # raise the version if the array changes: older caches are not read then
_CIFAR100 = PublishedDataset("CIFAR100", "cifar-100-python", "train, test and meta", 50_000, 32, 3)


def classes_of(division: str, split: str) -> list[int]:
    """The numbers of a split's classes, as places in the list; `division` is `cifar_fs` or `fc100`."""
    return [number for number, row in enumerate(published_list("cifar100_classes.csv")) if row[division] == split]


def _few_shot(division: str) -> Callable[..., TaskSource]:
    """The factory of the few-shot tasks of a division, `cifar_fs` or `fc100`."""

    def source(
        *, place: DataPlace, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds
    ) -> TaskSource:
        """Few-shot classification of CIFAR-100's pictures."""
        shapes = shapes_of(episode)
        classes = {split: classes_of(division, split) for split in SPLITS}
        check_filled(shapes, {split: (len(numbers), PICTURES) for split, numbers in classes.items()})
        only("image_size", image_size, _CIFAR100.size, _CIFAR100.name)
        only("channels", channels, _CIFAR100.channels, _CIFAR100.name)
        true_or_false("download", place.download)

        def load() -> dict[str, Classes]:
            everyone = [row["class"] for row in published_list("cifar100_classes.csv")]

            def by_class() -> Images:
                """The classes in the order of the list."""
                train, test, names = read_published(_CIFAR100, place)
                whole = np.concatenate([train.pictures, test.pictures])
                labels = np.concatenate([train.classes, test.classes])
                return np.stack([whole[labels == names.index(name)] for name in everyone])

            shape = (len(everyone), PICTURES, _CIFAR100.size, _CIFAR100.size, _CIFAR100.channels)
            pictures = cached_array(DECODER, shape, by_class, title="CIFAR-100", unread=place.root)

            def part(numbers: list[int]) -> Classes:
                identities = [identity("cifar100", everyone[number]) for number in numbers]
                names = [everyone[number].replace("_", " ") for number in numbers]
                return Classes(identities, PICTURES, lambda label: pictures[numbers[label]], names=names)

            return {split: part(numbers) for split, numbers in classes.items()}

        return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="cifar10")

    return source


cifar_fs = _few_shot("cifar_fs")  # CIFAR-FS, Bertinetto et al. 2019 (arXiv 1805.08136): 64 / 16 / 20 classes

fc100 = _few_shot("fc100")
"""FC100, Oreshkin et al. 2018 (arXiv 1805.10123): 60 / 20 / 20 classes. Whole superclasses (12 / 4 / 4) go to a
split, so the test classes resemble no training class."""
