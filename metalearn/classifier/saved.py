"""The folder of a classifier: `classifier.json`, the features of its pictures in `classifier.safetensors`, the weights
of its network in `backbone.safetensors`, unless a package or code brings them, and the page `report.html`.

A folder may be of any origin: what is read is bounded and checked, and nothing in it is run.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from metalearn.checks import first_line, one_of, true_or_false, whole_number
from metalearn.classifier.heads import AUTO, HEADS
from metalearn.classifier.page import REPORT, classifier_page
from metalearn.classifier.validation import SHARPEST
from metalearn.errors import ConfigError
from metalearn.models.common.weights import LICENCE, NAMED
from metalearn.saved.form import digest_of
from metalearn.storage.files import creating, is_folder, read_json, read_object, refuse_used
from metalearn.storage.locks import held

DESCRIPTION, TENSORS, WEIGHTS = FILES = "classifier.json", "classifier.safetensors", "backbone.safetensors"

DIGEST, WEIGHTS_DIGEST = "sha256", "weights_sha256"
"""The fields of the digest of `DESCRIPTION` and `TENSORS`, and of that of `WEIGHTS`: null if there is no such file."""

_LOCK = ".classifier.lock"

FORMAT, FORMAT_WITH_TUNED = FORMATS = 1, 2
"""Versions of the files. Programs that know the first one alone would pass over tuned weights."""

_TUNED = "tuned."
"""Begins the names of tuned weights."""

MOST_CLASSES, MOST_PICTURES = 10_000, 1_000_000
_LONGEST_NOTE = 200
"""Characters of a text that is shown."""


class Saved(NamedTuple):
    """What a folder holds.

    Attributes:
        backbone, weights, digest: the network, torchvision's name of its weights or nothing, and their SHA-256.
        settings: further arguments of `PictureClassifier`.
        classes: the labels.
        names: of the pictures.
        report: as `validation.report_of` gives it.
        origin: of the report: as `metalearn.reporting.provenance.made_with` gives it.
        features: of the pictures, float32 [n, width].
        labels: their places in `classes`, int64 [n].
        tuned: weights in place of the network's own, float32, by name; empty if it was not tuned.
    """

    backbone: str
    weights: str
    digest: str
    settings: dict[str, Any]
    classes: list[Any]
    names: list[str]
    report: dict[str, Any]
    origin: dict[str, str]
    features: Tensor
    labels: Tensor
    tuned: Mapping[str, Tensor]


class Weights(NamedTuple):
    """The weights of a network, by name, and their licence where it is known."""

    state: Mapping[str, Tensor]
    licence: str | None


class Page(NamedTuple):
    """What `report.html` shows beside the report: the command that has made it so, empty if that was no command; and
    pictures, as `classifier_page` takes them."""

    command: str
    shown: Mapping[str, Tensor]


class Place(NamedTuple):
    """Where a classifier was read: its folder, the digest in it, and the file of its weights, if it has one."""

    folder: Path
    digest: str | None
    weights: Path | None


def write(
    folder: Path,
    saved: Saved,
    *,
    replace: bool,
    weights: Weights | None,
    page: Page | None,
    before: str | None = None,
) -> str:
    """Writes the folder: a reader, also after a kill, finds the classifier before or this one. Returns its digest.

    Args:
        replace: the folder may hold a classifier, which this one was made of.
        weights: of the network, if the folder is to have them.
        page: None: the folder has no page and no commands, which name folders of this machine.
        before: the digest of the classifier that was read there, which must still be there.

    Raises:
        ConfigError: there is something else there, it cannot be written, or `read` would refuse it.
    """
    try:
        _check(saved)
    except ValueError as error:
        raise ConfigError(f"path={folder}: cannot be saved, since nothing could load it: {error}") from error
    if not (replace and (folder / DESCRIPTION).is_file()):
        refuse_used("path", folder)
        with creating("path", folder):
            folder.mkdir(parents=True, exist_ok=True)
            return _write(folder, saved, replace=False, weights=weights, page=page)
    with creating("path", folder), held(folder / _LOCK, f"{folder} is being changed"):
        if before is not None and before != read_json(folder / DESCRIPTION).get(DIGEST):
            raise ConfigError(
                f"path={folder}: was changed since it was loaded; load it again, or type the command again"
            )
        return _write(folder, saved, replace=True, weights=weights, page=page)


def _write(folder: Path, saved: Saved, *, replace: bool, weights: Weights | None, page: Page | None) -> str:
    content: dict[str, Any] = {"format": FORMAT_WITH_TUNED if saved.tuned else FORMAT}
    if page is not None:
        content["commands"] = [*(_commands(folder) if replace else ()), *([page.command] if page.command else [])]
    tensors = {"features": saved.features.contiguous(), "labels": saved.labels}
    content |= {field: value for field, value in saved._asdict().items() if field not in (*tensors, "tuned")}
    tensors |= {_TUNED + name: value.contiguous() for name, value in saved.tuned.items()}
    text = None if page is None else _page(folder, saved, page, content["commands"])
    big = [*([] if weights is None else [WEIGHTS]), TENSORS]
    fresh = {file: folder / f".{file}.{os.getpid()}" for file in (*big, DESCRIPTION, REPORT)}
    try:
        content[WEIGHTS_DIGEST] = None
        if weights is not None:
            whole = {name: value.contiguous() for name, value in weights.state.items()}
            save_file(whole, fresh[WEIGHTS], {NAMED: saved.weights, LICENCE: weights.licence or ""})
            content[WEIGHTS_DIGEST] = digest_of(fresh[WEIGHTS])
        save_file(tensors, fresh[TENSORS])
        digest = content[DIGEST] = _digest(content, fresh[TENSORS])
        # On one line: the confusion matrix has a number for each two classes.
        written = json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"
        # ASCII: a file's name that is not UTF-8 would make a file that is not, which nothing reads.
        fresh[DESCRIPTION].write_text(written, encoding="ascii")
        # The new tensors first stand beside the old ones. The new description makes them valid, all at once.
        for name in big:
            fresh[name].replace(_beside(folder, name, digest))
        fresh[DESCRIPTION].replace(folder / DESCRIPTION)
        for name in big:
            _beside(folder, name, digest).replace(folder / name)
        for name in (WEIGHTS, TENSORS):
            for left in folder.glob(f"{name}.*"):  # by a kill
                left.unlink()
        if weights is None:
            (folder / WEIGHTS).unlink(missing_ok=True)
        if text is not None:
            fresh[REPORT].write_text(text, encoding="ascii")
            fresh[REPORT].replace(folder / REPORT)
    finally:
        for path in fresh.values():
            path.unlink(missing_ok=True)
    return digest


def _beside(folder: Path, name: str, digest: str) -> Path:
    """Where a file of the classifier with this digest waits to replace the one of the classifier before."""
    return folder / f"{name}.{digest[:16]}"


def _file(folder: Path, name: str, digest: object) -> Path:
    """The file of the classifier with this digest, which may be of any origin."""
    sound = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
    beside = _beside(folder, name, str(digest))
    return beside if sound and beside.exists() else folder / name


def _page(folder: Path, saved: Saved, page: Page, commands: list[str]) -> str:
    try:
        name = folder.resolve().name
        return classifier_page(name, saved.report, saved.classes, saved.backbone, page.shown, commands)
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # it was loaded from a foreign folder
        advice = "has not what metalearn fit writes"
        raise ConfigError(f"path={folder}: its report {advice} ({error}); fit it anew") from error


def _commands(folder: Path) -> list[str]:
    """The commands that have made the classifier in a folder, which may be of any origin."""
    found = read_json(folder / DESCRIPTION).get("commands")
    return [command for command in found if isinstance(command, str)] if isinstance(found, list) else []


def _digest(described: Mapping[str, Any], tensors: Path) -> str:
    """The SHA-256 of both files, without the field for it."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    with tensors.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read(folder: Path, key: str, *, links: bool = False) -> tuple[Saved, Place]:
    """What a folder holds, and where it was.

    Args:
        links: its files may be links, as those in the cache of a hub are.

    Raises:
        ConfigError: it is damaged, or not one that `write` has written.
    """
    if not is_folder(folder):
        raise ConfigError(f"{key}={folder}: there is no such folder; type one that metalearn fit has made")
    try:
        try:
            return _read(folder, links)
        except Exception:  # another process may just be replacing it
            return _read(folder, links)
    except Exception as error:  # safetensors raises many types
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else _reason(error)
        raise ConfigError(
            f"{key}={folder}: is no classifier that can be used: {reason}; make it anew by metalearn fit"
        ) from error


def _read(folder: Path, links: bool) -> tuple[Saved, Place]:
    _refuse_link(folder / DESCRIPTION, links)
    content = read_object(folder / DESCRIPTION)
    signed = content.pop(DIGEST, None)
    file, weights = (_file(folder, name, signed) for name in (TENSORS, WEIGHTS))
    _refuse_link(file, links)
    _refuse_link(weights, links)
    if signed is not None and signed != _digest(content, file):  # earlier versions wrote none
        raise ValueError("it was changed after it was saved (sha256)")
    # The digest of the backbone is of what the network uses; this one also of their licence and names.
    of_weights = content.get(WEIGHTS_DIGEST, "")  # earlier versions wrote none
    if of_weights and weights.exists() and of_weights != digest_of(weights):
        raise ValueError(f"{WEIGHTS} was changed after it was saved ({WEIGHTS_DIGEST})")
    content.setdefault("origin", {})
    tensors = load_file(file)
    tuned = {name.removeprefix(_TUNED): value for name, value in tensors.items() if name.startswith(_TUNED)}
    if content["format"] not in FORMATS[: 1 + bool(tuned)]:
        raise ValueError(f"format={content['format']!r}: is not known, or not that of its tensors")
    saved = Saved(**{name: (content | tensors | {"tuned": tuned})[name] for name in Saved._fields})
    _check(saved)
    own = weights if of_weights is not None and weights.exists() else None
    return saved, Place(folder.resolve(), signed, own)


def _refuse_link(path: Path, links: bool) -> None:
    """Raises ValueError for a link: a folder from elsewhere must not lead to other files of this machine."""
    if path.is_symlink() and not links:
        raise ValueError(f"{path.name} is a link; copy the file that it leads to")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(error.filename).name}: {error.strerror}"[:_LONGEST_NOTE]
    said = getattr(error, "strerror", None) or first_line(error)
    return str(said)[:_LONGEST_NOTE]


def _check(saved: Saved) -> None:
    """Raises ValueError for values that no classifier has."""
    for name in ("backbone", "weights", "digest"):
        short = isinstance(getattr(saved, name), str) and len(getattr(saved, name)) <= _LONGEST_NOTE
        _wanted(short, name, f"must be text, of {_LONGEST_NOTE} characters at most")
    _wanted(isinstance(saved.settings, dict) and isinstance(saved.report, dict), "settings, report", "must be objects")
    _wanted(saved.settings.keys() == {"head", "folds", "seed"}, "settings", "must have head, folds and seed")
    notes = saved.origin.items() if isinstance(saved.origin, dict) else [("", None)]
    short = all(isinstance(note, str) and len(name + note) <= _LONGEST_NOTE for name, note in notes)
    _wanted(short, "origin", f"must be short texts, of {_LONGEST_NOTE} characters at most")
    one_of("head", saved.settings["head"], (AUTO, *HEADS))
    whole_number("folds", saved.settings["folds"], at_least=2)
    whole_number("seed", saved.settings["seed"], at_least=0)
    classes, count = saved.classes, len(saved.features)
    several = isinstance(classes, list) and 2 <= len(classes) <= MOST_CLASSES
    kinds = {type(label) for label in classes} if several else set()
    _wanted(len(kinds) == 1 and kinds <= {str, int, float, bool}, "classes", "must be 2 texts or more, or numbers")
    _wanted(len(set(classes)) == len(classes), "classes", "must be there once each")
    _wanted(saved.features.dim() == 2 and saved.features.dtype == torch.float32, "features", "must be [n, width]")
    _wanted(1 <= count <= MOST_PICTURES and bool(saved.features.isfinite().all()), "features", "must be finite")
    whole = saved.labels.dtype == torch.int64 and saved.labels.shape == (count,)
    every = whole and saved.labels.unique().tolist() == [*range(len(classes))]
    _wanted(every, "labels", "must be of the classes, each with one")
    sound = all(value.dtype == torch.float32 and bool(value.isfinite().all()) for value in saved.tuned.values())
    _wanted(sound, "tuned", "must be finite float32")
    named = isinstance(saved.names, list) and len(saved.names) == count
    _wanted(named and all(isinstance(name, str) for name in saved.names), "names", "must be one for each picture")
    one_of("head", saved.report["head"], tuple(HEADS))
    if saved.report["accuracy"] is not None:
        fractions = [saved.report["accuracy"], *saved.report["interval95"]]
        between = len(fractions) == 3 and all(_is_number(value) and 0 <= value <= 1 for value in fractions)
        _wanted(between, "accuracy, interval95", "must be three fractions of 1")
        for name in ("pictures", "classes"):
            whole_number(name, saved.report[name], at_least=1)
    if "tuning" in saved.report or saved.tuned:
        tuning = saved.report["tuning"]
        whole_number("steps", tuning["steps"], at_least=0)
        shown = [tuning[name] for name in ("frozen", "tuned") if tuning["steps"]]
        _wanted(all(_is_number(value) and 0 <= value <= 1 for value in shown), "tuning", "must be fractions of 1")
        true_or_false("kept", tuning["kept"])
    sharpness, threshold = saved.report["sharpness"], saved.report["threshold"]
    _wanted(_is_number(sharpness) and 0 < sharpness <= SHARPEST, "sharpness", f"must be above 0, at most {SHARPEST:g}")
    _wanted(threshold is None or _is_number(threshold), "threshold", "must be a number, or null")


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _wanted(fulfilled: bool, name: str, what: str) -> None:
    if not fulfilled:
        raise ValueError(f"{name} {what}")
