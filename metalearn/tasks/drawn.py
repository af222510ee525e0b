"""Pictures that `metalearn data` has drawn: `emoji` by designers, and characters by fonts: `kanji` and `scripts`. Some
drawers can be held back, so that no training shows their hand."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metalearn.errors import DataError, Invalid, one_of, true_or_false, whole_number
from metalearn.tasks.common.episodes import (
    Classes,
    EpisodeShape,
    EpisodeSpec,
    Images,
    Seeds,
    check_shots,
    identity,
    most_shots,
    shapes_of,
)
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.stored import INDEX, DrawnClass, pictures_by_split, read_set
from metalearn.types import TaskSource

log = logging.getLogger(__name__)


class DrawerProtocol(NamedTuple):
    """Who is held back, and what the test shows.

    Training and validation show no drawing of `held_drawers`. The `test` shows those of all drawers; or only those of
    the held ones; or `cross`: support pictures of the others, and query pictures of the held ones. With `drop_small`,
    classes with too few drawings for an episode are left out, and a line counts them; else they are refused.
    """

    held_drawers: Sequence[str | int]
    test: str
    drop_small: bool


def _drawn_set(name: str, side: int) -> Callable[..., TaskSource]:
    # In a family of sets, drawers of the same name are the same.
    family = "emoji" if name == "emoji" else "fonts"

    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, protocol: DrawerProtocol,
        seeds: Seeds,
    ) -> TaskSource:  # fmt: skip
        """Few-shot classification of what `metalearn data NAME` has written into the folder NAME of `root`, or into
        `root` itself. Of `channels`, 1 is grey, with ink as the largest value, as in Omniglot; 3 is red, green, blue,
        on white. `protocol` says who is held back. Algorithms that are trained on plain samples get the drawings of
        training classes."""
        whole_number("image_size", image_size, at_least=8, at_most=side)
        one_of("channels", channels, (1, 3))
        check_shots(episode.shots)
        shapes = shapes_of(episode)
        true_or_false("drop_small", protocol.drop_small)
        one_of("test", protocol.test, ("all", "held", "cross"))
        names = protocol.held_drawers
        if isinstance(names, str) or len(set(names)) != len(names):
            raise Invalid("held_drawers", names, "must be a list of different names", "type KEY=[NAME,NAME]")
        if protocol.test != "all" and not names:
            raise Invalid("test", protocol.test, "no drawer is held back", "type GROUP.held_drawers=[NAME,NAME] too")

        def load() -> dict[str, Classes]:
            advice = f"type metalearn data {name}, or dataset.root=/path of the folder that holds {name}"
            folder = Path(root, name)
            if not (folder / INDEX).exists() and Path(root, INDEX).exists():
                folder = Path(root)
            index = read_set(folder, advice)
            everyone, held_names = index.drawers, list(map(str, names))
            if unknown := [one for one in held_names if one not in everyone]:
                raise DataError(
                    f"dataset.held_drawers: {unknown[0]} is none of the drawers, which are {', '.join(everyone)}"
                )
            if len(held_names) == len(everyone):
                raise DataError("dataset.held_drawers: names all drawers, and none is left to learn from")
            held = np.array(sorted(map(everyone.index, held_names)), np.int64)

            def part(split: str, classes: Sequence[DrawnClass], pictures: Callable[[int], Images]) -> Classes:
                numbers, places, support = _fitting(split, classes, held, protocol, shapes[split])
                kept = [classes[number] for number in numbers]

                def shown(label: int) -> Images:
                    every = pictures(numbers[label])
                    return every if len(every) == len(places[label]) and not support else every[places[label]]

                everybody = split == "test" and protocol.test == "all"
                drawers = {
                    identity(f"drawers of {family}", drawer): drawer
                    for number, drawer in enumerate(everyone)
                    if not everybody and (number in held) == (split == "test")
                }
                return Classes(
                    [identity(name, one.key) for one in kept], min(map(len, places)), shown,
                    names=[one.name for one in kept], support=support, drawers=drawers,
                )  # fmt: skip

            parts = pictures_by_split(folder, index, image_size, channels, advice, ink=True)
            return {split: part(split, *of_split) for split, of_split in parts.items()}

        return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="omniglot_characters")

    return source


def _fitting(
    split: str, classes: Sequence[DrawnClass], held: NDArray[np.int64], protocol: DrawerProtocol, shape: EpisodeShape
) -> tuple[list[int], list[NDArray[np.int64]], list[int]]:
    """Of the classes of a split that fill its episodes: their numbers, the numbers of the pictures that each shows, and
    how many of these, the first ones, are for support sets only (empty if all pictures are for both)."""
    ways, shots, queries = shape.ways, most_shots(shape.shots), shape.queries
    test = protocol.test if split == "test" else "seen"
    apart = test == "cross"
    kept, places, support = list[int](), list[NDArray[np.int64]](), list[int]()
    for number, one in enumerate(classes):
        is_held = np.isin(one.drawers, held)
        seen, unseen = np.flatnonzero(~is_held), np.flatnonzero(is_held)
        shown = {"seen": seen, "all": np.arange(len(is_held)), "held": unseen, "cross": np.concatenate([seen, unseen])}
        enough = len(seen) >= shots and len(unseen) >= queries if apart else len(shown[test]) >= shots + queries
        if enough:
            kept.append(number)
            places.append(shown[test])
            support += [len(seen)] if apart else []
    if len(kept) < len(classes):
        needed = f"{shots} + {queries}" if apart else f"{shots + queries}"
        small = f"{len(classes) - len(kept)} of {len(classes)} classes of '{split}' have fewer than {needed} drawings"
        if not protocol.drop_small:
            raise DataError(
                f"dataset: {small} that it shows, by dataset.shots={shots} and dataset.queries={queries}; type fewer, "
                "or dataset.drop_small=true to leave them out"
            )
        log.info("%s, and are left out", small)
    if len(kept) < ways:
        raise DataError(
            f"dataset: an episode has {ways} classes, and {len(kept)} of '{split}' have drawings for "
            f"dataset.shots={shots} and dataset.queries={queries}; type fewer dataset.ways, shots or queries"
        )
    return kept, places, support


emoji = _drawn_set("emoji", 84)  # each by up to nine designers
kanji = _drawn_set("kanji", 56)  # each in the designs of up to 38 fonts
scripts = _drawn_set("scripts", 56)  # letters of six scripts, each in the designs of up to 38 fonts
