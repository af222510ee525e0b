"""Tasks of classes that several people have drawn. Some of them can be held back, whose hand no training shows."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metalearn.checks import Invalid, one_of, true_or_false
from metalearn.errors import DataError
from metalearn.tasks.common.episodes import (
    Classes,
    EpisodeShape,
    EpisodeSpec,
    Images,
    Seeds,
    check_shots,
    most_shots,
    shapes_of,
)
from metalearn.tasks.common.identities import identity
from metalearn.tasks.common.samples import few_shot
from metalearn.types import TaskSource

TESTS = ("all", "held", "cross")

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


class Drawn(NamedTuple):
    """The classes of a split: their `identities` and `names`; the number of the drawer of each picture of a class; and
    `pictures(label)`, uint8 [n, h, w] or [n, h, w, 3], in this order."""

    identities: Sequence[str]
    names: Sequence[str]
    drawers: Sequence[NDArray[np.int64]]
    pictures: Callable[[int], Images]


class DrawnClasses(NamedTuple):
    """The classes of every split, the names of the drawers by their numbers, and the decoder of the pictures. In a
    `family` of sets, drawers of the same name are the same; empty: those of each split are others."""

    splits: Mapping[str, Drawn]
    drawers: Sequence[str]
    decoder: str
    family: str


def drawn_tasks(
    load: Callable[[], DrawnClasses], episode: EpisodeSpec, protocol: DrawerProtocol, *, rotations: bool, seeds: Seeds
) -> TaskSource:
    """A source of few-shot tasks; algorithms that are trained on plain samples get the drawings of training classes.

    Args:
        load: gives the classes; called once, for the first task.
        episode, rotations, seeds: as for `metalearn.tasks.common.episodes.picture_tasks`.

    Raises:
        ValueError: an argument is not allowed.
        DataError: when the first episode is made: `load` raises it; a drawer is unknown; or classes are too small.
    """
    check_shots(episode.shots)
    shapes = shapes_of(episode)
    true_or_false("drop_small", protocol.drop_small)
    one_of("test", protocol.test, TESTS)
    if isinstance(protocol.held_drawers, str) or len(set(protocol.held_drawers)) != len(protocol.held_drawers):
        raise Invalid(
            "held_drawers", protocol.held_drawers, "must be a list of different names", "type KEY=[NAME,NAME]"
        )
    if protocol.test != "all" and not protocol.held_drawers:
        raise Invalid("test", protocol.test, "no drawer is held back", "type GROUP.held_drawers=[NAME,NAME] too")

    def chosen() -> dict[str, Classes]:
        splits, everyone, made_by, family = load()
        if unknown := [str(name) for name in protocol.held_drawers if str(name) not in everyone]:
            raise DataError(
                f"dataset.held_drawers: {unknown[0]} is none of the drawers, which are {', '.join(everyone)}"
            )
        if len(protocol.held_drawers) == len(everyone):
            raise DataError("dataset.held_drawers: names all drawers, and nobody is left to learn from")
        held = np.array(sorted(everyone.index(str(name)) for name in protocol.held_drawers), np.int64)

        def drawers(split: str) -> dict[str, str]:
            """As `metalearn.types.NamesDrawers` has them."""
            if not family or (split == "test" and protocol.test == "all"):
                return {}
            shown = [name for number, name in enumerate(everyone) if (number in held) == (split == "test")]
            return {identity(f"drawers of {family}", name): name for name in shown}

        return {
            split: _fitting(split, drawn, made_by, held, protocol, shapes)._replace(drawers=drawers(split))
            for split, drawn in splits.items()
        }

    return few_shot(chosen, shapes, episode, rotations=rotations, seeds=seeds, instead="omniglot_characters")


def _fitting(
    split: str, drawn: Drawn, decoder: str, held: NDArray[np.int64], protocol: DrawerProtocol,
    shapes: Mapping[str, EpisodeShape],
) -> Classes:  # fmt: skip
    """The classes of a split that fill its episodes, with the drawings that it shows.

    Raises:
        DataError: classes are too small, or too few are left.
    """
    ways, shots, queries = shapes[split]
    shots = most_shots(shots)
    test = protocol.test if split == "test" else "seen"
    apart = test == "cross"
    places: list[NDArray[np.int64]] = []
    support: list[int] = []
    for drawers in drawn.drawers:
        is_held = np.isin(drawers, held)
        seen, unseen = np.flatnonzero(~is_held), np.flatnonzero(is_held)
        shown = {"seen": seen, "all": np.arange(len(drawers)), "held": unseen, "cross": np.concatenate([seen, unseen])}
        places.append(shown[test])
        support.append(len(seen))
    sizes = [len(of_class) for of_class in places]

    def fits(number: int) -> bool:
        if apart:
            return support[number] >= shots and sizes[number] - support[number] >= queries
        return sizes[number] >= shots + queries

    kept = [number for number in range(len(places)) if fits(number)]
    if len(kept) < len(places):
        needed = f"{shots} + {queries}" if apart else f"{shots + queries}"
        small = f"{len(places) - len(kept)} of {len(places)} classes of '{split}' have fewer than {needed} drawings"
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

    def pictures(label: int) -> Images:
        number = kept[label]
        every = drawn.pictures(number)
        return every if len(places[number]) == len(every) and not apart else every[places[number]]

    return Classes(
        [drawn.identities[number] for number in kept], min(sizes[number] for number in kept), pictures, decoder,
        names=[drawn.names[number] for number in kept],
        support=[support[number] for number in kept] if apart else (),
    )  # fmt: skip
