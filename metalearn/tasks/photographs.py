"""Few-shot classification of photographs that `metalearn data NAME --from FOLDER` has written.

mini-ImageNet, Vinyals et al. 2016 (arXiv 1606.04080): 100 classes of ImageNet, divided as Ravi and Larochelle 2017
("Optimization as a model for few-shot learning", ICLR) divide them. tiered-ImageNet, Ren et al. 2018 (arXiv
1803.00676): 608 classes of ImageNet, divided by whole categories; the classes are those of the authors' lists.
CUB-200-2011, Wah et al. 2011: 200 kinds of birds, divided as Chen et al. 2019 (arXiv 1904.04232) divide them: by their
places in the alphabet, every second one to train, and of the others every second one each to validate and to test.

The divisions are `NAME_classes.csv`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from metalearn.errors import DataError
from metalearn.tasks.common.episodes import Classes, EpisodeSpec, Seeds, check_filled, shapes_of
from metalearn.tasks.common.identities import published_list
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.stored import check_picture_shape, written_photographs
from metalearn.types import TaskSource


@cache
def published_splits(name: str) -> Mapping[str, str]:
    """Class → its split."""
    return {row["class"]: row["split"] for row in published_list(f"{name}_classes.csv")}


def _written(name: str, title: str) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds
    ) -> TaskSource:
        shapes = shapes_of(episode)
        splits = list(published_splits(name).values())
        # The number of pictures is not known yet. This check assumes as many as an episode needs.
        check_filled(shapes, {split: (splits.count(split), shape.most) for split, shape in shapes.items()})
        check_picture_shape(image_size, channels)

        def load() -> dict[str, Classes]:
            size = {"image_size": image_size, "channels": channels}
            written = written_photographs(name, Path(root), shapes, **size)
            if written is None:
                raise DataError(
                    f"dataset.root={root}: there is no folder {name} that metalearn data has written; type metalearn "
                    f"data {name} --from=/path/to/what/you/have, or dataset.root=/path of the folder that holds {name}"
                )
            return written

        return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="cifar10")

    source.__doc__ = f"""{title}, which `metalearn data {name} --from=…` has written.

    Args:
        root: holds the folder {name}, or is that folder.
        image_size: height and width in pixels, 84 at most.
        channels: 1 (grey) or 3 (red, green, blue).
        rotations: turn each drawn class by a random multiple of 90°, in every split.

    Raises:
        ValueError: an argument is not allowed.
        DataError: when the first episode is made: the set is missing or damaged, or its classes are too small.
    """
    return source


mini_imagenet = _written("mini_imagenet", "mini-ImageNet: 64 / 16 / 20 classes of photographs")
tiered_imagenet = _written("tiered_imagenet", "tiered-ImageNet: 351 / 97 / 160 classes of photographs")
cub = _written("cub", "CUB-200-2011: 100 / 50 / 50 kinds of birds")
