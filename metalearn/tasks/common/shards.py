"""Shards: the decoded pictures of a dataset, cut by class into files. A worker maps a file when it first needs one of
its classes.

`shard-00000.npy`, … are arrays uint8 [n, h, w] or [n, h, w, 3]; the pictures of a class lie together in one of them.
`index.json` says where, and has the SHA-256 of every shard and of itself. It is written last: a folder without it is
not whole.
"""

import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from metalearn.errors import DataError
from metalearn.storage.files import read_object, write_atomically
from metalearn.tasks.common.cache import array_header
from metalearn.tasks.common.episodes import Images

INDEX = "index.json"
FORMAT = "metalearn shards 1"

_FIELDS = {"format": str, "decoder": str, "picture": list, "shards": list, "classes": dict, "sha256": str}
_NAMED = 5
"""A message names this many of the files that are missing, and counts the others."""

log = logging.getLogger(__name__)


class ShardForm(NamedTuple):
    """The form of decoded pictures: their `decoder`, by the dataset's name and its version, and the `shape` of each,
    (h, w) or (h, w, 3)."""

    decoder: str
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """The pictures of a class: from number `first` up to, but without, number `end` of the shard."""

    shard: int
    first: int
    end: int


class _Index(NamedTuple):
    """`sizes` and `digests` are the number of pictures and the SHA-256 of every shard."""

    form: ShardForm
    sizes: list[int]
    digests: list[str]
    places: dict[str, _Place]


class Shards:
    """The pictures of the classes with these identities, from the shards in a folder.

    Every shard is read once, to check its digest. It is mapped when a picture in it is first asked for.

    Args:
        folder: the value of `dataset.shards`.
        form: the form of the dataset's pictures.
        identities: identities of the classes that the dataset needs, in the order of their numbers.
        drawings: the number of pictures of each class; None if classes differ.

    Raises:
        DataError: the folder is missing, damaged, or cut from another dataset.
    """

    def __init__(self, folder: str, form: ShardForm, identities: Sequence[str], drawings: int | None = None) -> None:
        self._folder, self._form = Path(str(folder)), form  # as an override, a name of digits is a number
        index = _read(self._folder)
        _check_same_dataset(self._folder, index, form, identities)
        _check_files(self._folder, index)
        self._sizes = index.sizes
        self._places = [index.places[name] for name in identities]
        if drawings is not None and set(self.counts) != {drawings}:
            raise _refused(
                self._folder, f"its classes have {min(self.counts)} to {max(self.counts)} pictures of {drawings}"
            )
        self._mapped = functools.cache(self._map)
        log.info("%s: %d classes in %d shards", folder, len(index.places), len(index.sizes))

    @property
    def counts(self) -> list[int]:
        """The number of pictures of every class."""
        return [place.end - place.first for place in self._places]

    def pictures(self, number: int) -> Images:
        """The pictures of class `number`, uint8 [n, h, w] or [n, h, w, 3]."""
        shard, first, end = self._places[number]
        return self._mapped(shard)[first:end]

    def _map(self, shard: int) -> Images:
        shape = (self._sizes[shard], *self._form.shape)
        with _open(self._folder, shard) as file:  # As a plain array: every access to a memmap takes a microsecond more.
            return np.asarray(np.memmap(file, np.uint8, "r", len(array_header(shape)), shape))


def shard_name(shard: int) -> str:
    """The file of shard number `shard`."""
    return f"shard-{shard:05d}.npy"


# Writing


def _write_shard(folder: Path, shard: int, pictures: Images) -> str:
    """Writes a shard; returns its SHA-256."""
    digest = hashlib.sha256()
    with (folder / shard_name(shard)).open("xb") as file:
        for part in (array_header(pictures.shape), np.ascontiguousarray(pictures).reshape(-1).data):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_shards(folder: Path, form: ShardForm, groups: Iterable[Mapping[str, Images]]) -> int:
    """Writes a shard for each group of classes, identity → pictures, and then the index; returns the number of shards.

    Raises:
        OSError, RunError: a file cannot be written.
    """
    shards: list[dict[str, Any]] = []
    classes: dict[str, _Place] = {}
    for group in groups:
        first = 0
        for name, pictures in group.items():
            classes[name] = _Place(len(shards), first, first + len(pictures))
            first += len(pictures)
        digest = _write_shard(folder, len(shards), np.concatenate(list(group.values())))
        shards.append({"pictures": first, "sha256": digest})
    index = {"format": FORMAT, "decoder": form.decoder, "picture": form.shape, "shards": shards, "classes": classes}
    write_atomically(folder / INDEX, json.dumps(index | {"sha256": digest_of(index)}))
    return len(shards)


def digest_of(index: Mapping[str, Any]) -> str:
    """The SHA-256 of an index, as it stands in its field `sha256`."""
    content = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# Reading


def _refused(folder: Path, reason: str) -> DataError:
    return DataError(
        f"dataset.shards={folder}: {reason}; cut them again (metalearn shard --help), or type "
        "another folder, or dataset.shards=null"
    )


def _read(folder: Path) -> _Index:
    """The index of a folder.

    Raises:
        DataError: there is none, or it is not as `write_shards` has written it.
    """
    try:
        content = read_object(folder / INDEX)
    except OSError as error:
        raise _refused(folder, f"{INDEX} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _refused(folder, str(error)) from error
    if content.get("format") != FORMAT:
        raise _refused(folder, f"{INDEX} has format={str(content.get('format'))[:40]!r}, and {FORMAT!r} is read")
    wrong = [key for key, kind in _FIELDS.items() if not isinstance(content.get(key), kind)]
    if wrong or content.keys() != _FIELDS.keys():
        raise _refused(folder, f"{INDEX} has wrong fields: {', '.join(wrong) or 'more than it should'}")
    if digest_of(content) != content["sha256"]:
        raise _refused(folder, f"{INDEX} is damaged (another SHA-256)")
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _refused(folder, f"{INDEX} has wrong fields ({error!r})") from error


def _parsed(content: Mapping[str, Any]) -> _Index:
    """Raises KeyError, TypeError, ValueError or IndexError for what cannot be an index."""
    form = ShardForm(content["decoder"], tuple(_whole(number, 1) for number in content["picture"]))
    sizes = [_whole(shard["pictures"], 1) for shard in content["shards"]]
    digests = [str(shard["sha256"]) for shard in content["shards"]]
    places = {name: _Place(*(_whole(number, 0) for number in place)) for name, place in content["classes"].items()}
    for name, (shard, first, end) in places.items():
        if not first < end <= sizes[shard]:
            raise ValueError(f"class {name}: {first} to {end} of {sizes[shard]} pictures")
    return _Index(form, sizes, digests, places)


def _whole(value: object, at_least: int) -> int:
    if type(value) is not int or value < at_least:
        raise ValueError(f"{value!r}: must be a whole number of at least {at_least}")
    return value


def _check_same_dataset(folder: Path, index: _Index, form: ShardForm, identities: Sequence[str]) -> None:
    """Raises DataError if the shards were cut from another dataset, or from pictures of another size."""
    if index.form.decoder != form.decoder:
        raise _refused(folder, f"these are shards of {index.form.decoder}, and the dataset is {form.decoder}")
    if index.form.shape != form.shape:
        raise _refused(folder, f"a picture has shape {list(index.form.shape)}, and the dataset's {list(form.shape)}")
    missing = [name for name in identities if name not in index.places]
    if missing:
        raise _refused(folder, f"{len(missing)} of the dataset's {len(identities)} classes are not there")


def _check_files(folder: Path, index: _Index) -> None:
    """Raises DataError if a shard is missing or is not what was written."""
    missing = [shard_name(shard) for shard in range(len(index.sizes)) if not (folder / shard_name(shard)).exists()]
    if missing:
        few = ", ".join(missing[:_NAMED]) + (", …" if len(missing) > _NAMED else "")
        raise _refused(folder, f"{len(missing)} of the {len(index.sizes)} shards are missing: {few}")
    for shard, (size, digest) in enumerate(zip(index.sizes, index.digests, strict=True)):
        header = array_header((size, *index.form.shape))
        expected = len(header) + size * math.prod(index.form.shape)
        with _open(folder, shard) as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected:
                raise _refused(folder, f"{shard_name(shard)} is damaged ({actual} bytes of {expected})")
            if file.read(len(header)) != header:
                raise _refused(folder, f"{shard_name(shard)} is damaged (another header)")
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise _refused(folder, f"{shard_name(shard)} is damaged (another SHA-256)")


def _open(folder: Path, shard: int) -> BufferedReader:
    try:
        return (folder / shard_name(shard)).open("rb")
    except OSError as error:
        raise _refused(folder, f"{shard_name(shard)} cannot be read ({error.strerror})") from error
