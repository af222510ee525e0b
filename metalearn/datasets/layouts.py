"""The layouts in which photographs for few-shot learning circulate: class folders, lists beside a flat folder, pickles.

A layout is recognised by names alone. Nothing is decoded here, and pickles are read as plain values only.
"""

import contextlib
import csv
import dataclasses
import functools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from metalearn.errors import DataError
from metalearn.tasks.common.episodes import SPLITS
from metalearn.tasks.common.pictures import first_few, is_picture

DEEPEST_FOLDER = 4  # levels of folders below `--from` in which a layout is looked for
_FOLDERS_OF = {
    "train": ("train", "base", "meta-train"),
    "val": ("val", "valid", "validation", "meta-val"),
    "test": ("test", "novel", "meta-test"),
}
# How names of files say the split. With several names, the first that is there.
_PARTS_OF = {"train": ("train_phase_train", "train"), "val": ("val", "valid"), "test": ("test",)}
# Beginnings of the names of folders that hold no photographs: CUB's masks lie in folders of the same classes.
_IGNORED = (".", "@eaDir", "__MACOSX", "segmentations")


@dataclasses.dataclass(frozen=True)
class PublishedPictures:
    """What is published of a set: in which `paper`, and on what `terms`.

    `split_of` and `counts` say the split of each class, and the fewest and the most pictures that it has; `totals` the
    pictures of each split. `pickles` are names of files, with {split} in them.
    """

    name: str
    title: str
    side: int
    split_of: Mapping[str, str]
    counts: Mapping[str, tuple[int, int]]
    totals: Mapping[str, int]
    layouts: Sequence["PictureLayout"]
    paper: str
    terms: str
    pickles: Sequence[str] = ()

    def of(self, split: str) -> list[str]:
        """The classes of a split."""
        return [name for name, part in self.split_of.items() if part == split]

    def is_named(self, split: str, name: str) -> bool:
        """Whether a class has a name, not only a number, as `_by_label` gives it."""
        return not name.startswith(f"{self.name}/{split}/")

    def belongs(self, split: str, name: str) -> bool:
        """Whether a class is one of this split, as far as its name says it."""
        return self.split_of.get(name) == split or not self.is_named(split, name)


class ClassPictures(NamedTuple):
    """The pictures of a class, where they lie: paths, or files' contents (bytes), or uint8 [n, h, w, 3]."""

    total: int
    get: Callable[[], Any]


class FoundSet(NamedTuple):
    """A set that has been found in a `layout`. `classes` are the pictures by split and class. `words` are what people
    call classes whose published name is not known. `files` are those whose digest may be published. `wrong` says what
    is not as published, as far as the layout shows it."""

    layout: str
    place: Path
    classes: Mapping[tuple[str, str], ClassPictures]
    files: Sequence[Path] = ()
    words: Mapping[str, str] = {}
    wrong: Sequence[str] = ()


class Listing(NamedTuple):
    """The names in a folder."""

    folders: frozenset[str]
    files: frozenset[str]


Tree = Mapping[Path, Listing]


class PictureLayout(NamedTuple):
    """A layout: `looks` says what it looks like, `score` how much of it there is in a folder (0: it is another one),
    and `read` reads it."""

    looks: str
    score: Callable[[Path, Tree, PublishedPictures], int]
    read: Callable[[Path, Tree, PublishedPictures], FoundSet]


def recognised(folder: Path, published: PublishedPictures) -> FoundSet:
    """The set in a folder, or in one of those below it. Raises DataError if none is there, or several are; or a file of
    it cannot be read."""
    if not folder.is_dir():
        raise DataError(f"--from={folder}: there is no such folder; type --from=/path/to/{published.name}")

    def refuse(error: OSError) -> None:
        raise DataError(f"--from={folder}: {error.filename} cannot be read: {error.strerror}") from error

    tree: dict[Path, Listing] = {}
    for path, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        here = Path(path)
        folders[:] = sorted(name for name in folders if not name.startswith(_IGNORED))
        tree[here] = Listing(frozenset(folders), frozenset(files))
        deep = len(here.relative_to(folder).parts) >= DEEPEST_FOLDER
        # Class folders are not entered: they hold thousands of pictures, and no layout.
        folders[:] = [name for name in folders if not deep and name not in published.split_of]
    best: dict[Path, PictureLayout] = {}
    for layout in published.layouts:
        scores = {place: layout.score(place, tree, published) for place in tree}
        most = max(scores.values())
        for place in (place for place, score in scores.items() if score == most > 0):
            best.setdefault(place, layout)
    if not best:
        names = ", ".join(name.replace("{split}", "SPLIT") for name in published.pickles)
        looks = "; ".join(layout.looks.format(names=names) for layout in published.layouts)
        raise DataError(
            f"--from={folder}: holds {published.title} in no layout that is known. Looked for, there and up to "
            f"{DEEPEST_FOLDER} folders below it: {looks}"
        )
    if len(best) > 1:
        places = " and ".join(map(str, sorted(best)))
        raise DataError(
            f"--from={folder}: holds {published.title} several times: {places}; type --from={sorted(best)[0]}"
        )
    ((place, layout),) = best.items()
    return layout.read(place, tree, published)


# Class folders


def _split_folders(place: Path, tree: Tree, published: PublishedPictures) -> dict[str, Path]:
    """Split → its folder, if two or more have classes, and no class is in two: ImageNet's own train and val share all
    classes."""
    folders: dict[str, Path] = {}
    for split, names in _FOLDERS_OF.items():
        paths = [place / name for name in names if place / name in tree]
        if paths and tree[paths[0]].folders & published.split_of.keys():
            folders[split] = paths[0]
    inside = [name for path in folders.values() for name in tree[path].folders & published.split_of.keys()]
    return folders if len(folders) > 1 and len(set(inside)) == len(inside) else {}


def _read_folders(place: Path, tree: Tree, published: PublishedPictures) -> FoundSet:
    def pictures(folder: Path) -> ClassPictures:
        paths = sorted(
            Path(path, name)
            for path, _, files in os.walk(folder)
            for name in files
            if is_picture(name) and not name.startswith(".") and not Path(path).name.startswith(_IGNORED)
        )
        return ClassPictures(len(paths), lambda: paths)

    split_of, splits = published.split_of, _split_folders(place, tree, published)
    if not splits:
        names = sorted(tree[place].folders & split_of.keys())
        classes = {(split_of[name], name): pictures(place / name) for name in names}
        return FoundSet("class folders side by side", place, classes)
    inside = [(split, path / name) for split, path in splits.items() for name in sorted(tree[path].folders)]
    classes = {(split_of.get(folder.name, split), folder.name): pictures(folder) for split, folder in inside}
    wrong = _misplaced(split_of, [(split, folder.name) for split, folder in inside])
    layout, whole = "class folders in train, val and test", {key: one for key, one in classes.items() if one.total}
    return FoundSet(layout, place, whole, wrong=wrong)


def _misplaced(split_of: Mapping[str, str], classes: Iterable[tuple[str, str]]) -> list[str]:
    """A line if some of these (split, class) are not where they are published."""
    wrong = [(split, name) for split, name in classes if split_of.get(name, split) != split]
    elsewhere = [f"{name} (in {split}, belongs to {split_of[name]})" for split, name in wrong]
    return [f"{len(elsewhere)} classes are in another split: {first_few(elsewhere)}"] if elsewhere else []


def _folders_score(place: Path, tree: Tree, published: PublishedPictures) -> int:
    places = _split_folders(place, tree, published).values() or [place]
    return sum(len(tree[path].folders & published.split_of.keys()) for path in places)


FOLDERS = PictureLayout(
    "class folders by their published names, side by side or in train, val and test", _folders_score, _read_folders
)

# Lists


def _lists(place: Path, tree: Tree) -> dict[str, Path]:
    """Split → its list, if all three are there, and pictures beside them or above."""
    images = tree.get(place / "images")
    if images is None or not any(map(is_picture, images.files)):
        return {}
    for folder in (place, place / "split", place / "splits"):
        if folder in tree and {f"{split}.csv" for split in SPLITS} <= tree[folder].files:
            return {split: folder / f"{split}.csv" for split in SPLITS}
    return {}


def _read_lists(place: Path, tree: Tree, published: PublishedPictures) -> FoundSet:
    rows: list[tuple[str, str, str]] = []
    for split, path in _lists(place, tree).items():
        try:
            with path.open(encoding="utf-8-sig", newline="") as text:
                rows += [(split, row["filename"], row["label"]) for row in csv.DictReader(text)]
            if cut := [file for _, file, label in rows if not (file and label)]:
                raise ValueError(f"the row {cut[0]} is cut off")
        except (OSError, KeyError, csv.Error, ValueError) as error:
            raise DataError(f"{path}: is not a list of filename,label ({error!r}); fetch the published one") from error
    images, members = tree[place / "images"].files, dict[tuple[str, str], set[Path]]()
    for split, file, label in rows:
        if file in images:
            members.setdefault((published.split_of.get(label, split), label), set()).add(place / "images" / file)
    wrong = _misplaced(published.split_of, sorted({(split, label) for split, _, label in rows}))
    if absent := [file for _, file, _ in rows if file not in images]:
        wrong.append(f"the lists name {len(absent)} pictures that images does not hold: {first_few(absent)}")
    classes = {key: ClassPictures(len(paths), functools.partial(sorted, paths)) for key, paths in members.items()}
    return FoundSet("lists beside a folder images", place, classes, wrong=wrong)


LISTS = PictureLayout(
    "train.csv, val.csv and test.csv (filename,label) beside a folder images, or in split",
    lambda place, tree, _: int(bool(_lists(place, tree))), _read_lists,
)  # fmt: skip

# Pickles and arrays


def _files_of(place: Path, tree: Tree, names: Sequence[str]) -> dict[str, Path]:
    """Split → its file, by the first of the names of which a file is there."""
    by_lower = {name.lower(): name for name in tree[place].files}
    for name in names:
        files_of = {
            split: [by_lower[file] for part in parts if (file := name.format(split=part).lower()) in by_lower]
            for split, parts in _PARTS_OF.items()
        }
        if any(files_of.values()):
            return {split: place / files[0] for split, files in files_of.items() if files}
    return {}


# What a pickle of texts, numbers and arrays calls.
_PLAIN = {
    "numpy ndarray", "numpy dtype", "numpy._core.multiarray _reconstruct", "numpy._core.multiarray scalar",
    "numpy._core.numeric _frombuffer", "_codecs encode", "builtins bytes", "collections OrderedDict",
}  # fmt: skip


class _PlainUnpickler(pickle._Unpickler):
    """Reads plain values and numpy's arrays. A pickle is a program that may call whatever `find_class` gives it.

    Python's own unpickler, not that of C, which has no way to look at a state before it is set.
    """

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module).replace("numpy.core.", "numpy._core.")
        if f"{module} {name}" not in _PLAIN:
            raise pickle.UnpicklingError(f"it names {module} {name}, which is no plain value")
        return super().find_class(module, name)

    def load_build(self) -> None:
        value, state = self.stack[-2:]
        # numpy believes the fields and flags in a dtype's state; false ones make any bytes an object.
        is_plain = isinstance(value, np.dtype) and list(state[2:5]) == [None] * 3 and state[7] == value.flags
        if not is_plain and not isinstance(value, np.ndarray):
            raise pickle.UnpicklingError("it holds an object that is no plain value")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {pickle.BUILD[0]: load_build}


def read_plain(path: Path) -> Any:
    """The value in a pickle. Texts of Python 2 are read as latin-1, as numpy's arrays need it. Raises DataError if it
    cannot be read, or holds something else than plain values and arrays."""
    try:
        with path.open("rb") as file:
            return _PlainUnpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises many types
        raise DataError(
            f"{path}: {error}; nothing in it was run. Fetch it again, or another layout of these pictures"
        ) from error


@contextlib.contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Whatever a file holds in place of what it should becomes one line: numpy, zipfile and pickle raise many types."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: does not hold what it should ({error!s:.200}); fetch it again") from error


def _read_pickles(place: Path, tree: Tree, published: PublishedPictures) -> FoundSet:
    files = _files_of(place, tree, published.pickles)
    classes: dict[tuple[str, str], ClassPictures] = {}
    words: dict[str, str] = {}
    for split, path in files.items():
        fields = read_plain(path)
        with _in_words(path):
            if "image_data" in fields:
                images, places = fields["image_data"], {str(name): at for name, at in fields["class_dict"].items()}
            else:
                by_name = fields.get("catname2label", {})
                names = fields.get("label2catname") or {at: name for name, at in by_name.items()}
                names = dict(names if isinstance(names, dict) else enumerate(names))
                images, (places, more) = fields["data"], _by_label(published, split, fields["labels"], names)
                words |= more
            array = np.asarray(images)
            if array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8:
                raise ValueError(f"pictures {array.dtype} {list(array.shape)}, and uint8 [n, height, width, 3] is read")
            get_all = functools.partial(np.asarray, array)
            classes |= {(split, name): _numbered(get_all, len(array), where) for name, where in places.items()}
    return FoundSet("pickles of arrays", place, classes, list(files.values()), words)


def _numbered(images: Callable[[], Any], total: int, where: Any) -> ClassPictures:
    """The pictures with the numbers `where`; `images` gives all of them, `total`."""
    numbers = np.unique(where)
    if numbers.size and (numbers.dtype.kind not in "iu" or not 0 <= numbers[0] <= numbers[-1] < total):
        raise ValueError(f"its pictures have no numbers from 0 to {total - 1}")

    def get() -> Sequence[Any]:
        every = images()
        return [every[number] for number in numbers] if isinstance(every, list) else every[numbers]

    return ClassPictures(len(numbers), get)


def _by_label(
    published: PublishedPictures, split: str, labels: Any, names: Mapping[Any, str]
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Class → the numbers of its pictures; and what people call classes whose published name is not known."""
    places: dict[Any, list[int]] = {}
    for number, label in enumerate(np.asarray(labels).tolist()):
        places.setdefault(label, []).append(number)
    named = {label: str(names.get(label, label)) for label in places}
    if all(name in published.split_of for name in named.values()):
        return {named[label]: where for label, where in places.items()}, {}
    keys = {label: f"{published.name}/{split}/{label:{'04' if isinstance(label, int) else ''}}" for label in places}
    words = {keys[label]: str(names.get(label, f"{split} {label}")) for label in places}
    return {keys[label]: where for label, where in places.items()}, words


PICKLES = PictureLayout(
    "the files {names} (SPLIT: train, val, test)",
    lambda place, tree, published: len(_files_of(place, tree, published.pickles)), _read_pickles,
)  # fmt: skip


_PNGS = ("{split}_images_png.pkl", "tiered-imagenet-{split}_images_png.pkl")
_LABELS = ("{split}_labels.pkl", "tiered-imagenet-{split}_labels.pkl")


def _read_encoded(place: Path, tree: Tree, published: PublishedPictures) -> FoundSet:
    """Reads tiered-ImageNet's files of pictures, with labels beside them."""
    files, labels = _files_of(place, tree, _PNGS), _files_of(place, tree, _LABELS)
    classes: dict[tuple[str, str], ClassPictures] = {}
    words: dict[str, str] = {}
    ids: dict[str, str] = {}  # what people call a class → its WordNet id, if the files that say it are there
    if {"class_names.txt", "synsets.txt"} <= tree[place].files:
        with _in_words(place):
            files_of = (place / "class_names.txt", place / "synsets.txt")
            lines = [path.read_text(encoding="utf-8", errors="replace").splitlines() for path in files_of]
        ids = {text.strip(): key.strip() for text, key in zip(*lines, strict=False)}
    latest: dict[Path, Any] = {}
    for split, path in files.items():
        if split not in labels:
            raise DataError(f"{place}: holds {path.name}, and no {_LABELS[0].format(split=split)}")
        fields = read_plain(labels[split])
        with _in_words(labels[split]):
            numbers = fields["label_specific"] if "label_specific" in fields else fields["labels"]
            calls = {label: str(text) for label, text in enumerate(fields.get("label_specific_str", []))}
            keys = {label: ids.get(text, text) for label, text in calls.items()}
            of_split = {label: key for label, key in keys.items() if published.split_of.get(key) == split}
            places, more = _by_label(published, split, numbers, calls | of_split)
            total = len(numbers)

        def images(path: Path = path, total: int = total) -> Any:
            with _in_words(path):
                if path not in latest:
                    latest.clear()  # first: each of these files takes gigabytes
                    latest[path] = [memoryview(item).tobytes() for item in read_plain(path)]
                every = latest[path]
                if len(every) != total:
                    raise ValueError(f"{len(every)} pictures, and the labels beside it are {total}")
            return every

        words |= more
        classes |= {(split, name): _numbered(images, total, where) for name, where in places.items()}
    return FoundSet("pickles of encoded pictures", place, classes, list(files.values()), words)


ENCODED = PictureLayout(
    "the files SPLIT_images_png.pkl with SPLIT_labels.pkl",
    lambda place, tree, _: len(_files_of(place, tree, _PNGS)), _read_encoded,
)  # fmt: skip
