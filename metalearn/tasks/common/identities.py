"""Identities of classes. A class has the same one in every dataset, split and run."""

import hashlib

from metalearn.types import NamesClasses, TaskSource


def identity(family: str, name: object) -> str:
    """The identity of a class, 16 hexadecimal digits: a digest of its name in a family of datasets, such as all splits
    of Omniglot."""
    return hashlib.sha256(f"{family}/{name}".encode(errors="surrogateescape")).hexdigest()[:16]


def identities_of(source: TaskSource, split: str) -> frozenset[str] | None:
    """The identities of a split's classes; None if the source does not name them."""
    return (frozenset(source.identities(split)) or None) if isinstance(source, NamesClasses) else None
