"""Identities of classes. A class has the same one in every dataset, split and run."""

import csv
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils import _pytree as pytree

from metalearn.tasks.common.episodes import SPLITS, HoldsClasses
from metalearn.types import NamesClasses, NamesDrawers, TaskSource, TellsClasses

_FIRST = 4  # the tasks of each split that a digest of the data covers

# Bytes of pictures that are read whole for a digest, in a second or less; of more, the first and the last of each
# class.
_WHOLE = 2**28


class Content(NamedTuple):
    """What a source shows: a digest of the first tasks of each split and of the pictures of all classes. It begins with
    the way in which it is made."""

    digest: str

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
    digest, of_pictures, read = hashlib.sha256(), hashlib.sha256(), 0
    for split in SPLITS:
        for number in range(min(_FIRST, source.size(split) or _FIRST)):  # one by one: a task may be large
            for values in pytree.tree_leaves(source.episodes(split, torch.tensor([number]))):
                digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
                digest.update(values.detach().cpu().contiguous().numpy().data)
        if not isinstance(source, HoldsClasses) or (classes := source.classes_of(split)).drawn:
            continue
        for label in range(len(classes.identities)):
            pictures = classes.pictures(label)
            read += pictures.nbytes
            for number in range(len(pictures)) if read <= _WHOLE else (0, len(pictures) - 1):
                of_pictures.update(hashlib.sha256(pictures[number].tobytes()).digest())
    digest.update(of_pictures.digest())
    if isinstance(source, HasDigest):
        digest.update(source.digest_of_all())
    return Content(f"2-{digest.hexdigest()}")  # 2: the way in which it is made; raise it with any change above


def identities_of(source: TaskSource, split: str) -> frozenset[str] | None:
    """The identities of a split's classes; None if the source does not name them."""
    return (frozenset(source.identities(split)) or None) if isinstance(source, NamesClasses) else None


def drawers_of(source: TaskSource, split: str) -> Mapping[str, str]:
    """The drawers of a split, as `NamesDrawers` has them; empty if the source does not name them."""
    return source.drawers(split) if isinstance(source, NamesDrawers) else {}


def class_names_of(source: TaskSource, split: str, index: int) -> Sequence[str]:
    """What people call the classes of a task, by their labels; empty if the source does not tell."""
    return source.class_names(split, index) if isinstance(source, TellsClasses) else ()
