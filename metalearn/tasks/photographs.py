"""Few-shot classification of photographs that people fetch themselves: nothing is downloaded here.

mini-ImageNet, Vinyals et al. 2016 (arXiv 1606.04080): 100 classes of ImageNet, divided as Ravi and Larochelle 2017
("Optimization as a model for few-shot learning", ICLR) divide them. tiered-ImageNet, Ren et al. 2018 (arXiv
1803.00676): 608 classes of ImageNet, divided by whole categories; the classes are those of the authors' lists.
CUB-200-2011, Wah et al. 2011: 200 kinds of birds, divided as Chen et al. 2019 (arXiv 1904.04232) divide them: by their
places in the alphabet, every second one to train, and of the others every second one each to validate and to test.

The divisions are `NAME_classes.csv`. The pictures are those that `metalearn data NAME --from FOLDER` has written;
mini-ImageNet is also read from its lists or class folders.
"""

import csv
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from metalearn.errors import DataError
from metalearn.tasks.common.episodes import (
    SPLITS,
    Classes,
    EpisodeShape,
    EpisodeSpec,
    Seeds,
    check_filled,
    shapes_of,
)
from metalearn.tasks.common.identities import published_list
from metalearn.tasks.common.pictures import first_few, is_picture, picture_folders
from metalearn.tasks.common.samples import few_shot
from metalearn.tasks.common.stored import (
    FAMILY,
    check_picture_shape,
    decoded_classes,
    decoder,
    written_photographs,
)
from metalearn.types import TaskSource

_DEPTH = 5
_WORDNET_ID = re.compile(r"n\d{8}")
_LISTS = {split: f"{split}.csv" for split in SPLITS}

Members = Mapping[str, list[str]]  # class → the paths of its pictures, from the folder that holds them all
Shapes = Mapping[str, EpisodeShape]

log = logging.getLogger(__name__)


@cache
def published_splits(name: str) -> Mapping[str, str]:
    """Class → its split."""
    return {row["class"]: row["split"] for row in published_list(f"{name}_classes.csv")}


def _photographs(
    name: str, otherwise: Callable[[Shapes], dict[str, Classes]], root: str, episode: EpisodeSpec, image_size: int,
    channels: int, rotations: bool, seeds: Seeds,
) -> TaskSource:  # fmt: skip
    """The tasks of the set `name` that is written below `root`, or is read `otherwise`."""
    shapes = shapes_of(episode)
    splits = list(published_splits(name).values())
    # The number of pictures is not known yet. This check assumes as many as an episode needs.
    check_filled(shapes, {split: (splits.count(split), shape.most) for split, shape in shapes.items()})
    check_picture_shape(image_size, channels)

    def load() -> dict[str, Classes]:
        written = written_photographs(
            name, Path(root), shapes, FAMILY, decoder(name), image_size=image_size, channels=channels
        )
        return otherwise(shapes) if written is None else written

    return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead="cifar10")


def _written(name: str, title: str) -> Callable[..., TaskSource]:
    def source(
        *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds
    ) -> TaskSource:
        def missing(_: Shapes) -> dict[str, Classes]:
            raise DataError(
                f"dataset.root={root}: there is no folder {name} that metalearn data has written; type metalearn data "
                f"{name} --from=/path/to/what/you/have, or dataset.root=/path of the folder that holds {name}"
            )

        return _photographs(name, missing, root, episode, image_size, channels, rotations, seeds)

    source.__doc__ = f"""{title}, which `metalearn data {name} --from=…` has written into the folder {name} of `root`,
    or into `root` itself. Its pictures have 84 pixels, and `image_size` is at most that. The other keys are those of
    `mini_imagenet`; algorithms that are trained on plain samples get the training classes.

    Raises:
        ValueError: an argument is not allowed.
        DataError: when the first episode is made: the set is missing or damaged, or its classes are too small.
    """
    return source


tiered_imagenet = _written("tiered_imagenet", "tiered-ImageNet: 351 / 97 / 160 classes of photographs")
cub = _written("cub", "CUB-200-2011: 100 / 50 / 50 kinds of birds")


def mini_imagenet(
    *, root: str, episode: EpisodeSpec, image_size: int, channels: int, rotations: bool, seeds: Seeds
) -> TaskSource:  # fmt: skip
    """mini-ImageNet: 64 / 16 / 20 classes of photographs, 600 of each as published.

    Args:
        root: the folder that holds the pictures, at any depth up to 5. They lie either in `images`
            (n0153282900000005.jpg, …) with the published train.csv, val.csv and test.csv (filename,label) beside it, or
            in class folders named by WordNet id. The set that metalearn data has written goes before these.
        image_size: height and width in pixels of every picture; see `metalearn.tasks.common.pictures.formed`.
        channels: 1 (grey) or 3 (red, green, blue).
        rotations: turn each drawn class by a random multiple of 90°, in every split.

    Raises:
        ValueError: an episode has more ways than a split has classes, or another number is out of range.
        DataError: when the first episode is made: classes are missing, have too few pictures, or unreadable ones.
    """

    def unpacked(shapes: Shapes) -> dict[str, Classes]:
        where, members = _members(Path(root))
        sizes = sorted(map(len, members.values()))
        log.info("mini-ImageNet in %s: %d to %d pictures a class; 600 are published", where, sizes[0], sizes[-1])
        split_of = published_splits("mini_imagenet")
        splits = {split: {name: members[name] for name in members if split_of[name] == split} for split in SPLITS}
        return decoded_classes("mini_imagenet", where, splits, shapes, image_size=image_size, channels=channels)

    return _photographs("mini_imagenet", unpacked, root, episode, image_size, channels, rotations, seeds)


def _members(root: Path) -> tuple[Path, Members]:
    """The folder from which the pictures' paths start, and the pictures of every class of mini-ImageNet: from the
    published lists beside a flat `images` below `root`, or from the folders of the classes' names."""
    wholes: dict[Path, list[str]] = {}
    of_class: dict[str, list[Path]] = {name: [] for name in published_splits("mini_imagenet")}
    for path, subfolders, files in os.walk(root, followlinks=True):
        here = Path(path)
        if "images" in subfolders and set(_LISTS.values()) <= set(files):
            images = os.listdir(here / "images")  # noqa: PTH208 (names alone, of tens of thousands)
            if any(map(is_picture, images)):
                wholes[here] = images
                subfolders.remove("images")
        for name in of_class.keys() & set(subfolders):
            of_class[name].append(here / name)
        deep = len(here.relative_to(root).parts) >= _DEPTH
        keep = [name for name in subfolders if not (deep or name.startswith(".") or _WORDNET_ID.fullmatch(name))]
        subfolders[:] = sorted(keep)
    if len(wholes) > 1:
        raise DataError(
            f"dataset.root={root}: mini-ImageNet is there several times, in {' and in '.join(map(str, wholes))}; type "
            f"dataset.root={next(iter(wholes))}"
        )
    for here, images in wholes.items():
        return here, _listed(here, set(images))
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
    if twice := [folders for folders in of_class.values() if len(folders) > 1]:
        raise DataError(
            f"dataset.root={root}: {len(twice)} classes have several folders, such as {twice[0][0]} and {twice[0][1]}; "
            f"name a folder that holds only one of them, for example dataset.root={twice[0][0].parent}"
        )
    members: dict[str, list[str]] = {}
    for name, (folder,) in of_class.items():
        before = folder.relative_to(root).as_posix()
        members[name] = [f"{before}/{file}" for files in picture_folders(folder).values() for file in files]
    return root, members


def _listed(folder: Path, images: set[str]) -> Members:
    """The pictures of the folder `images`, which has these; the lists beside it (filename,label) give their classes."""
    members: dict[str, set[str]] = {}
    absent: list[str] = []
    for split, name in _LISTS.items():
        rows = read_list(folder / name)
        published = {label for label, part in published_splits("mini_imagenet").items() if part == split}
        if wrong := sorted({label for _, label in rows} ^ published):
            raise DataError(
                f"dataset.root: {folder / name} does not list the published classes of the split '{split}': "
                f"{len(wrong)} are missing or do not belong there: {first_few(wrong)}; fetch the published list"
            )
        for file_name, label in rows:
            members.setdefault(label, set()).add(f"images/{file_name}")
        absent += [file_name for file_name, _ in rows if file_name not in images]
    if absent:
        raise DataError(
            f"dataset.root: {', '.join(_LISTS.values())} in {folder} list {len(absent)} pictures that its folder "
            f"images does not hold: {first_few(absent)}"
        )
    return {label: sorted(files) for label, files in members.items()}


def read_list(path: Path) -> list[tuple[str, str]]:
    """The rows filename,label of a published list.

    Raises:
        DataError: it is something else, or cut off.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            rows = [(row["filename"], row["label"]) for row in csv.DictReader(text)]
        if cut := [file for file, label in rows if not (file and label)]:
            raise ValueError(f"the row {cut[0]} is cut off")
    except (OSError, KeyError, csv.Error, ValueError) as error:
        raise DataError(f"{path}: is not a list of filename,label ({error!r}); fetch the published one") from error
    return rows
