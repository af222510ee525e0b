"""The one saved form: a folder of tensors, facts and digests. Checkpoints, learners, adapted tasks, classifiers and
table estimators are all saved in it.

`params.safetensors` holds the tensors, `meta.json` the kind, its version and its facts, and `manifest.json` the SHA-256
of every other file. A kind may have more files, and a saved folder within it. `README.md`, the model card, is for
people: it is not in the manifest, so that it may be edited.

A folder may come from anybody. So nothing in it is run, and a kind has one schema: what does not fit it is refused.
"""

import functools
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from metalearn.storage.files import beside, creating, exchanged, read_object, whole_folder

if TYPE_CHECKING:  # commands ask for the kind of a folder before they set the threads, which torch reads at its import
    from torch import Tensor

TENSORS, META, MANIFEST, CARD = "params.safetensors", "meta.json", "manifest.json", "README.md"

USES = {
    "checkpoint": "a checkpoint of a run; type metalearn evaluate checkpoint={folder}, or in Python metalearn.load",
    "learner": "a learner; type metalearn adapt --model {folder}, or in Python metalearn.load",
    "task": "an adapted task; load it in Python, by metalearn.load_task",
    "classifier": "a classifier that metalearn fit has made; type metalearn predict {folder} PICTURES, or in Python "
    "metalearn.PictureClassifier.load",
    "table": "what metalearn fit has made of a table; type metalearn predict {folder} TABLE, or in Python "
    "metalearn.PFNClassifier.load",
}  # fmt: skip
"""What a folder is and how it is used, by the name of its kind: for messages where another kind is expected."""


class Kind(NamedTuple):
    """What a saved folder holds: `schema` has the type of each field of meta.json that must be there, and `tensors` the
    names of tensors that must be.

    A type is one of Python's, a union (`int | None`), `object` for anything, a dict of fields, or a list of one type.
    """

    name: str
    version: int
    schema: Mapping[str, Any]
    tensors: Sequence[str] = ()


class Unread(Mapping[str, "Tensor"]):
    """The tensors of a file whose header alone was read: the `shapes` by name. The first one asked for reads all."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], read: "Callable[[], dict[str, Tensor]]") -> None:
        self.shapes, self.read = shapes, functools.cache(read)

    def __getitem__(self, name: str) -> "Tensor":
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class SavedFolder(NamedTuple):
    """A folder that was read: its tensors, its facts, and where it is."""

    tensors: "dict[str, Tensor]"
    meta: dict[str, Any]
    folder: Path


class NotSavedError(ValueError):
    """A folder that is damaged, incomplete or of another kind; the message names the file."""


@contextmanager
def replacing(key: str, folder: Path, kind: Kind) -> Iterator[Path]:
    """Gives a folder to fill, which takes the place of what is saved in `folder`, if nothing fails. Other files
    there go along, and links as links. Where nothing of this kind is saved, it is a new folder, as of `whole_folder`.
    A replacement that a kill has cut short is undone first. Raises ConfigError if something else is there, or it cannot
    be written."""
    final = folder.resolve()
    replaced, temporary = replaced_by(final), beside(final)
    with creating(key, folder):
        if replaced.exists():
            shutil.rmtree(replaced) if folder.exists() else replaced.rename(folder)
    if kind_of(folder) != kind.name:
        with whole_folder(key, folder) as new:
            yield new
        return
    with creating(key, folder):
        temporary.mkdir()
        try:
            yield temporary
            saved = {MANIFEST, *(name.partition("/")[0] for name in _object(final / MANIFEST))}
            saved |= {path.name for path in temporary.iterdir()}
            for path in [path for path in final.iterdir() if path.name not in saved]:
                if path.is_symlink() or not path.is_dir():
                    shutil.copy2(path, temporary / path.name, follow_symlinks=False)
                else:
                    shutil.copytree(path, temporary / path.name, symlinks=True)
            if not exchanged(temporary, final):
                # After a kill between these two, readers find the old one where it is now.
                final.rename(replaced)
                temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def replaced_by(folder: Path) -> Path:
    """Where a saved folder is while `replacing` puts another one in its place."""
    return folder.with_name(f".{folder.name}.old")


def fill(folder: Path, kind: Kind, tensors: "Mapping[str, Tensor]", meta: Mapping[str, Any]) -> None:
    """Writes the three files into a folder that may hold other files of the kind already, and syncs all to disk."""
    from safetensors.torch import save_file

    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / TENSORS)
    content = json.dumps({"kind": kind.name, "version": kind.version} | dict(meta), indent=2)
    # Lists of numbers and texts on one line each: a confusion matrix has a number for each two classes.
    content = re.sub(r"(?<=\[)\n\s+[^][{}]*\n\s+(?=\])", lambda lines: re.sub(r"\n\s+", " ", lines[0]).strip(), content)
    (folder / META).write_text(content + "\n", encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CARD)
    digests = {path.relative_to(folder).as_posix(): digest_of(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    for path in files:
        if path.suffix == ".safetensors":  # safetensors itself lets only the owner read them, whatever the umask is
            shutil.copymode(folder / META, path)
    for path in (*files, folder / MANIFEST, folder):
        sync(path)


def kind_of(folder: Path) -> str | None:
    """The name of the kind that a folder says it holds; None if it is no saved folder."""
    try:
        name = _object(folder / META).get("kind")
    except (OSError, NotSavedError):
        return None
    return name if isinstance(name, str) else None


def load(folder: Path, kind: Kind, *, later: bool = False) -> SavedFolder:
    """What `fill` has written, verified by its manifest and the schema of its kind. With `later`, the tensors are
    `Unread`: gigabytes of another network are seen from the header. Raises NotSavedError if a file is missing or
    damaged, or the folder holds something else."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    def read() -> "dict[str, Tensor]":
        if later:
            _verify(folder, [TENSORS])
        # Copies: loaded tensors are views of one mapped file, of any alignment, by which kernels may round.
        return {name: value.clone() for name, value in load_file(folder / TENSORS).items()}

    meta = load_meta(folder, kind, later=later)
    tensors: dict[str, Tensor]
    try:
        if later:
            with safe_open(folder / TENSORS, "pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            tensors = cast("dict[str, Tensor]", Unread(shapes, read))
        else:
            tensors = read()
    except (SafetensorError, OSError) as error:
        _verify(folder, [TENSORS])  # a file that is damaged, or may not be read, is named as such
        raise NotSavedError(f"{folder / TENSORS}: holds no tensors ({error})") from error
    if missing := [name for name in kind.tensors if name not in tensors]:
        raise NotSavedError(f"{folder / TENSORS}: has no tensor {missing[0]}")
    return SavedFolder(tensors, meta, folder)


def _verify(folder: Path, names: Sequence[str] | None = None, but: str = "") -> None:
    """Raises NotSavedError unless the files of these names (None: all, but one) have their digests."""
    try:
        digests = {TENSORS: None, META: None} | _object(folder / MANIFEST)
        for name in digests if names is None else names:
            if name != but and digest_of(folder / name) != digests[name]:
                raise NotSavedError(f"{folder / name}: differs from what was saved (SHA-256 in {MANIFEST})")
            (folder / name).stat()
    except OSError as error:
        raise NotSavedError(f"{error.filename or folder}: {error.strerror}") from error


def load_meta(folder: Path, kind: Kind, *, later: bool = False) -> dict[str, Any]:
    """The facts of a saved folder; as `load`, without its tensors. With `later`, these are not verified."""
    _verify(folder, but=TENSORS if later else "")
    meta = _object(folder / META)
    if meta.get("kind") != kind.name:
        name = str(meta.get("kind"))[:40]
        other = USES[name].format(folder=folder) if name in USES else f"no {kind.name}: kind={name}"
        raise NotSavedError(f"{folder}: is {other}")
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
            raise NotSavedError(f"{where}={str(value)[:40]}: must be an object")
        for name, inner in schema.items():
            if name not in value:
                raise NotSavedError(f"{where}: has no field {name}")
            check_fields(value[name], inner, f"{where}: {name}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise NotSavedError(f"{where}={str(value)[:40]}: must be a list")
        for item in value:
            check_fields(item, schema[0], where)
    elif schema is not object:
        kinds = getattr(schema, "__args__", (schema,))
        kinds = (*kinds, int) if float in kinds else kinds  # JSON writes 1.0 as 1 in some languages
        if type(value) not in kinds:  # not isinstance: for Python, True is an int
            raise NotSavedError(f"{where}={str(value)[:40]}: must be {getattr(schema, '__name__', schema)}")
        if isinstance(value, float) and not math.isfinite(value):  # Python's JSON reads NaN and Infinity
            raise NotSavedError(f"{where}={value}: must be finite")


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
        return read_object(path)
    except ValueError as error:
        raise NotSavedError(str(error)) from error
