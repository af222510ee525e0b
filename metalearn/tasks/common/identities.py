"""Identities of classes. A class has the same one in every dataset, split and run."""

import csv
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from metalearn.tasks.common.episodes import SPLITS, HoldsClasses, Images
from metalearn.types import NamesClasses, NamesDrawers, TaskSource, TellsClasses

_FIRST = 4
"""The tasks of each split that a digest of the data covers."""

FEW = 0.001
"""So large a part of a dataset may be copies within classes without a word: Omniglot has one copy of 32,460."""

_WHOLE = 2**28
"""Bytes of pictures that are read whole for a digest, in a second or less; of more, the first and the last of each
class."""


class Content(NamedTuple):
    """What a source shows.

    `digest` covers the first tasks of each split and the pictures of all classes; it begins with the way in which it is
    made. `copies` and `shared` are lines about pictures that are there twice: in a class, and in several; empty where
    there are none.
    """

    digest: str
    copies: str = ""
    shared: str = ""

    def is_known_otherwise(self, digest: object) -> bool:
        """Whether a digest that was made in the same way is another one."""
        way = self.digest.partition("-")[0]
        return isinstance(digest, str) and digest.startswith(f"{way}-") and digest != self.digest


@functools.cache
def published_list(name: str) -> tuple[Mapping[str, str], ...]:
    """The rows of a list of classes, one of the files `*_classes.csv` and `*_characters.csv` beside the datasets."""
    with (Path(__file__).parents[1] / name).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def identity(family: str, name: object) -> str:
    """The identity of a class, 16 hexadecimal digits: a digest of its name in a family of datasets, such as all splits
    of Omniglot."""
    return hashlib.sha256(f"{family}/{name}".encode(errors="surrogateescape")).hexdigest()[:16]


@runtime_checkable
class HasDigest(Protocol):
    """A source with a digest of all of its data."""

    def digest_of_all(self) -> bytes: ...


def content_of(source: TaskSource) -> Content:
    """The content of a source."""
    digest, found = hashlib.sha256(), _Pictures()
    for split in SPLITS:
        for number in range(min(_FIRST, source.size(split) or _FIRST)):  # one by one: a task may be large
            for values in pytree.tree_leaves(source.episodes(split, torch.tensor([number]))):
                digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
                digest.update(values.detach().cpu().contiguous().numpy().data)
        if isinstance(source, HoldsClasses):
            classes = source.classes_of(split)
            for label in range(0 if classes.drawn else len(classes.identities)):
                found.add(split, label, classes.pictures(label))
    digest.update(found.digest.digest())
    if isinstance(source, HasDigest):
        digest.update(source.digest_of_all())
    return Content(f"2-{digest.hexdigest()}", *found.lines())


class _Pictures:
    """The pictures of all classes, one class after the other."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._bytes = 0
        self._first: dict[bytes, tuple[str, int, int]] = {}
        self._copies: list[str] = []
        self._shared: list[str] = []

    def add(self, split: str, label: int, pictures: Images) -> None:
        self._bytes += pictures.nbytes
        numbers = range(len(pictures)) if self._bytes <= _WHOLE else (0, len(pictures) - 1)
        for number in numbers:
            name = hashlib.sha256(pictures[number].tobytes()).digest()
            self.digest.update(name)
            place = split, label, number
            first = self._first.setdefault(name, place)
            if first != place:
                same_class = first[:2] == place[:2]
                (self._copies if same_class else self._shared).append(f"{_named(*place)} is {_named(*first)}")

    def lines(self) -> tuple[str, str]:
        few = len(self._copies) < FEW * len(self._first)
        return (
            self._line(
                [] if few else self._copies, "in its class, so that a task may test a picture that it has learned from"
            ),
            self._line(self._shared, "of another class, so that no label is right"),
        )

    @staticmethod
    def _line(places: list[str], why: str) -> str:
        if not places:
            return ""
        many = f"{len(places)} pictures are" if len(places) > 1 else "a picture is"
        return f"{many} the copy of one {why}; the first: {places[0]}"


def _named(split: str, label: int, number: int) -> str:
    return f"number {number} of class {label} of {split}"


def identities_of(source: TaskSource, split: str) -> frozenset[str] | None:
    """The identities of a split's classes; None if the source does not name them."""
    return (frozenset(source.identities(split)) or None) if isinstance(source, NamesClasses) else None


def drawers_of(source: TaskSource, split: str) -> Mapping[str, str]:
    """The drawers of a split, as `NamesDrawers` has them; empty if the source does not name them."""
    return source.drawers(split) if isinstance(source, NamesDrawers) else {}


def class_names_of(source: TaskSource, split: str, index: int) -> Sequence[str]:
    """What people call the classes of a task, by their labels; empty if the source does not tell."""
    return source.class_names(split, index) if isinstance(source, TellsClasses) else ()
