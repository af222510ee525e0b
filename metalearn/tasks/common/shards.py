"""Shards: the decoded pictures of a dataset, cut by class into files. A worker maps a file when it first needs one of
its classes.

`shard-00000.npy`, … are arrays uint8 [n, h, w] or [n, h, w, 3]; the pictures of a class lie together in one of them.
`index.json` says where.
"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from metalearn.errors import DataError
from metalearn.tasks.common.episodes import Images
from metalearn.tasks.common.written import check_pictures, mapped, read_index, write_index, write_pictures

FORMAT = "metalearn shards 1"

log = logging.getLogger(__name__)


class ShardForm(NamedTuple):
    """The form of decoded pictures: their `decoder`, by the dataset's name and its version, and the `shape` of each,
    (h, w) or (h, w, 3)."""

    decoder: str
    shape: tuple[int, ...]


class Shards:
    """The pictures of the classes with these identities, from the shards in a folder.

    Every shard is read once, to check its digest. It is mapped when a picture in it is first asked for.

    Args:
        folder: the value of `dataset.shards`.
        form: the form of the dataset's pictures.
        identities: identities of the classes that the dataset needs, in the order of their numbers.

    Raises:
        DataError: the folder is missing, damaged, or cut from another dataset.
    """

    def __init__(self, folder: str, form: ShardForm, identities: Sequence[str]) -> None:
        self._folder = Path(str(folder))  # as an override, a name of digits is a number
        try:
            index = read_index(self._folder, FORMAT)
            if index["decoder"] != form.decoder:
                raise ValueError(f"these are shards of {index['decoder']}, and the dataset is {form.decoder}")
            if index["picture"] != list(form.shape):
                raise ValueError(f"a picture has shape {index['picture']}, and the dataset's {list(form.shape)}")
            missing = [name for name in identities if name not in index["classes"]]
            if missing:
                raise ValueError(f"{len(missing)} of the dataset's {len(identities)} classes are not there")
            for shard, one in enumerate(index["shards"]):
                check_pictures(self._folder / shard_name(shard), one["sha256"])
        except ValueError as error:
            raise DataError(
                f"dataset.shards={folder}: {error}; cut them again (metalearn shard --help), or type another folder, "
                "or dataset.shards=null"
            ) from error
        self._places: list[tuple[int, int, int]] = [index["classes"][name] for name in identities]
        self._mapped = functools.cache(lambda shard: mapped(self._folder / shard_name(shard)))
        log.info("%s: %d classes in %d shards", folder, len(index["classes"]), len(index["shards"]))

    @property
    def counts(self) -> list[int]:
        """The number of pictures of every class."""
        return [end - first for _, first, end in self._places]

    def pictures(self, number: int) -> Images:
        """The pictures of class `number`, uint8 [n, h, w] or [n, h, w, 3]."""
        shard, first, end = self._places[number]
        return self._mapped(shard)[first:end]


def shard_name(shard: int) -> str:
    """The file of shard number `shard`."""
    return f"shard-{shard:05d}.npy"


def write_shards(folder: Path, form: ShardForm, groups: Iterable[Mapping[str, Images]]) -> int:
    """Writes a shard for each group of classes, identity → pictures, and then the index; returns the number of shards.

    Raises:
        OSError, RunError: a file cannot be written.
    """
    shards: list[dict[str, object]] = []
    classes: dict[str, tuple[int, int, int]] = {}
    for group in groups:
        first = 0
        for name, pictures in group.items():
            classes[name] = len(shards), first, first + len(pictures)
            first += len(pictures)
        digest = write_pictures(folder / shard_name(len(shards)), (first, *form.shape), group.values())
        shards.append({"pictures": first, "sha256": digest})
    write_index(
        folder,
        {"format": FORMAT, "decoder": form.decoder, "picture": form.shape, "shards": shards, "classes": classes},
    )
    return len(shards)
