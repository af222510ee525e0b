"""Few-shot classification of photographs that `metalearn data NAME --from FOLDER` has written.

mini-ImageNet, Vinyals et al. 2016 (arXiv 1606.04080): 100 classes of ImageNet, divided as Ravi and Larochelle 2017
("Optimization as a model for few-shot learning", ICLR) divide them. tiered-ImageNet, Ren et al. 2018 (arXiv
1803.00676): 608 classes of ImageNet, divided by whole categories; the classes are those of the authors' lists.
CUB-200-2011, Wah et al. 2011: 200 kinds of birds, divided as Chen et al. 2019 (arXiv 1904.04232) divide them: by their
places in the alphabet, every second one to train, and of the others every second one each to validate and to test.

The divisions are `NAME_classes.csv`.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from metalearn.errors import DataError, Invalid
from metalearn.tasks.common.episodes import (
    Classes,
    EpisodeSpec,
    Seeds,
    check_filled,
    check_read,
    identity,
    published_list,
    shapes_of,
)
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.stored import FAMILY, INDEX, PICTURES, check_picture_shape, pictures_by_split, read_set
from metalearn.types import TaskSource

log = logging.getLogger(__name__)


@cache
def published_splits(name: str) -> Mapping[str, str]:
    """Class → its split."""
    return {row["class"]: row["split"] for row in published_list(f"{name}_classes.csv")}


def _written(name: str) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds
    ) -> TaskSource:
        """Few-shot classification of photographs. `root` holds the folder NAME, or is that folder. `image_size` is 84
        at most; `channels` is 1 (grey) or 3 (red, green, blue). With `rotations`, each drawn class is turned by a
        random multiple of 90°, in every split."""
        shapes = shapes_of(episode)
        splits = list(published_splits(name).values())
        # The number of pictures is not known yet. This check assumes as many as an episode needs.
        check_filled(shapes, {split: (splits.count(split), shape.most) for split, shape in shapes.items()})
        check_picture_shape(image_size, channels)

        def load() -> dict[str, Classes]:
            advice = f"remove this folder, and type metalearn data {name} --from=/path/to/what/you/have"
            for folder in (Path(root, name), Path(root)):
                if (folder / PICTURES).is_file() and (folder / INDEX).is_file():
                    index = read_set(folder, advice)
                    if index.name == name:
                        break
            else:
                raise DataError(
                    f"dataset.root={root}: there is no folder {name} that metalearn data has written; type metalearn "
                    f"data {name} --from=/path/to/what/you/have, or dataset.root=/path of the folder that holds {name}"
                )
            if index.is_partial:
                log.warning("%s: is not as published, as ATTRIBUTION.txt says in %s", name, folder)
            if image_size > index.shape[0]:
                allowed = f"the pictures in {folder} have {index.shape[0]} pixels"
                smaller = f"type dataset.image_size={index.shape[0]} or less"
                raise DataError(str(Invalid("dataset.image_size", image_size, allowed, smaller)))
            splits = {}
            for split, (classes, pictures) in pictures_by_split(folder, index, image_size, channels, advice).items():
                identities = [identity(FAMILY, one.key) for one in classes]
                fewest = min((len(one.drawers) for one in classes), default=0)
                splits[split] = Classes(identities, fewest, pictures, names=[one.name for one in classes])
            counts = {split: (len(part.identities), part.fewest) for split, part in splits.items()}
            check_read(shapes, counts, str(folder))
            log.info("%s: %s classes, %d pictures", folder, " / ".join(str(c) for c, _ in counts.values()), index.total)
            return splits

        return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="cifar10")

    return source


mini_imagenet = _written("mini_imagenet")  # 64 / 16 / 20 classes
tiered_imagenet = _written("tiered_imagenet")  # 351 / 97 / 160 classes
cub = _written("cub")  # 100 / 50 / 50 kinds of birds
