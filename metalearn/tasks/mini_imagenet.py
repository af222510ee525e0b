"""mini-ImageNet, Vinyals et al. 2016 (arXiv 1606.04080): 100 classes of ImageNet, divided as Ravi and Larochelle 2017
("Optimization as a model for few-shot learning", ICLR) divide them. The division is `mini_imagenet_classes.csv`.

image-net.org gives the pictures to those who accept its terms, so nothing is downloaded here.
"""

import csv
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from metalearn.checks import true_or_false
from metalearn.errors import DataError
from metalearn.tasks.common.decoded_classes import FAMILY, check_picture_shape, decoded_classes, decoder
from metalearn.tasks.common.drawn_set import written_photographs
from metalearn.tasks.common.episodes import (
    SPLITS,
    Classes,
    EpisodeSpec,
    Seeds,
    check_filled,
    check_read,
    shapes_of,
)
from metalearn.tasks.common.identities import identity, published_list
from metalearn.tasks.common.picture_folders import first_few, is_picture, picture_folders
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.shards import ShardForm, Shards
from metalearn.types import TaskSource

NAME = "mini_imagenet"

_DEPTH = 5
_WORDNET_ID = re.compile(r"n\d{8}")
_LISTS = {split: f"{split}.csv" for split in SPLITS}

Members = dict[str, list[str]]
"""Class → the paths of its pictures, from the folder that holds them all."""

log = logging.getLogger(__name__)


@cache
def published_splits() -> Mapping[str, str]:
    """Class (WordNet id) → its split."""
    return {row["class"]: row["split"] for row in published_list("mini_imagenet_classes.csv")}


def _find(root: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """Two things below `root`: the folders that hold the published lists beside a flat `images`, and for each class the
    folders of its name."""
    wholes: list[Path] = []
    of_class: dict[str, list[Path]] = {name: [] for name in published_splits()}
    for path, subfolders, files in os.walk(root, followlinks=True):
        here = Path(path)
        if "images" in subfolders and set(_LISTS.values()) <= set(files) and _is_flat(here / "images"):
            wholes.append(here)
            subfolders.remove("images")
        for name in subfolders:
            if name in of_class:
                of_class[name].append(here / name)
        deep = len(here.relative_to(root).parts) >= _DEPTH
        keep = [name for name in subfolders if not (deep or name.startswith(".") or _WORDNET_ID.fullmatch(name))]
        subfolders[:] = sorted(keep)
    return wholes, of_class


def _is_flat(images: Path) -> bool:
    with os.scandir(images) as entries:
        return any(is_picture(entry.name) and entry.is_file() for entry in entries)


def _listed(whole: Path) -> Members:
    """The pictures in `whole`/images; the lists beside it (filename,label) give their classes.

    Raises:
        DataError: the lists are not the published ones, or name pictures that are not there.
    """
    members: Members = {}
    there = set(os.listdir(whole / "images"))  # noqa: PTH208 (names alone, of tens of thousands)
    absent: list[str] = []
    for split, name in _LISTS.items():
        try:
            with (whole / name).open(encoding="utf-8-sig", newline="") as file:
                rows = [(row["filename"], row["label"]) for row in csv.DictReader(file)]
        except (OSError, KeyError, csv.Error, ValueError) as error:
            raise DataError(
                f"dataset.root: {whole / name} is not a list of filename,label ({error!r}); fetch the published one"
            ) from error
        published = {label for label, part in published_splits().items() if part == split}
        if wrong := sorted({label for _, label in rows} ^ published):
            raise DataError(
                f"dataset.root: {whole / name} does not list the published classes of the split '{split}': "
                f"{len(wrong)} are missing or do not belong there: {first_few(wrong)}; fetch the published list"
            )
        for file_name, label in rows:
            members.setdefault(label, []).append(f"images/{file_name}")
        absent += [file_name for file_name, _ in rows if file_name not in there]
    if absent:
        raise DataError(
            f"dataset.root: {', '.join(_LISTS.values())} in {whole} list {len(absent)} pictures that its folder images "
            f"does not hold: {first_few(absent)}"
        )
    return {label: sorted(set(names)) for label, names in members.items()}


def _in_folders(root: Path, of_class: Mapping[str, list[Path]]) -> Members:
    """The pictures of every class, from its folder.

    Raises:
        DataError: a class is missing, has two folders, or its folder holds other files too.
    """
    missing = [name for name, folders in of_class.items() if not folders]
    if len(missing) == len(of_class):
        raise DataError(
            f"dataset.root={root}: mini-ImageNet is not there, and the program does not download it: image-net.org "
            "gives the pictures to those who accept its terms. Put the folder images, with train.csv, val.csv and "
            "test.csv beside it, or the 100 class folders named by WordNet id (n01532829, …), anywhere under it, or "
            "name their folder: METALEARN_DATA=/path/to/data or dataset.root=/path/to/data. Pickles and other layouts: "
            "metalearn data mini_imagenet --from=/path"
        )
    if missing:
        raise DataError(
            f"dataset.root={root}: {len(missing)} of the 100 classes of mini-ImageNet are missing: {', '.join(missing)}"
        )
    twice = [folders for folders in of_class.values() if len(folders) > 1]
    if twice:
        raise DataError(
            f"dataset.root={root}: {len(twice)} classes have several folders, such as {twice[0][0]} and {twice[0][1]}; "
            f"name a folder that holds only one of them, for example dataset.root={twice[0][0].parent}"
        )
    members: Members = {}
    for name, (folder,) in of_class.items():
        pictures = picture_folders(folder)
        before = folder.relative_to(root).as_posix()
        members[name] = [f"{before}/{file}" for files in pictures.values() for file in files]
    return members


def _members(root: Path) -> tuple[Path, Members]:
    """The folder from which the pictures' paths start, and the pictures of every class."""
    wholes, of_class = _find(root)
    if len(wholes) > 1:
        raise DataError(
            f"dataset.root={root}: mini-ImageNet is there several times, in {' and in '.join(map(str, wholes))}; type "
            f"dataset.root={wholes[0]}"
        )
    where, members = (wholes[0], _listed(wholes[0])) if wholes else (root, _in_folders(root, of_class))
    sizes = sorted(map(len, members.values()))
    log.info("mini-ImageNet in %s: %d to %d pictures a class; 600 are published", where, sizes[0], sizes[-1])
    return where, members


def _from_shards(folder: str, shape: tuple[int, ...]) -> dict[str, Classes]:
    """The classes of every split, as `decoded_classes` gives them.

    Raises:
        DataError: the shards are missing, damaged or of another dataset.
    """
    names = sorted(published_splits())
    shards = Shards(folder, ShardForm(decoder(NAME), shape), [identity(FAMILY, name) for name in names])

    def part(split: str) -> Classes:
        numbers = [number for number, name in enumerate(names) if published_splits()[name] == split]
        own = [names[number] for number in numbers]
        identities, fewest = [identity(FAMILY, name) for name in own], min(shards.counts[number] for number in numbers)
        return Classes(identities, fewest, lambda label: shards.pictures(numbers[label]), decoder(NAME), names=own)

    return {split: part(split) for split in SPLITS}


def mini_imagenet(
    *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds,
    shards: str | None = None,
) -> TaskSource:  # fmt: skip
    """mini-ImageNet: 64 / 16 / 20 classes of photographs, 600 of each as published.

    Args:
        root: the folder that holds the pictures, at any depth up to 5. They lie either in `images`
            (n0153282900000005.jpg, …) with the published train.csv, val.csv and test.csv (filename,label) beside it, or
            in class folders named by WordNet id. The set that metalearn data has written goes before these.
        image_size: height and width in pixels of every picture; see `metalearn.tasks.common.pictures.picture`.
        channels: 1 (grey) or 3 (red, green, blue).
        rotations: turn each drawn class by a random multiple of 90°, in every split.
        shards: a folder that metalearn shard has written, from which the pictures are read; None reads `root`.

    Raises:
        ValueError: an episode has more ways than a split has classes, or another number is out of range.
        DataError: when the first episode is made: classes are missing, have too few pictures, or unreadable ones.
    """
    shapes = shapes_of(episode)
    sizes = {split: list(published_splits().values()).count(split) for split in SPLITS}
    # The number of pictures is not known yet. This check assumes as many as an episode needs.
    check_filled(shapes, {split: (sizes[split], shape.most) for split, shape in shapes.items()})
    check_picture_shape(image_size, channels)
    true_or_false("rotations", rotations)

    def load() -> dict[str, Classes]:
        if shards is not None:
            classes = _from_shards(shards, (image_size, image_size, *([3] if channels == 3 else [])))
            check_read(shapes, classes, f"dataset.shards={shards}")
            return classes
        written = written_photographs(
            NAME, Path(root), shapes, FAMILY, decoder(NAME), image_size=image_size, channels=channels
        )
        if written is not None:
            return written
        where, members = _members(Path(root))
        splits: dict[str, Members] = {split: {} for split in SPLITS}
        for name, files in members.items():
            splits[published_splits()[name]][name] = files
        return decoded_classes(NAME, where, splits, shapes, image_size=image_size, channels=channels)

    return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="cifar10")
