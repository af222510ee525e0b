"""Few-shot classification of CIFAR-100's photographs (Krizhevsky 2009): CIFAR-FS and FC100, which divide its classes.

The divisions are columns of `cifar100_classes.csv`. The pictures of a class, 500 from the training file and 100 from
the test file, are read by torchvision and kept in one array in a cache file, which all workers of a host map.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from metalearn.checks import only, true_or_false
from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.episodes import SPLITS, Classes, Images, check_filled, picture_tasks, shapes_of
from metalearn.tasks.common.torchvision_files import Published, read_published
from metalearn.types import TaskSource

PICTURES = 600
"""Of each class."""
DECODER = 1
"""Version of what is kept in the cache: raise it when that changes."""

_CIFAR100 = Published("CIFAR100", "cifar-100-python", "train, test and meta", 50_000, 32, 3)


@cache
def _rows() -> tuple[Mapping[str, str], ...]:
    with (Path(__file__).parent / "cifar100_classes.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


def classes_of(division: str, split: str) -> list[int]:
    """The numbers of a split's classes, in the order of the list; `division` is `cifar_fs` or `fc100`."""
    return [number for number, row in enumerate(_rows()) if row[division] == split]


def _by_class(root: Path, download: bool) -> Images:
    """All pictures, [100, 600, 32, 32, 3], the classes in the order of the list."""
    train, test, names = read_published(_CIFAR100, root, download)
    pictures = np.concatenate([train.pictures, test.pictures])
    classes = np.concatenate([train.classes, test.classes])
    return np.stack([pictures[classes == names.index(row["class"])] for row in _rows()])


def _source(
    division: str, *, root: str, ways: int, shots: int, queries: int, train_ways: int | None,
    train_queries: int | None, image_size: int, channels: int, rotations: bool, download: bool, seed: int,
    eval_seed: int,
) -> TaskSource:  # fmt: skip
    shapes = shapes_of(ways, shots, queries, train_ways, train_queries)
    classes = {split: classes_of(division, split) for split in SPLITS}
    check_filled(shapes, {split: (len(chosen), PICTURES) for split, chosen in classes.items()})
    only("image_size", image_size, _CIFAR100.size, _CIFAR100.name)
    only("channels", channels, _CIFAR100.channels, _CIFAR100.name)
    true_or_false("download", download)

    def load() -> dict[str, Classes]:
        shape = (len(_rows()), PICTURES, image_size, image_size, channels)
        pictures = cached_array(f"cifar100-v{DECODER}", shape, lambda: _by_class(Path(root), download))

        def part(chosen: list[int]) -> Classes:
            return Classes(len(chosen), PICTURES, lambda label: pictures[chosen[label]])

        return {split: part(chosen) for split, chosen in classes.items()}

    return picture_tasks(load, shapes, rotations=rotations, seed=seed, eval_seed=eval_seed)


def cifar_fs(
    *, root: str, ways: int, shots: int, queries: int, train_ways: int | None = None,
    train_queries: int | None = None,
    image_size: int, channels: int, rotations: bool, download: bool, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """CIFAR-FS, Bertinetto et al. 2019 (arXiv 1805.08136): 64 / 16 / 20 classes of CIFAR-100, 600 pictures of each.

    Args:
        root: the folder that holds cifar-100-python.
        ways, shots, queries: classes of an episode; support and query pictures of each class.
        train_ways, train_queries: the same for training tasks, where they differ.
        image_size: height and width in pixels, must be 32.
        channels: must be 3 (red, green, blue).
        rotations: turn each drawn class by a random multiple of 90°, in every split alike.
        download: fetch the files by torchvision where they cannot be read.
        seed, eval_seed: what training tasks, and what validation and test tasks, are drawn from.

    Raises:
        ValueError: an episode that the classes cannot fill, or another size or number of channels.
        DataError: when the first episode is made: files missing or damaged.
    """
    return _source(
        "cifar_fs", root=root, ways=ways, shots=shots, queries=queries, train_ways=train_ways,
        train_queries=train_queries, image_size=image_size, channels=channels, rotations=rotations, download=download,
        seed=seed, eval_seed=eval_seed,
    )  # fmt: skip


def fc100(
    *, root: str, ways: int, shots: int, queries: int, train_ways: int | None = None,
    train_queries: int | None = None,
    image_size: int, channels: int, rotations: bool, download: bool, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """FC100, Oreshkin et al. 2018 (arXiv 1805.10123): 60 / 20 / 20 classes of CIFAR-100, 600 pictures of each. Whole
    superclasses (12 / 4 / 4) go to a split, so that what is tested resembles nothing that was learned.

    Arguments and errors are those of `cifar_fs`.
    """
    return _source(
        "fc100", root=root, ways=ways, shots=shots, queries=queries, train_ways=train_ways,
        train_queries=train_queries, image_size=image_size, channels=channels, rotations=rotations, download=download,
        seed=seed, eval_seed=eval_seed,
    )  # fmt: skip
