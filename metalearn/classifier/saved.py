"""The folder of a classifier: `classifier.json`, the features of its pictures in `classifier.safetensors`, and the page
`report.html`.

A folder may be of any origin: what is read is bounded and checked, and nothing in it is run.
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from metalearn.checks import one_of, whole_number
from metalearn.classifier.heads import AUTO, HEADS
from metalearn.classifier.page import REPORT, classifier_page
from metalearn.classifier.validation import SHARPEST
from metalearn.errors import ConfigError
from metalearn.storage.files import check_header, creating, read_json, read_object, refuse_used

DESCRIPTION, TENSORS = "classifier.json", "classifier.safetensors"

FORMAT = 1
"""Version of the files."""

MOST_CLASSES, MOST_PICTURES = 10_000, 1_000_000


class Saved(NamedTuple):
    """What a folder holds.

    Attributes:
        backbone, weights, digest: the network, its weights as they were typed, and their SHA-256.
        settings: further arguments of `PictureClassifier`.
        classes: the labels.
        names: of the pictures.
        report: as `validation.report_of` gives it.
        features: of the pictures, float32 [n, width].
        labels: their places in `classes`, int64 [n].
    """

    backbone: str
    weights: str
    digest: str
    settings: dict[str, Any]
    classes: list[Any]
    names: list[str]
    report: dict[str, Any]
    features: Tensor
    labels: Tensor


def write(folder: Path, saved: Saved, *, replace: bool, command: str = "", shown: Mapping[str, Tensor]) -> None:
    """Writes the folder; each file appears whole or not at all.

    Args:
        replace: the folder may hold a classifier, which this one was made of.
        command: what has made it so; empty if that was no command.
        shown: pictures for its page, as `classifier_page` takes them.

    Raises:
        ConfigError: there is something else there, or it cannot be written.
    """
    if not (replace and (folder / DESCRIPTION).is_file()):
        refuse_used("path", folder)
    commands = [*(_commands(folder) if replace else ()), *([command] if command else [])]
    name = folder.resolve().name
    described = {
        "format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "metalearn-train")},
        "commands": commands,
    } | {field: value for field, value in saved._asdict().items() if not isinstance(value, Tensor)}  # fmt: skip
    text = json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        shown_page = classifier_page(name, saved.report, saved.classes, saved.backbone, shown, commands)
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # it was loaded from a foreign folder
        raise ConfigError(
            f"path={folder}: its report has not what metalearn fit writes ({error}); fit it anew"
        ) from error
    with creating("path", folder):
        folder.mkdir(parents=True, exist_ok=True)
        fresh = {file: folder / f".{file}.{os.getpid()}" for file in (TENSORS, DESCRIPTION, REPORT)}
        try:
            save_file({"features": saved.features.contiguous(), "labels": saved.labels}, fresh[TENSORS])
            fresh[DESCRIPTION].write_text(text, encoding="utf-8", errors="surrogateescape")
            fresh[REPORT].write_text(shown_page, encoding="ascii")
            for file, path in fresh.items():
                path.replace(folder / file)
        finally:
            for path in fresh.values():
                path.unlink(missing_ok=True)


def _commands(folder: Path) -> list[str]:
    """The commands that have made the classifier in a folder, which may be of any origin."""
    found = read_json(folder / DESCRIPTION).get("commands")
    return [command for command in found if isinstance(command, str)] if isinstance(found, list) else []


def read(folder: Path, key: str) -> Saved:
    """What a folder holds.

    Raises:
        ConfigError: it is damaged, or not one that `write` has written.
    """
    try:
        content = read_object(folder / DESCRIPTION)
        check_header(folder / TENSORS)
        tensors = load_file(folder / TENSORS)
        if content["format"] != FORMAT:
            raise ValueError(f"format={content['format']!r}: only {FORMAT} is known")
        saved = Saved(**{name: (tensors | content)[name] for name in Saved._fields})
        _check(saved)
    except Exception as error:  # safetensors raises many types
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else _reason(error)
        raise ConfigError(
            f"{key}={folder}: is no classifier that can be used: {reason}; make it anew by metalearn fit"
        ) from error
    return saved


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)


def _check(saved: Saved) -> None:
    """Raises ValueError for values that no classifier has."""
    for name in ("backbone", "weights", "digest"):
        _wanted(isinstance(getattr(saved, name), str), name, "must be text")
    _wanted(isinstance(saved.settings, dict) and isinstance(saved.report, dict), "settings, report", "must be objects")
    _wanted(saved.settings.keys() == {"head", "folds", "seed"}, "settings", "must have head, folds and seed")
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
    named = isinstance(saved.names, list) and len(saved.names) == count
    _wanted(named and all(isinstance(name, str) for name in saved.names), "names", "must be one for each picture")
    one_of("head", saved.report["head"], tuple(HEADS))
    sharpness, threshold = saved.report["sharpness"], saved.report["threshold"]
    _wanted(_is_number(sharpness) and 0 < sharpness <= SHARPEST, "sharpness", f"must be above 0, at most {SHARPEST:g}")
    _wanted(threshold is None or _is_number(threshold), "threshold", "must be a number, or null")


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _wanted(fulfilled: bool, name: str, what: str) -> None:
    if not fulfilled:
        raise ValueError(f"{name} {what}")
