"""Omniglot: 1623 handwritten characters of 50 alphabets, 20 drawings each (Lake et al. 2015, Science 350).

`omniglot_characters.csv` lists every character, with a digest of its pixels and its split in each split list. The
pictures are read from the published folders or archives, verified, reduced to `image_size` and kept as one array in a
cache file. All workers of a host map that file into memory.
"""

import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from metalearn.errors import DataError, Invalid, one_of, only, true_or_false, whole_number
from metalearn.tasks.common.episodes import (
    META_DATASET,
    NO_LABELS,
    Classes,
    EpisodeShape,
    EpisodeSpec,
    FixedTask,
    Grouped,
    Images,
    Seeds,
    check_filled,
    identity,
    published_list,
    shapes_of,
    turned,
)
from metalearn.tasks.common.samples import drawn_samples, few_shot
from metalearn.tasks.common.stored import DataPlace, cached_array
from metalearn.types import TaskSource

DRAWINGS = 20
DECODER = "omniglot-v1"  # raise the version if decoding changes: older caches are not read then
SPLIT_LISTS = ("paper", "lake", "vinyals")
ALPHABETS = "alphabets"
"""The split of whole alphabets: those of the evaluation set test, and `HELD_BACK` of the background set validate."""

HELD_BACK = frozenset({"Anglo-Saxon_Futhorc", "Bengali", "Futurama", "Japanese_(hiragana)", "Mkhedruli_(Georgian)"})
"""Every fifth of the background alphabets with at least twenty characters, by name, from the second one on."""

log = logging.getLogger(__name__)


class Character(NamedTuple):
    """A row of the list: the character's folder, the digest of its drawings, and its split in every split list."""

    path: str
    digest: str
    parts: dict[str, str]


@cache
def characters() -> tuple[Character, ...]:
    """All 1623 characters, in the order of the decoded array."""
    every = []
    for row in published_list("omniglot_characters.csv"):
        collection, alphabet, _ = row["character"].split("/")
        part = "test" if collection == "images_evaluation" else "val" if alphabet in HELD_BACK else "train"
        parts = {name: row[name] for name in SPLIT_LISTS} | {ALPHABETS: part}
        every.append(Character(row["character"], row["digest"], parts))
    return tuple(every)


def lake_runs(classes: Sequence[tuple[int, int]]) -> list[FixedTask]:
    """The twenty runs of Lake et al. 2015 (figure 6; brendenlake/omniglot, python/one-shot-classification): the task of
    each is twenty characters of one alphabet, a drawing of each by one drawer, and another by a second one. `classes`
    are those of the test, as by `classes_of`."""
    labels = {characters()[number].path: label for label, (number, _) in enumerate(classes)}
    runs = []
    for row in published_list("omniglot_lake_runs.csv"):
        paths = [f"images_evaluation/{row['alphabet']}/character{int(n):02}" for n in row["characters"].split()]
        runs.append(FixedTask([labels[path] for path in paths], [int(row["known"]) - 1, int(row["asked"]) - 1]))
    return runs


STREAM, STREAMS = EpisodeShape(600, 15, 5), 10
"""The test of Beaulieu et al. 2020 (arXiv 2002.09571): the shape of a task, and how many there are here."""


def _grouped(
    split: str, within: str | None, test: str | None, shapes: Mapping[str, EpisodeShape], labels: str,
    classes: Mapping[str, Sequence[tuple[int, int]]],
) -> Grouped:  # fmt: skip
    """What the keys `within` and `test` ask for. Raises ValueError if it does not fit the episode or the split."""
    one_of("within", within, (None, "alphabet"))
    one_of("test", test, (None, "lake_runs", "stream"))
    if (within or test) and shapes["train"].shots == META_DATASET:
        raise Invalid("shots", META_DATASET, "must be a number with dataset.within and dataset.test", "type KEY=1")
    if within and labels == NO_LABELS:
        raise Invalid("within", within, "tasks without labels have no alphabet", "type KEY=null")
    if test == "stream" and split not in (ALPHABETS, "lake"):
        raise Invalid("test", test, "has characters of the evaluation set", f"type GROUP.split={ALPHABETS}")
    if test == "lake_runs" and (split not in (ALPHABETS, "lake") or shapes["test"] != (20, 1, 1)):
        raise Invalid(
            "test", test, "has 20 classes of the evaluation set, a drawing to know and one to ask for",
            "type GROUP.split=alphabets GROUP.ways=20 GROUP.shots=1 GROUP.queries=1",
        )  # fmt: skip
    groups: dict[str, list[list[int]]] = {}
    for part, of_part in classes.items() if within else ():
        by_alphabet: dict[str, list[int]] = {}
        for label, (number, _) in enumerate(of_part):
            by_alphabet.setdefault(characters()[number].path.split("/")[1], []).append(label)
        groups[part], most = list(by_alphabet.values()), max(map(len, by_alphabet.values()))
        if most < shapes[part].ways and not (test and part == "test"):
            allowed = f"the split '{part}' of dataset.split={split} has at most {most} characters of an alphabet"
            raise Invalid("ways", shapes[part].ways, allowed, f"type KEY={most}, or GROUP.split={ALPHABETS}")
    if test is None:
        return Grouped(groups, {})
    if test == "lake_runs":
        return Grouped(groups, {"test": lake_runs(classes["test"])})
    fixed = []
    for number in range(STREAMS):  # drawn by numbers that are the same in every run
        rng = np.random.default_rng(number)
        of_task = rng.permutation(len(classes["test"]))[: STREAM.ways].tolist()
        fixed.append(FixedTask(of_task, rng.permutation(DRAWINGS).tolist()))
    return Grouped(groups, {"test": fixed})


def classes_of(split_list: str, split: str, rotations: bool) -> list[tuple[int, int]]:
    """The classes of a split as (number of the character, quarter turns).

    In `vinyals` with rotations, every quarter turn of a character is a class of its own.
    """
    numbers = [i for i, character in enumerate(characters()) if character.parts[split_list] == split]
    turns = range(4) if split_list == "vinyals" and rotations else range(1)
    return [(number, turn) for turn in turns for number in numbers]


def identities(numbers: Iterable[int]) -> list[str]:
    """The identities of the characters with these numbers. A turned character is the same character."""
    return [identity("omniglot", characters()[number].digest) for number in numbers]


def names_of(classes: Iterable[tuple[int, int]]) -> list[str]:
    """What people call the classes (number of the character, quarter turns)."""
    names = []
    for number, turns in classes:
        _, alphabet, character = characters()[number].path.split("/")
        turned_by = f", turned by {90 * turns}°" if turns else ""
        names.append(f"{alphabet.replace('_', ' ')} {int(character.removeprefix('character'))}{turned_by}")
    return names


# The published files

COLLECTIONS = ("images_background", "images_evaluation")
_DEPTH = 5


class Drawings(NamedTuple):
    """One of the two collections of pictures, in the archive or folder `where`: the paths of the pictures of each
    character, in order, and a function that gives the bytes of one. A character is named as
    "images_background/Alphabet/character01"."""

    where: Path
    paths: Mapping[str, Sequence[str]]
    read: Callable[[str], bytes]


def find_collections(root: Path) -> dict[str, Drawings]:
    """The collections under `root`, by name. If there is an archive and a folder, the archive is taken. Raises
    DataError for a damaged one."""
    # torchvision's reader wants both collections, in a folder omniglot-py alone.
    places: dict[str, Path] = {}
    for folder, subfolders, files in os.walk(root, followlinks=True):
        here = Path(folder)
        for name in COLLECTIONS:
            if f"{name}.zip" in files and (name not in places or places[name].suffix != ".zip"):
                places[name] = here / f"{name}.zip"
            if name in subfolders:
                subfolders.remove(name)
                places.setdefault(name, here / name)
        # Not deeper: a folder of data sets may hold millions of files.
        deep = len(here.relative_to(root).parts) >= _DEPTH
        subfolders[:] = [] if deep else sorted(subfolders)
    return {name: _drawings(place) for name, place in places.items()}


def _drawings(where: Path) -> Drawings:
    read: Callable[[str], bytes]
    if where.suffix == ".zip":
        try:
            archive = zipfile.ZipFile(where)
        except (zipfile.BadZipFile, OSError) as error:
            raise DataError(f"{where}: the archive is damaged or not complete ({error}); fetch it again") from error
        names, read = archive.namelist(), archive.read
    else:
        names = [path.relative_to(where.parent).as_posix() for path in where.glob("*/*/*.png")]
        read = lambda name: (where.parent / name).read_bytes()  # noqa: E731
    paths: dict[str, list[str]] = {}
    for name in sorted(name for name in names if name.endswith(".png")):
        paths.setdefault(name.rpartition("/")[0], []).append(name)
    return Drawings(where, paths, read)


def decode_character(character: Character, files: Drawings, size: int) -> Images:
    """The drawings of a character, [20, size, size], ink in [0, 255]. Raises DataError if they are not the published
    ones, or cannot be read."""
    paths = files.paths.get(character.path, ())
    if len(paths) != DRAWINGS:
        raise DataError(f"{files.where}: {character.path} has {len(paths)} drawings of {DRAWINGS}: it is not complete")
    pictures = []
    for path in paths:
        try:
            pictures.append(Image.open(io.BytesIO(files.read(path)), formats=["PNG"]).convert("L"))
        except Exception as error:  # zipfile and Pillow raise many types for what is broken
            raise DataError(f"{files.where}: {path} cannot be read ({error}); fetch the files again") from error
    # The digest of the black-and-white pixels alone, not of the files that hold them.
    pixels = b"".join(picture.convert("1").tobytes() for picture in pictures)
    if hashlib.sha256(pixels).hexdigest()[:16] != character.digest:
        raise DataError(f"{files.where}: the drawings of {character.path} are not the published ones")
    small = [picture.resize((size, size), Image.Resampling.LANCZOS) for picture in pictures]
    return np.stack([255 - np.asarray(picture, np.uint8) for picture in small])


def decoded(place: DataPlace, size: int) -> Images:
    """Every drawing, [1623, 20, size, size], ink in [0, 255]; from the cache if it is there. Raises DataError if
    pictures are missing, unreadable or not the published ones."""

    def decode() -> Images:
        root = Path(place.root)
        collections, why = find_collections(root), ""
        if len(collections) < 2 and place.download:
            import torchvision  # takes a second, and only a download needs it

            try:
                for background in (True, False):
                    torchvision.datasets.Omniglot(str(root), background=background, download=True)
                collections = find_collections(root)
            except Exception as error:  # the network fails in many ways
                why = f" and cannot be downloaded ({error})"
        if len(collections) < 2:
            raise DataError(
                f"dataset.root={root}: Omniglot is not there{why}. Put images_background.zip and images_evaluation.zip "
                "(or the folders of these names) anywhere under it, or name their folder: METALEARN_DATA=/path/to/data "
                "or dataset.root=/path/to/data"
            )
        log.info("decoding Omniglot from %s", " and ".join(str(files.where) for files in collections.values()))
        return np.stack(
            [decode_character(character, collections[character.path.split("/")[0]], size) for character in characters()]
        )

    shape = (len(characters()), DRAWINGS, size, size)
    return cached_array(f"{DECODER}-{size}", shape, decode, title="Omniglot", unread=place.root)


def _check(place: DataPlace, split: str, image_size: int, channels: int) -> None:
    one_of("split", split, (*SPLIT_LISTS, ALPHABETS))
    true_or_false("download", place.download)
    whole_number("image_size", image_size, at_least=8, at_most=105)
    only("channels", channels, 1, "Omniglot, which is black on white")


def omniglot(
    *, place: DataPlace, split: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool,
    seeds: Seeds, within: str | None = None, test: str | None = None,
) -> TaskSource:  # fmt: skip
    """Few-shot classification of Omniglot characters; `paper` divides them as Finn et al. 2017 do."""
    _check(place, split, image_size, channels)
    true_or_false("rotations", rotations)
    shapes = shapes_of(episode) | ({"test": STREAM} if test == "stream" else {})
    classes = {part: classes_of(split, part, rotations) for part in shapes}
    grouped = _grouped(split, within, test, shapes, episode.labels, classes)
    check_filled(shapes, {part: (len(of_part), DRAWINGS) for part, of_part in classes.items()})

    def load() -> dict[str, Classes]:
        drawings = decoded(place, image_size)

        def part(of_part: list[tuple[int, int]]) -> Classes:
            numbers, turns = zip(*of_part, strict=True)
            pictures = lambda label: turned(drawings[numbers[label]], turns[label])  # noqa: E731
            return Classes(identities(numbers), DRAWINGS, pictures, names=names_of(of_part))

        return {name: part(of_part) for name, of_part in classes.items()}

    turning = rotations and split != "vinyals"  # there the turned characters are classes
    return few_shot(
        load, shapes, episode, rotations=turning, seeds=seeds, instead="omniglot_characters", grouped=grouped
    )


def omniglot_characters(
    *, place: DataPlace, split: str, ways: int, train_drawings: int, val_drawings: int, image_size: int, channels: int,
    known: int, seeds: Seeds,
) -> TaskSource:  # fmt: skip
    """Plain classification of Omniglot's training characters, upright. Those of validation and test are not used."""
    _check(place, split, image_size, channels)
    numbers = [number for number, _ in classes_of(split, "train", rotations=False)]

    def load() -> Callable[[int], Images]:
        drawings = decoded(place, image_size)
        return lambda label: drawings[numbers[label]]

    return drawn_samples(
        load, identities(numbers), DRAWINGS, ways=ways, train=train_drawings, val=val_drawings, known=known,
        seeds=seeds, names=names_of((number, 0) for number in numbers),
    )  # fmt: skip
