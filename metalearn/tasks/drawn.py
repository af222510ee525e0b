"""Pictures that `metalearn data` has drawn: `emoji` by designers, and characters by fonts: `kanji` and `scripts`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from metalearn.checks import one_of, whole_number
from metalearn.tasks.common.episodes import EpisodeSpec, Images, Seeds
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.samples import DrawerProtocol, Drawn, DrawnClasses, drawn_tasks
from metalearn.tasks.common.stored import INDEX, DrawnClass, pictures_by_split, read_set
from metalearn.types import TaskSource


def _drawn_set(name: str, side: int, title: str) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, protocol: DrawerProtocol,
        seeds: Seeds,
    ) -> TaskSource:  # fmt: skip
        whole_number("image_size", image_size, at_least=8, at_most=side)
        one_of("channels", channels, (1, 3))
        return drawn_tasks(
            lambda: _load(name, Path(root), image_size, channels), episode, protocol, rotations=rotations, seeds=seeds
        )

    source.__doc__ = f"""Few-shot classification of {title}, which `metalearn data {name}` has written into the folder
    {name} of `root`, or into `root` itself. `image_size` is at most {side} pixels. Of `channels`, 1 is grey, with ink
    as the largest value, as in Omniglot; 3 is red, green, blue, on white. `protocol` says who is held back.

    Raises:
        ValueError: an argument is not allowed.
        DataError: when the first episode is made: the set is missing or damaged, or its classes are too small.
    """
    return source


emoji = _drawn_set("emoji", 84, "emoji, each by up to nine designers")
kanji = _drawn_set("kanji", 56, "kanji, each in the designs of up to 38 fonts")
scripts = _drawn_set("scripts", 56, "letters of six scripts, each in the designs of up to 38 fonts")


def _load(name: str, root: Path, size: int, channels: int) -> DrawnClasses:
    folder = root if not (root / name / INDEX).exists() and (root / INDEX).exists() else root / name
    advice = f"type metalearn data {name}, or dataset.root=/path of the folder that holds {name}"
    index = read_set(folder, advice)

    def part(classes: Sequence[DrawnClass], pictures: Callable[[int], Images]) -> Drawn:
        drawers = [np.array(one.drawers, np.int64) for one in classes]
        return Drawn([identity(name, one.key) for one in classes], [one.name for one in classes], drawers, pictures)

    by_split = pictures_by_split(folder, index, size, channels, advice, ink=True)
    splits = {split: part(*of_split) for split, of_split in by_split.items()}
    return DrawnClasses(splits, index.drawers, family="emoji" if name == "emoji" else "fonts")
