"""Pictures that `metalearn data` has drawn: `emoji` by designers, and characters by fonts: `kanji` and `scripts`."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from metalearn.checks import only, whole_number
from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.drawers import DrawerProtocol, Drawn, DrawnClasses, drawn_tasks
from metalearn.tasks.common.drawn_set import INDEX, DrawnSet, read_pictures, read_set
from metalearn.tasks.common.episodes import SPLITS, EpisodeSpec, Images, Seeds
from metalearn.tasks.common.identities import identity
from metalearn.types import TaskSource

log = logging.getLogger(__name__)


def _drawn_set(name: str, side: int, channels_of: int, title: str) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, protocol: DrawerProtocol,
        seeds: Seeds,
    ) -> TaskSource:  # fmt: skip
        whole_number("image_size", image_size, at_least=8, at_most=side)
        only("channels", channels, channels_of, title)
        return drawn_tasks(
            lambda: _load(name, Path(root), image_size), episode, protocol, rotations=rotations, seeds=seeds
        )

    source.__doc__ = f"""Few-shot classification of {title}.

    Args:
        root: the folder in which `metalearn data {name}` has made the folder {name}; or that folder itself.
        image_size: height and width in pixels, at most {side}.
        channels: must be {channels_of}.
        rotations: turn each drawn class by a random multiple of 90°, in every split.
        protocol: who is held back, and what the test shows.

    Raises:
        ValueError: an argument is not allowed.
        DataError: when the first episode is made: the set is missing or damaged, or its classes are too small.
    """
    return source


emoji = _drawn_set("emoji", 84, 3, "emoji, each by up to nine designers")
kanji = _drawn_set("kanji", 56, 1, "kanji, each in the designs of up to 38 fonts")
scripts = _drawn_set("scripts", 56, 1, "letters of six scripts, each in the designs of up to 38 fonts")


def _load(name: str, root: Path, size: int) -> DrawnClasses:
    folder = root if not (root / name / INDEX).exists() and (root / INDEX).exists() else root / name
    advice = f"type metalearn data {name}, or dataset.root=/path of the folder that holds {name}"
    index = read_set(folder, advice)
    pictures = _reduced(index, folder, size, advice)
    ends = np.cumsum([0, *(len(one.drawers) for one in index.classes)])

    def part(split: str) -> Drawn:
        numbers = [number for number, one in enumerate(index.classes) if one.split == split]
        classes = [index.classes[number] for number in numbers]

        def of_class(label: int) -> Images:
            number = numbers[label]
            return pictures[ends[number] : ends[number + 1]]

        return Drawn(
            [identity(name, one.key) for one in classes], [one.name for one in classes],
            [np.array(one.drawers, np.int64) for one in classes], of_class,
        )  # fmt: skip

    return DrawnClasses({split: part(split) for split in SPLITS}, index.drawers, f"{name}-{index.digest[:16]}")


def _reduced(index: DrawnSet, folder: Path, size: int, advice: str) -> Images:
    """The pictures in this size: those of the set, or reduced from them and kept in the cache."""
    if size == index.shape[0]:
        return read_pictures(folder, index, advice)

    def make() -> Images:
        whole = read_pictures(folder, index, advice)
        log.info("%s: %d pictures are reduced to %d pixels once; they are kept in the cache", folder, len(whole), size)
        lanczos = Image.Resampling.LANCZOS
        return np.stack([np.asarray(Image.fromarray(one).resize((size, size), lanczos)) for one in whole])

    shape = (index.total, size, size, *index.shape[2:])
    return cached_array(f"{index.name}-{index.digest[:16]}-{size}", shape, make, title=index.name)
