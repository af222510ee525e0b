"""Omniglot: 1623 handwritten characters of 50 alphabets, 20 drawings each (Lake et al. 2015, Science 350).

The splits are columns of `omniglot_characters.csv`, beside a digest of every character's pixels. The
pictures are read from the published folders or archives, verified, reduced to 28×28 and kept as one
array in a cache file, which all workers of a host map into memory.
"""

import csv
import hashlib
import io
import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from metalearn.checks import enough_classes, one_of, true_or_false, whole_number
from metalearn.errors import DataError
from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.episodes import Classes, Images, check_filled, picture_tasks, shapes_of, turned
from metalearn.tasks.common.omniglot_files import Drawings, find_collections
from metalearn.tasks.common.samples import Labelled, all_drawings, drawing_sizes, pretraining, samples, split_drawings
from metalearn.types import TaskSource

DRAWINGS = 20
DECODER = 1
"""Version of what decoding makes of a picture: raise it when that changes, and old caches are left alone."""

SPLIT_LISTS = ("paper", "lake", "vinyals")

log = logging.getLogger(__name__)


class Character(NamedTuple):
    """One row of the list: its folder, the digest of its drawings, and its part in every split list."""

    path: str
    digest: str
    parts: dict[str, str]


@cache
def characters() -> tuple[Character, ...]:
    """All 1623, in the order of the decoded array."""
    with (Path(__file__).parent / "omniglot_characters.csv").open(newline="") as file:
        rows = csv.DictReader(file)
        return tuple(
            Character(row["character"], row["digest"], {name: row[name] for name in SPLIT_LISTS}) for row in rows
        )


def classes_of(split_list: str, split: str, rotations: bool) -> list[tuple[int, int]]:
    """The classes of a split as (number of the character, quarter turns).

    In `vinyals` with rotations, each turned character is a class of its own.
    """
    numbers = [i for i, character in enumerate(characters()) if character.parts[split_list] == split]
    turns = range(4) if split_list == "vinyals" and rotations else range(1)
    return [(number, turn) for turn in turns for number in numbers]


def digest(drawings: list[Image.Image]) -> str:
    """A digest of black-and-white pixels, whatever file or archive they came in."""
    return hashlib.sha256(b"".join(picture.convert("1").tobytes() for picture in drawings)).hexdigest()[:16]


def _decode_character(character: Character, files: Drawings, size: int) -> Images:
    paths = files.drawings(character.path)
    if len(paths) != DRAWINGS:
        raise DataError(f"{files.where}: {character.path} has {len(paths)} drawings of {DRAWINGS}: it is not complete")
    pictures = []
    for path in paths:
        try:
            pictures.append(Image.open(io.BytesIO(files.read(path))).convert("L"))
        except DataError:
            raise
        except Exception as error:  # PIL raises many types for broken pictures
            raise DataError(f"{files.where}: {path} cannot be read: {error}") from error
    if digest(pictures) != character.digest:
        raise DataError(f"{files.where}: the drawings of {character.path} are not the published ones")
    small = [picture.resize((size, size), Image.Resampling.LANCZOS) for picture in pictures]
    return np.stack([255 - np.asarray(picture, np.uint8) for picture in small])


def _decode(root: Path, size: int, download: bool) -> Images:
    """Every drawing, [1623, 20, size, size], ink in [0, 255]."""
    collections = find_collections(root)
    if len(collections) < 2 and download:
        collections = _download(root)
    if len(collections) < 2:
        raise DataError(
            f"dataset.root={root}: Omniglot is not there. Put images_background.zip and images_evaluation.zip "
            "(or the folders of these names) anywhere under it, or name their folder: "
            "METALEARN_DATA=/path/to/data or dataset.root=/path/to/data"
        )
    log.info("decoding Omniglot from %s", " and ".join(str(files.where) for files in collections.values()))
    return np.stack(
        [_decode_character(character, collections[character.path.split("/")[0]], size) for character in characters()]
    )


def _download(root: Path) -> dict[str, Drawings]:
    import torchvision  # takes a second, and only a download needs it

    try:
        for background in (True, False):
            torchvision.datasets.Omniglot(str(root), background=background, download=True)
    except Exception as error:  # the network fails in many ways
        raise DataError(
            f"dataset.root={root}: Omniglot is not there and cannot be downloaded ({error}). Put "
            "images_background.zip and images_evaluation.zip anywhere under it, or name their folder: "
            "METALEARN_DATA=/path/to/data or dataset.root=/path/to/data"
        ) from error
    return find_collections(root)


def decoded(root: Path, size: int, download: bool) -> Images:
    """Every drawing, [1623, 20, size, size], ink in [0, 255], from the cache where it is there.

    Raises:
        DataError: pictures missing, unreadable or not the published ones.
    """
    shape = (len(characters()), DRAWINGS, size, size)
    return cached_array(f"omniglot-v{DECODER}-{size}", shape, lambda: _decode(root, size, download))


def omniglot(
    *, root: str, split: str, ways: int, shots: int, queries: int, train_ways: int | None = None,
    train_queries: int | None = None,
    image_size: int, channels: int, rotations: bool, download: bool, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Few-shot classification of Omniglot characters.

    Args:
        root: the folder under which the archives or folders lie, at any depth up to 5.
        split: the list of characters: `paper` (1100 / 100 / 423, as Finn et al. 2017 divide them),
            `lake` (864 / 100 of the background set, all 659 of the evaluation set) or `vinyals`
            (1028 / 172 / 423; with rotations each turned character is a class of its own).
        ways, shots, queries: classes of an episode; support and query drawings of each class.
        train_ways, train_queries: the same for training tasks, where they differ.
        image_size: height and width in pixels after reduction from 105.
        channels: must be 1.
        rotations: turn each drawn class by a random multiple of 90°, in every split alike.
        download: fetch the archives by torchvision where they are missing.
        seed, eval_seed: what training tasks, and what validation and test tasks, are drawn from.

    Raises:
        ValueError: an episode that the characters cannot fill.
        DataError: when the first episode is made: pictures missing, unreadable or not the published ones.
    """
    one_of("split", split, SPLIT_LISTS)
    true_or_false("rotations", rotations)
    true_or_false("download", download)
    shapes = shapes_of(ways, shots, queries, train_ways, train_queries)
    classes = {part: classes_of(split, part, rotations) for part in shapes}
    check_filled(shapes, {part: (len(chosen), DRAWINGS) for part, chosen in classes.items()})
    whole_number("image_size", image_size, at_least=8, at_most=105)
    if channels != 1:
        raise ValueError(f"channels={channels}: Omniglot is black on white; type channels=1")

    def load() -> dict[str, Classes]:
        pictures = decoded(Path(root), image_size, download)

        def part(chosen: list[tuple[int, int]]) -> Classes:
            def class_pictures(label: int) -> Images:
                number, turns = chosen[label]
                return turned(pictures[number], turns)

            return Classes(len(chosen), DRAWINGS, class_pictures)

        return {name: part(chosen) for name, chosen in classes.items()}

    turning = rotations and split != "vinyals"  # where the turned characters are classes
    return picture_tasks(load, shapes, rotations=turning, seed=seed, eval_seed=eval_seed)


def omniglot_characters(
    *, root: str, split: str, ways: int, train_drawings: int, val_drawings: int, image_size: int, channels: int,
    download: bool, known: int, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Plain classification of Omniglot's training characters; those of validation and test stay unseen.

    Args:
        root, image_size, channels, download: as for `omniglot`.
        split: the list of characters of which the training part is taken; its quarter turns are not.
        ways: characters, the first so many.
        train_drawings, val_drawings: of each character's 20 drawings, how many train and validate; the rest test.
        known, seed, eval_seed: as for `metalearn.tasks.common.samples.samples`.

    Raises:
        ValueError: more characters or drawings than there are.
        DataError: when the first sample is made: pictures missing, unreadable or not the published ones.
    """
    one_of("split", split, SPLIT_LISTS)
    true_or_false("download", download)
    whole_number("image_size", image_size, at_least=8, at_most=105)
    chosen = [number for number, _ in classes_of(split, "train", rotations=False)]
    whole_number("ways", ways, at_least=2)
    enough_classes("ways", ways, "train", len(chosen))
    if channels != 1:
        raise ValueError(f"channels={channels}: Omniglot is black on white; type channels=1")
    sizes = drawing_sizes(ways, DRAWINGS, train=train_drawings, val=val_drawings)

    def load() -> dict[str, Labelled]:
        pictures = decoded(Path(root), image_size, download)[chosen[:ways]]
        return split_drawings(pictures, train=train_drawings, val=val_drawings)

    return samples(load, sizes, ways, known=known, seed=seed, eval_seed=eval_seed)


def omniglot_pretraining(
    *, root: str, split: str, train_classes: int, ways: int, shots: int, queries: int, image_size: int, channels: int,
    rotations: bool, download: bool, seed: int, eval_seed: int,
) -> TaskSource:  # fmt: skip
    """Training characters as plain samples, all 20 drawings of each; validation and test tasks as `omniglot` has them.

    Args:
        train_classes: how many of the training characters, the first so many.
        root, split, ways, shots, queries, image_size, channels, rotations, download, seed, eval_seed: as for
            `omniglot`; training samples are not turned.

    Raises:
        ValueError: more characters than there are, or an episode that they cannot fill.
        DataError: when the first sample is made: pictures missing, unreadable or not the published ones.
    """
    tasks = omniglot(
        root=root, split=split, ways=ways, shots=shots, queries=queries, image_size=image_size, channels=channels,
        rotations=rotations, download=download, seed=seed, eval_seed=eval_seed,
    )  # fmt: skip
    chosen = [number for number, _ in classes_of(split, "train", rotations=False)]
    whole_number("train_classes", train_classes, at_least=2, at_most=len(chosen))

    def load() -> Images:
        return decoded(Path(root), image_size, download)[chosen[:train_classes]]

    return pretraining(all_drawings(load, train_classes, DRAWINGS, seed=seed, eval_seed=eval_seed), tasks)
