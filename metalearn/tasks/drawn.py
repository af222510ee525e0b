"""Pictures that `metalearn data` has drawn: `emoji` by designers, and characters by fonts: `kanji` and `scripts`."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from metalearn.checks import one_of, whole_number
from metalearn.tasks.common.drawers import DrawerProtocol, Drawn, DrawnClasses, drawn_tasks
from metalearn.tasks.common.drawn_set import DrawnClass, pictures_by_split, read_set
from metalearn.tasks.common.episodes import EpisodeSpec, Images, Seeds
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.written import INDEX
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

    source.__doc__ = f"""Few-shot classification of {title}.

    Args:
        root: the folder in which `metalearn data {name}` has made the folder {name}; or that folder itself.
        image_size: height and width in pixels, at most {side}.
        channels: 1: grey, ink is the largest value, as in Omniglot; 3: red, green, blue, on white.
        rotations: turn each drawn class by a random multiple of 90°, in every split.
        protocol: who is held back, and what the test shows.

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
    made_of = f"{name}-{index.digest[:16]}"
    family = "emoji" if name == "emoji" else "fonts"
    return DrawnClasses(splits, index.drawers, made_of, family)
