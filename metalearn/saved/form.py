"""The one saved form: a folder of tensors, facts and digests. Checkpoints, learners, adapted tasks, classifiers and
table estimators are all saved in it.

`params.safetensors` holds the tensors, `meta.json` the kind, its version and its facts, and `manifest.json` the SHA-256
of every other file. A kind may have more files, and a saved folder within it. `README.md`, the model card, is for
people: it is not in the manifest, so that it may be edited.

A folder may come from anybody. So nothing in it is run, and a kind has one schema: what does not fit it is refused.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metalearn.storage.files import whole_folder

TENSORS, META, MANIFEST, CARD = "params.safetensors", "meta.json", "manifest.json", "README.md"


class Kind(NamedTuple):
    """What a saved folder may hold: `schema` has the type of each field of meta.json that must be there.

    A field's type is a type or a union (`int | None`), `object` for anything, a dict of fields, or a list with the type
    of its items.
    """

    name: str
    version: int
    schema: Mapping[str, Any]


class SavedFolder(NamedTuple):
    """A folder that was read: its tensors, its facts, and where it is."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    folder: Path


class NotSavedError(ValueError):
    """A folder that is damaged, incomplete or of another kind; the message names the file."""


def save(key: str, folder: Path, kind: Kind, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Saves in the new folder `folder`, which messages call `key`; it appears whole or not at all.

    Raises:
        ConfigError: the folder is not empty or cannot be written.
    """
    with whole_folder(key, folder) as temporary:
        fill(temporary, kind, tensors, meta)


def fill(folder: Path, kind: Kind, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Writes the three files into a folder that may hold other files of the kind already, and syncs all to disk."""
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / TENSORS)
    content = {"kind": kind.name, "version": kind.version} | dict(meta)
    (folder / META).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CARD)
    digests = {path.relative_to(folder).as_posix(): digest_of(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    for path in (*files, folder / MANIFEST, folder):
        sync(path)


def kind_of(folder: Path) -> str | None:
    """The name of the kind that a folder says it holds; None if it is no saved folder."""
    try:
        name = _object(folder / META).get("kind")
    except (OSError, NotSavedError):
        return None
    return name if isinstance(name, str) else None


def load(folder: Path, kind: Kind) -> SavedFolder:
    """What `save` has saved, verified by its manifest and the schema of its kind.

    Raises:
        NotSavedError: a file is missing or damaged, or the folder holds something else.
    """
    meta = load_meta(folder, kind)
    try:
        # Copies: loaded tensors are views of one mapped file, of any alignment, by which kernels may round.
        tensors = {name: value.clone() for name, value in load_file(folder / TENSORS).items()}
    except SafetensorError as error:
        raise NotSavedError(f"{folder / TENSORS}: holds no tensors ({error})") from error
    return SavedFolder(tensors, meta, folder)


def load_meta(folder: Path, kind: Kind) -> dict[str, Any]:
    """The facts of a saved folder; as `load`, without its tensors."""
    try:
        for name, digest in ({TENSORS: None, META: None} | _object(folder / MANIFEST)).items():
            if digest_of(folder / name) != digest:
                raise NotSavedError(f"{folder / name}: differs from what was saved (SHA-256 in {MANIFEST})")
        meta = _object(folder / META)
    except OSError as error:
        raise NotSavedError(f"{error.filename or folder}: {error.strerror}") from error
    if meta.get("kind") != kind.name:
        raise NotSavedError(f"{folder / META}: kind={str(meta.get('kind'))[:40]!r} is not {kind.name!r}")
    if meta.get("version") != kind.version:
        raise NotSavedError(
            f"{folder / META}: version={str(meta.get('version'))[:40]} is not {kind.version}, which this program reads"
        )
    check_fields(meta, kind.schema, str(folder / META))
    return meta


def check_fields(value: Any, schema: Any, where: str) -> None:
    """Raises NotSavedError, which names the field, for a value that does not fit a schema (see `Kind`)."""
    if isinstance(schema, Mapping):
        if not isinstance(value, dict):
            raise NotSavedError(f"{where}: must be an object")
        for name, inner in schema.items():
            if name not in value:
                raise NotSavedError(f"{where}: has no field {name}")
            check_fields(value[name], inner, f"{where}: {name}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise NotSavedError(f"{where}: must be a list")
        for item in value:
            check_fields(item, schema[0], where)
    elif schema is not object:
        kinds = getattr(schema, "__args__", (schema,))
        kinds = (*kinds, int) if float in kinds else kinds  # JSON writes 1.0 as 1 in some languages
        if type(value) not in kinds:  # not isinstance: for Python, True is an int
            raise NotSavedError(f"{where}={str(value)[:40]}: must be {getattr(schema, '__name__', schema)}")


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NotSavedError(f"{path}: holds no JSON ({error})") from error
    if not isinstance(content, dict):
        raise NotSavedError(f"{path}: holds no JSON object")
    return content
