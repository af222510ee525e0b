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
from metalearn.api.pictures import seen
from metalearn.classifier.backbones import Backbone, features_of
from metalearn.errors import DataError
from metalearn.storage import cache
from metalearn.tasks.common.picture_folders import first_few
from metalearn.tasks.common.pictures import PictureForm

log = logging.getLogger("metalearn")


class Collected(NamedTuple):
    """Pictures as the backbone sees them, uint8 [size, size, 3] each, with the names of their files and classes."""

    names: list[str]
    labels: list[Any]
    pictures: list[Tensor]


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
    found = support_in(root, key, least, strict=strict)
    assert found.classes is not None
    pictures, wrong = list[tuple[str, str, Tensor]](), []
    for file, label, picture in zip(found.files, found.classes, seen(found.paths, form), strict=True):
        if isinstance(picture, str):
            log.warning("%s%s: cannot be read: %s", key, root / file, picture)
        else:
            pictures.append((file, label, picture))
    if broken := len(found.files) - len(pictures):
        wrong.append(f"{broken} of {len(found.files)} pictures cannot be read")
    kept, copies = without_copies(pictures, f"{key}{root}")
    if copies:  # which tell nothing of new pictures
        wrong.append(f"{len(copies)} pictures are copies of others of their classes: {first_few(copies)}")
    if strict and wrong:
        raise DataError(f"{key}{root}: --strict: {'; '.join(wrong)}; remove them")
    for what in wrong:
        log.warning("%s%s: passed over: %s", key, root, what)
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
