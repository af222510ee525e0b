"""Identities of classes. A class has the same one in every dataset, split and run."""

import hashlib
import itertools

import torch

from metalearn.tasks.common.episodes import SPLITS
from metalearn.types import NamesClasses, TaskSource

_FIRST = 4
"""The tasks of each split whose content stands for that of the data."""


def identity(family: str, name: object) -> str:
    """The identity of a class, 16 hexadecimal digits: a digest of its name in a family of datasets, such as all splits
    of Omniglot."""
    return hashlib.sha256(f"{family}/{name}".encode(errors="surrogateescape")).hexdigest()[:16]


def content_of(source: TaskSource) -> str:
    """A digest of what a source shows: of the first tasks, or samples, of each split."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for number in range(min(_FIRST, source.size(split) or _FIRST)):  # one by one: a task may be large
            for values in itertools.chain(*source.episodes(split, torch.tensor([number]))):
                digest.update(f"{tuple(values.shape)} {values.dtype}".encode())
                digest.update(values.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def identities_of(source: TaskSource, split: str) -> frozenset[str] | None:
    """The identities of a split's classes; None if the source does not name them."""
    return (frozenset(source.identities(split)) or None) if isinstance(source, NamesClasses) else None
