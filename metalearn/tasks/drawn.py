"""Pictures that `metalearn data` has drawn: `emoji` by designers, and characters by fonts: `kanji` and `scripts`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from metalearn.errors import one_of, whole_number
from metalearn.tasks.common.episodes import EpisodeSpec, Seeds, identity
from metalearn.tasks.common.samples import DrawerProtocol, Drawn, DrawnClasses, drawn_tasks
from metalearn.tasks.common.stored import INDEX, pictures_by_split, read_set
from metalearn.types import TaskSource


def _drawn_set(name: str, side: int) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, protocol: DrawerProtocol,
        seeds: Seeds,
    ) -> TaskSource:  # fmt: skip
        """Few-shot classification of what `metalearn data NAME` has written into the folder NAME of `root`, or into
        `root` itself. Of `channels`, 1 is grey, with ink as the largest value, as in Omniglot; 3 is red, green, blue,
        on white. `protocol` says who is held back."""
        whole_number("image_size", image_size, at_least=8, at_most=side)
        one_of("channels", channels, (1, 3))

        def load() -> DrawnClasses:
            advice = f"type metalearn data {name}, or dataset.root=/path of the folder that holds {name}"
            folder = Path(root, name)
            if not (folder / INDEX).exists() and Path(root, INDEX).exists():
                folder = Path(root)
            index, splits = read_set(folder, advice), {}
            by_split = pictures_by_split(folder, index, image_size, channels, advice, ink=True)
            for split, (classes, pictures) in by_split.items():
                identities, names = [identity(name, one.key) for one in classes], [one.name for one in classes]
                drawers = [np.array(one.drawers, np.int64) for one in classes]
                splits[split] = Drawn(identities, names, drawers, pictures)
            return DrawnClasses(splits, index.drawers, family="emoji" if name == "emoji" else "fonts")

        return drawn_tasks(load, episode, protocol, rotations=rotations, seeds=seeds)

    return source


emoji = _drawn_set("emoji", 84)  # each by up to nine designers
kanji = _drawn_set("kanji", 56)  # each in the designs of up to 38 fonts
scripts = _drawn_set("scripts", 56)  # letters of six scripts, each in the designs of up to 38 fonts
