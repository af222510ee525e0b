"""The pictures that a classifier learns from: found, decoded, and freed of what would spoil the figures."""

import hashlib
import io
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metalearn.api.folders import support_in
from metalearn.api.pictures import shown
from metalearn.classifier.backbones import Backbone, features_of
from metalearn.errors import DataError
from metalearn.storage import cache
from metalearn.tasks.common.picture_folders import first_few
from metalearn.tasks.common.pictures import PictureForm, bounded_picture

log = logging.getLogger("metalearn")


class Collected(NamedTuple):
    """Pictures as the backbone sees them, uint8 [size, size, 3] each, with the names of their files and classes."""

    names: list[str]
    labels: list[Any]
    pictures: list[Tensor]


def as_seen(picture: Any, form: PictureForm, name: str) -> Tensor:
    """A picture of any kind: a path, one of Pillow's, an array, bytes of a file or an open file.

    Raises:
        ValueError: it cannot be read; the message begins with `name`.
    """
    if isinstance(picture, bytes | bytearray | memoryview):
        picture = io.BytesIO(picture)
    if hasattr(picture, "read") and not isinstance(picture, type):
        picture = bounded_picture(picture, name)
    return torch.from_numpy(np.array(shown(picture, form, name)))


def collect(root: Path, form: PictureForm, *, key: str, strict: bool, least: int = 2) -> Collected:
    """All pictures of the class folders below `root`. What cannot be read is passed over with a line, and so is each
    copy of a picture.

    Args:
        key: how messages name the folder, as `FOLDER=`.
        strict: refuse what would be passed over.
        least: how many classes there must be.

    Raises:
        DataError: there are fewer than two classes, or a picture lies in two of them; or, if `strict`, something would
            be passed over.
    """
    found = support_in(root, key, least)
    assert found.classes is not None
    pictures, broken = list[tuple[str, str, Tensor]](), []
    for file, label in zip(found.files, found.classes, strict=True):
        try:
            pictures.append((file, label, as_seen(root / file, form, "picture")))
        except ValueError as error:
            broken.append(file)
            log.warning("%s%s", key, str(error).removeprefix("picture="))
    kept, copies = without_copies(pictures, f"{key}{root}")
    if broken:
        log.warning(
            "%s%s: %d of %d pictures cannot be read and are passed over", key, root, len(broken), len(found.files)
        )
    if copies:
        log.warning(
            "%s%s: %d copies of other pictures of their classes are passed over, since a picture that is known tells "
            "nothing of new ones: %s", key, root, len(copies), first_few(copies),
        )  # fmt: skip
    if strict and (broken or copies):
        raise DataError(
            f"{key}{root}: --strict: {len(broken) + len(copies)} pictures are damaged or copies; remove them"
        )
    gone = sorted(set(found.classes) - set(kept.labels))
    if gone:
        raise DataError(f"{key}{root}: no picture of these classes can be read: {first_few(gone)}; add some, or remove")
    return kept


def without_copies(pictures: Iterable[tuple[str, Any, Tensor]], where: str) -> tuple[Collected, list[str]]:
    """The pictures without copies within a class, and the names of the copies.

    Raises:
        DataError: a picture is in two classes, so that no answer is right.
    """
    kept, copies, first = Collected([], [], []), [], dict[bytes, tuple[str, Any]]()
    for name, label, picture in pictures:
        digest = hashlib.sha256(picture.numpy().tobytes()).digest()
        other, its = first.setdefault(digest, (name, label))
        if its != label:
            raise DataError(f"{where}: {name} is the same picture as {other}, in another class; remove one of them")
        if other != name:
            copies.append(name)
            continue
        kept.names.append(name)
        kept.labels.append(label)
        kept.pictures.append(picture)
    return kept, copies


def features_from_cache(backbone: Backbone, pictures: Sequence[Tensor]) -> Tensor:
    """The features of pictures, float32 [n, width]; from the cache if they are there."""
    digest = hashlib.sha256(f"{backbone.digest} {backbone.form}".encode())
    for picture in pictures:
        digest.update(hashlib.sha256(picture.numpy().tobytes()).digest())

    def content() -> cache.Parts:
        buffer = io.BytesIO()
        np.save(buffer, features_of(backbone, pictures).numpy())
        return [buffer.getvalue()]

    try:
        file, _, _ = cache.get(f"features-{digest.hexdigest()[:24]}.npy", content)
    except cache.CacheError as error:
        log.warning("%s", error)
        return features_of(backbone, pictures)
    with file:
        found = np.load(file, allow_pickle=False)
    return torch.from_numpy(found)
