"""Few-shot classification of photographs that `metalearn data NAME --from FOLDER` has written.

tiered-ImageNet, Ren et al. 2018 (arXiv 1803.00676): 608 classes of ImageNet, divided by whole categories; the classes
are those of the authors' lists. CUB-200-2011, Wah et al. 2011: 200 kinds of birds, divided as Chen et al. 2019 (arXiv
1904.04232) divide them: by their places in the alphabet, every second one to train, and of the others every second one
each to validate and to test.
"""

from collections.abc import Callable
from pathlib import Path

from metalearn.checks import true_or_false
from metalearn.errors import DataError
from metalearn.tasks.common.decoded_classes import FAMILY, check_picture_shape, decoder
from metalearn.tasks.common.drawn_set import written_photographs
from metalearn.tasks.common.episodes import (
    Classes,
    EpisodeSpec,
    Seeds,
    check_filled,
    shapes_of,
)
from metalearn.tasks.common.identities import published_list
from metalearn.tasks.common.samples import few_shot
from metalearn.types import TaskSource


def _written(name: str, title: str) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds
    ) -> TaskSource:
        shapes = shapes_of(episode)
        splits = [row["split"] for row in published_list(f"{name}_classes.csv")]
        check_filled(shapes, {split: (splits.count(split), shape.most) for split, shape in shapes.items()})
        check_picture_shape(image_size, channels)
        true_or_false("rotations", rotations)

        def load() -> dict[str, Classes]:
            written = written_photographs(
                name, Path(root), shapes, FAMILY, decoder(name), image_size=image_size, channels=channels
            )
            if written is None:
                raise DataError(
                    f"dataset.root={root}: there is no folder {name} that metalearn data has written; type metalearn "
                    f"data {name} --from=/path/to/what/you/have, or dataset.root=/path of the folder that holds {name}"
                )
            return written

        return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="cifar10")

    source.__doc__ = f"""{title}; algorithms that are trained on plain samples get the training classes.

    Args:
        root: the folder in which `metalearn data {name} --from=…` has written the folder {name}; or that folder itself.
        image_size: height and width in pixels, at most those of the set: 84.
        channels: 1 (grey) or 3 (red, green, blue).
        rotations: turn each drawn class by a random multiple of 90°, in every split.

    Raises:
        ValueError: an argument is not allowed.
        DataError: when the first episode is made: the set is missing or damaged, or its classes are too small.
    """
    return source


tiered_imagenet = _written("tiered_imagenet", "tiered-ImageNet: 351 / 97 / 160 classes of photographs")
cub = _written("cub", "CUB-200-2011: 100 / 50 / 50 kinds of birds")
