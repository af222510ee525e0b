"""A set of photographs as `metalearn data NAME --from FOLDER` has written it, for the sources of few-shot tasks."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from metalearn.checks import Invalid
from metalearn.errors import DataError
from metalearn.tasks.common.drawn_set import INDEX, PICTURES, DrawnSet, pictures_of_size, read_set
from metalearn.tasks.common.episodes import SPLITS, Classes, EpisodeShape, Images, check_filled
from metalearn.tasks.common.identities import identity

log = logging.getLogger(__name__)

PARTLY = ", not as published"
"""The end of the name of the layout, in the index of a set that is not whole."""


def is_partial(written: DrawnSet) -> bool:
    """Whether a written set is not the published one."""
    return written.drawers[0].endswith(PARTLY)


class WrittenPhotographs(NamedTuple):
    """A written set: its folder, and what its index says."""

    folder: Path
    says: DrawnSet

    @staticmethod
    def found(name: str, root: Path) -> "WrittenPhotographs | None":
        """The set `name` in the folder of its name in `root`, or in `root` itself; None if there is none.

        Raises:
            DataError: it is damaged.
        """
        for folder in (root / name, root):
            if (folder / INDEX).is_file() and (folder / PICTURES).is_file():
                index = read_set(folder, _advice(name))
                if index.name == name:
                    return WrittenPhotographs(folder, index)
        return None

    def classes(
        self, shapes: Mapping[str, EpisodeShape], family: str, decoder: str, *, image_size: int, channels: int
    ) -> dict[str, Classes]:
        """The classes of every split, with the pictures in this size.

        Args:
            family: that of the classes' identities; see `metalearn.tasks.common.identities.identity`.

        Raises:
            DataError: the set is damaged, or too small for the episodes or for `image_size`.
        """
        name, side = self.says.name, self.says.shape[0]
        if is_partial(self.says):
            log.warning("%s: is not as published, as ATTRIBUTION.txt says in %s", name, self.folder)
        if image_size > side:
            raise DataError(
                str(Invalid("dataset.image_size", image_size, f"the pictures in {self.folder} have {side} pixels",
                            f"type dataset.image_size={side} or less"))
            )  # fmt: skip
        pictures = pictures_of_size(self.folder, self.says, image_size, channels, _advice(name))
        ends = np.cumsum([0, *(len(one.drawers) for one in self.says.classes)])

        def part(split: str) -> Classes:
            numbers = [number for number, one in enumerate(self.says.classes) if one.split == split]
            own = [self.says.classes[number] for number in numbers]

            def of_class(label: int) -> Images:
                return pictures[ends[numbers[label]] : ends[numbers[label] + 1]]

            fewest = min((len(one.drawers) for one in own), default=0)
            return Classes(
                [identity(family, one.key) for one in own], fewest, of_class, decoder, names=[one.name for one in own]
            )

        splits = {split: part(split) for split in SPLITS}
        counts = {split: (len(classes.identities), classes.fewest) for split, classes in splits.items()}
        try:
            check_filled(shapes, counts, "dataset.")
        except ValueError as error:
            raise DataError(f"{error}. This is {self.folder}") from error
        sizes = " / ".join(str(classes) for classes, _ in counts.values())
        log.info("%s: %s classes, %d pictures", self.folder, sizes, self.says.total)
        return splits


def _advice(name: str) -> str:
    return f"remove this folder, and type metalearn data {name} --from=/path/to/what/you/have"
