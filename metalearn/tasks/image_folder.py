"""Few-shot classification of any pictures in folders, one folder for each class."""

import contextlib
import csv
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path, PurePosixPath

import numpy as np
import PIL
from numpy.typing import NDArray

from metalearn.errors import DataError, Invalid
from metalearn.tasks.common.episodes import (
    SPLITS,
    Classes,
    EpisodeSpec,
    Images,
    Seeds,
    are_fractions,
    by_fractions,
    check_read,
    identity,
    shapes_of,
)
from metalearn.tasks.common.pictures import PictureForm, decoded, first_few, one_form, picture_folders
from metalearn.tasks.common.samples import KNOWN, Chosen, SampleSource, few_shot
from metalearn.tasks.common.stored import FAMILY, cached_array, check_picture_shape
from metalearn.types import TaskSource

FOLDERS = "folders"
DECODER = 1  # raise it if the decoding of class folders changes: older caches are not read then
_SHUFFLE = 64_16_20  # seeds the division of classes by fractions, which is the same in every run

log = logging.getLogger(__name__)


def by_lists(root: Path, names: Collection[str], lists: str) -> dict[str, list[str]]:
    """The classes of each split, as the files train, val and test (.txt or .csv) in the folder `lists` list them.
    Raises DataError if a file is missing or cannot be read; a listed class is not there, or listed twice."""
    place = next((folder for folder in (root / lists, Path(lists)) if folder.is_dir()), None)
    if place is None:
        raise DataError(
            f"dataset.split={lists}: there is no such folder, neither {root / lists} nor {Path(lists).absolute()}; "
            "type dataset.split=/path/to/lists, dataset.split=folders or dataset.split=[0.64,0.16,0.2]"
        )
    splits: dict[str, list[str]] = {}
    folder_of = {one_form(name): name for name in names}
    for split in SPLITS:
        path = next((path for path in (place / f"{split}.txt", place / f"{split}.csv") if path.is_file()), None)
        if path is None:
            raise DataError(
                f"dataset.split={lists}: {place} has neither {split}.txt nor {split}.csv; it needs train, val and "
                "test, with the name of a class on each line"
            )
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise DataError(f"dataset.split={lists}: {path} cannot be read: {error}") from error
        listed = [PurePosixPath(line.strip()).as_posix() for line in lines if line.strip()]
        splits[split] = [folder_of.get(one_form(name), name) for name in listed]
        if len(splits[split]) < 2:
            few = f"{path} lists {len(splits[split])} classes; a split needs at least 2"
            raise DataError(f"dataset.split={lists}: {few}")
    everywhere = [name for classes in splits.values() for name in classes]
    if missing := sorted(set(everywhere) - set(names)):
        raise DataError(
            f"dataset.split={lists}: {len(missing)} of the {len(everywhere)} classes listed in {place} have no folder "
            f"with pictures in dataset.root={root}: {first_few(missing)}"
        )
    log.info("%s: %d classes, of which the lists name %d", root, len(names), len(everywhere))
    _check_disjoint(splits, lambda name: name, f"dataset.split={lists}", f"name it once in the lists of {place}")
    return splits


def _divide(root: Path, folders: Mapping[str, Sequence[str]], split: str | Sequence[float]) -> dict[str, list[str]]:
    """The classes of each split."""
    if not isinstance(split, str):
        splits = by_fractions(sorted(folders), split, _SHUFFLE)
        sizes = ", ".join(f"{part} {len(classes)}" for part, classes in splits.items())
        if min(map(len, splits.values())) < 2:
            raise DataError(
                f"dataset.split={list(split)}: divides the {len(folders)} classes of dataset.root={root} into {sizes}, "
                "and a split needs at least 2; " + (
                    "add classes" if len(folders) < 6 else "type other fractions, such as dataset.split=[0.4,0.3,0.3]"
                )
            )  # fmt: skip
        log.info("%s: %d classes: %s", root, len(folders), sizes)
    elif split != FOLDERS:
        splits = by_lists(root, folders, split)
    else:
        splits = {part: [name for name in folders if name.startswith(f"{part}/")] for part in SPLITS}
        for part, classes in splits.items():
            if len(classes) < 2:
                raise DataError(
                    f"dataset.split={FOLDERS}: {root / part} has {len(classes)} folders with pictures; a split needs "
                    "at least 2. Put class folders into train, val and test, or type dataset.split=[0.64,0.16,0.2]"
                )
        inside = sum(map(len, splits.values()))
        log.info("%s: %d classes, of which %d below train, val and test", root, len(folders), inside)
    advice = f"leave it in one place below {root}, or type dataset.root=/path of the folder that holds every class once"
    _check_disjoint(splits, _below_split, f"dataset.split={split}", advice)
    return splits


def _check_disjoint(splits: Mapping[str, Sequence[str]], label_of: Callable[[str], str], key: str, advice: str) -> None:
    """Raises DataError for a class that is twice in the splits."""
    split_of: dict[str, str] = {}
    for part, names in splits.items():
        for label in (one_form(label_of(name)) for name in names):
            if label in split_of:
                where = f"twice in '{part}'" if split_of[label] == part else f"in '{split_of[label]}' and in '{part}'"
                raise DataError(f"{key}: the class {label} is {where}; {advice}")
            split_of[label] = part


def _pictures_by_class(root: Path, table: str | None, split: str | Sequence[float]) -> dict[str, list[str]]:
    """The pictures of each class: of its folder, or by the table. Raises DataError for those outside class folders."""
    folders = picture_folders(root) if table is None else _classes_of_table(root, table)
    outside = [*SPLITS, "."] if split == FOLDERS else ["."]
    if loose := [picture for name in outside if name in folders for picture in folders[name]]:
        raise DataError(
            f"dataset.root={root}: {len(loose)} pictures lie in no class folder: {first_few(loose)}; put them into a "
            "folder named by their class, or name the folder above: dataset.root=/path"
        )
    return folders


def _below_split(name: str) -> str:
    """The name of a class folder, without the folder train, val or test above it."""
    first, _, rest = name.partition("/")
    return rest if first in SPLITS and rest else name


def image_folder(
    *, root: str, table: str | None = None, split: str | list[float], episode: EpisodeSpec, image_size: int,
    channels: int, rotations: bool, seeds: Seeds,
) -> TaskSource:  # fmt: skip
    """Few-shot classification of the pictures below a folder; a class is a folder that holds pictures, at any depth.

    Algorithms that are trained on plain samples get all pictures of the training classes, and are evaluated on tasks of
    the others. `supervised` gets all classes: the pictures of each are divided as `split` divides classes, in the same
    way for every seed; with `folders`, each class is in all three folders.

    The path of a `table`, or of a folder of lists, is from `root` or from where the program runs. Pictures are read as
    `metalearn.tasks.common.pictures.formed` says.
    """
    shapes = shapes_of(episode)
    if split == FOLDERS and table is not None:
        raise Invalid("split", split, "the table says the class of a picture", "type KEY=[0.64,0.16,0.2]")
    if not split or not (isinstance(split, str) or are_fractions(split)):
        allowed = "must be three fractions above 0 that make 1 (train, val, test), 'folders', or a folder of lists"
        raise Invalid("split", split, allowed, "type KEY=[0.64,0.16,0.2]")
    check_picture_shape(image_size, channels)

    def load() -> dict[str, Classes]:
        place = Path(root)
        pictures = _pictures_by_class(place, table, split)
        names = _divide(place, pictures, split)
        splits = {part: {name: pictures[name] for name in classes} for part, classes in names.items()}
        sizes = [(part, name, len(files)) for part, classes in splits.items() for name, files in classes.items()]
        if single := [name for _, name, size in sizes if size < 2]:
            raise DataError(
                f"dataset.root={place}: {len(single)} classes have fewer than 2 pictures, and an episode needs one for "
                f"its support set and one for its query set: {first_few(single)}; remove these folders or add pictures"
            )
        counts = {part: (len(classes), min(map(len, classes.values()))) for part, classes in splits.items()}
        small = [f"{name} ({size})" for part, name, size in sizes if size < shapes[part].most]
        which = f": {len(small)} classes have too few pictures: {first_few(small)}" if small else ""
        check_read(shapes, counts, f"dataset.root={place}{which}")
        return _decoded(place, splits, image_size, channels)

    def classification() -> tuple[TaskSource, str]:
        if rotations:
            raise Invalid("rotations", True, "plain samples are not turned", "type KEY=false")
        identities, names, divided = _classified(Path(root), table, split, image_size, channels)
        how = "as train, val and test have them" if split == FOLDERS else f"divided by {split} in each class"
        sizes = {part: sum(map(len, pictures.places)) for part, pictures in divided.items()}
        counts = ", ".join(f"{part} {size}" for part, size in sizes.items())
        plain = SampleSource(
            lambda: divided, sizes, identities, known=min(KNOWN, sizes["train"]), seeds=seeds, names=names,
            augment=episode.augment,
        )  # fmt: skip
        return plain, f"the pictures of all {len(names)} classes, {how}: {counts}"

    return few_shot(load, shapes, episode, rotations=rotations, seeds=seeds, instead=classification)


def _decoded(
    root: Path, splits: Mapping[str, Mapping[str, Sequence[str]]], image_size: int, channels: int
) -> dict[str, Classes]:
    """The classes of every split, in the order of their names; from the cache if they are there. `splits` has the
    pictures of each class of a split by their paths from `root`; no class is in two. Raises DataError for pictures that
    cannot be read: the message counts them and names the first."""
    members = {label: files for classes in splits.values() for label, files in classes.items()}
    labels = sorted(members)
    files = [file for label in labels for file in members[label]]
    shape = (len(files), image_size, image_size) + ((3,) if channels == 3 else ())

    def decode() -> Images:
        megabytes = np.prod(shape) / 1e6
        log.info("decoding %d pictures of %s, %.1f MB, once: they are kept in the cache", len(files), root, megabytes)
        pictures, broken = np.empty(shape, np.uint8), []
        each = decoded([root / file for file in files], PictureForm(image_size, channels))
        for number, picture in enumerate(each):
            if isinstance(picture, str):
                broken.append(f"{files[number]} ({picture})")
            else:
                pictures[number] = picture
        if broken:
            count = f"{len(broken)} of {len(files)} pictures cannot be read"
            raise DataError(f"dataset.root={root}: {count}: {first_few(broken)}; repair or remove them")
        return pictures

    # Names, sizes and times of change stand for the contents of the files, which would take as long to read as to
    # decode. Of the two times, programs can set back one, and not the other.
    digest = hashlib.sha256(f"{DECODER} {PIL.__version__} {shape} {root.resolve()}".encode(errors="surrogateescape"))
    for file in files:
        digest.update(os.fsencode(f"\n{file}"))
        with contextlib.suppress(OSError):  # decoding will report it
            status = (root / file).stat()
            digest.update(f"\0{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode())
    pictures = cached_array(f"image_folder-{digest.hexdigest()[:24]}", shape, decode, title=str(root))
    ends = accumulate((len(members[label]) for label in labels), initial=0)
    range_of = dict(zip(labels, pairwise(ends), strict=True))

    def part(classes: Mapping[str, Sequence[str]]) -> Classes:
        ranges = [range_of[label] for label in sorted(classes)]
        names = [_below_split(label) for label in sorted(classes)]
        identities, fewest = [identity(FAMILY, name) for name in names], min(map(len, classes.values()))
        return Classes(identities, fewest, lambda label: pictures[slice(*ranges[label])], names=names)

    return {split: part(classes) for split, classes in splits.items()}


def _classes_of_table(root: Path, table: str) -> dict[str, list[str]]:
    """The pictures of each class that a table names. A line names the columns that are not read."""
    path = next((path for path in (root / table, Path(table)) if path.is_file()), root / table)
    needed, class_of = ("path", "class"), dict[str, str]()
    try:
        with path.open(encoding="utf-8-sig", newline="") as text:
            lines = csv.DictReader(text, strict=True)
            names = lines.fieldnames = [name.strip() for name in lines.fieldnames or ()]
            if wrong := [name for name in needed if names.count(name) != 1]:
                raise ValueError(f"its first line names {wrong[0]} {names.count(wrong[0])} times")
            for row in lines:
                # Under None are cells beyond the last column; and None is in the place of a cell that is not there.
                if None in row or None in row.values():
                    raise ValueError(
                        f"the row {row['path']} has more or fewer cells than {len(names)}; a text with a comma needs "
                        'quotes, "gull, herring"'
                    )
                file = PurePosixPath(row["path"]).as_posix() if row["path"] else ""  # ./a.png is a.png
                name = row["class"].strip()
                inside = file and not PurePosixPath(file).is_absolute() and ".." not in Path(file).parts
                if not inside or not name or file in class_of:
                    raise ValueError(f"the row {file},{name} must name a file below {root}, once, and its class")
                class_of[file] = name
        if not class_of:
            raise ValueError("it has no rows")
    except (OSError, csv.Error, ValueError) as error:
        raise DataError(
            f"dataset.table={table}: {path} is no table with the columns path and class ({error}); type "
            "dataset.table=/path/to/file.csv"
        ) from error
    if others := [column for column in names if column not in needed]:
        log.warning("dataset.table=%s: the columns %s are not read", table, first_few(others))
    classes: dict[str, list[str]] = {}
    for file, name in sorted(class_of.items()):
        classes.setdefault(name, []).append(file)
    return classes


def _classified(
    root: Path, table: str | None, split: str | Sequence[float], image_size: int, channels: int
) -> tuple[Sequence[str], Sequence[str], dict[str, Chosen]]:
    """The identities and the names of all classes, and their pictures in each split."""
    if isinstance(split, str) and split != FOLDERS:
        raise DataError(
            f"dataset.split={split}: lists divide the classes, and plain classification divides the pictures of each; "
            f"type dataset.split=[0.64,0.16,0.2] or dataset.split={FOLDERS}"
        )
    pictures = _pictures_by_class(root, table, split)
    if split == FOLDERS:
        pictures = {name: files for name, files in pictures.items() if name.partition("/")[0] in SPLITS}
        everyone = {_below_split(name) for name in pictures}
        for part in SPLITS:
            missing = sorted(name for name in everyone if f"{part}/{name}" not in pictures)
            if missing or len(everyone) < 2:
                what = f"has no pictures of {first_few(missing)}" if missing else f"has {len(everyone)} classes"
                raise DataError(
                    f"dataset.split={FOLDERS}: {root / part} {what}, and plain classification needs the same two or "
                    "more classes in train, val and test; type dataset.split=[0.64,0.16,0.2] for class folders side by "
                    "side"
                )
    sizes = {name: len(pictures[name]) for name in sorted(pictures)}
    places = None if split == FOLDERS else _divided(root, sizes, [float(part) for part in split])
    whole = _decoded(root, {"all": pictures}, image_size, channels)["all"]
    if places is not None:
        divided = {part: Chosen(whole.pictures, numbers) for part, numbers in places.items()}
        return whole.identities, whole.names, divided

    def pictures_of(folders: list[int]) -> Chosen:
        counts = [np.arange(len(whole.pictures(folder))) for folder in folders]
        return Chosen(lambda label: whole.pictures(folders[label]), counts)

    labels = {part: [at for at, name in enumerate(sizes) if name.startswith(f"{part}/")] for part in SPLITS}
    identities, names = ([values[at] for at in labels["train"]] for values in (whole.identities, whole.names))
    return identities, names, {part: pictures_of(folders) for part, folders in labels.items()}


def _divided(root: Path, sizes: Mapping[str, int], fractions: Sequence[float]) -> dict[str, list[NDArray[np.int64]]]:
    """The numbers of the pictures of each class in each split: a constant shuffle, divided by the fractions, at least
    one in each."""
    if small := [name for name, size in sizes.items() if size < len(SPLITS)]:
        raise DataError(
            f"dataset.root={root}: {len(small)} classes have fewer than 3 pictures, and one each must train, validate "
            f"and test: {first_few(small)}; add pictures, or remove these folders"
        )
    places: dict[str, list[NDArray[np.int64]]] = {split: [] for split in SPLITS}
    for name, size in sizes.items():
        order = np.random.default_rng([_SHUFFLE, *name.encode(errors="surrogateescape")]).permutation(size)
        val, test = (max(1, round(fraction * size)) for fraction in fractions[1:])
        train = max(1, size - val - test)
        val = min(val, size - train - 1)
        for split, part in zip(SPLITS, np.split(order, [train, train + val]), strict=True):
            places[split].append(np.sort(part))
    return places
