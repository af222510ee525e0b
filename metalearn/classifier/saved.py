"""The folder of a classifier: `classifier.json`, the features of its pictures in `classifier.safetensors`, and the
weights of its network in `backbone.safetensors`, unless a package brings them. It holds no path of the machine.

A folder may be of any origin: what is read is bounded and checked, and nothing in it is run.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from metalearn.checks import one_of, whole_number
from metalearn.classifier.heads import AUTO, HEADS
from metalearn.classifier.validation import SHARPEST
from metalearn.errors import ConfigError
from metalearn.models.common.weights import LICENCE, NAMED
from metalearn.storage.files import check_header, creating, read_object, refuse_used

DESCRIPTION, TENSORS, WEIGHTS = FILES = "classifier.json", "classifier.safetensors", "backbone.safetensors"

FORMAT = 1
"""Version of the files."""

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
        origin: as `origin` gives it; the folders of earlier versions have none.
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
    origin: dict[str, str]
    features: Tensor
    labels: Tensor


class Weights(NamedTuple):
    """The weights of a network, by name, and their licence where it is known."""

    state: Mapping[str, Tensor]
    licence: str | None


def origin() -> dict[str, str]:
    """When, with which versions and on which hardware this process learns: texts for readers."""
    versions = [f"{name} {version(name)}" for name in ("torch", "torchvision", "numpy")]
    with contextlib.suppress(PackageNotFoundError):  # the program runs from its folder
        versions.insert(0, f"metalearn {version('metalearn-train')}")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "hardware": f"{model[: _LONGEST_NOTE // 2]}, {os.cpu_count()} cores",
    }
    root = Path(__file__).parents[2]
    if (root / ".git").exists() and (root / "train.py").exists():  # not the repository that an environment lies in
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or a repository of somebody else
            said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            found["commit"] = said.stdout.strip()
    return found


def write(folder: Path, saved: Saved, *, replace: bool, weights: Weights | None) -> None:
    """Writes the folder; each file appears whole or not at all.

    Args:
        replace: a classifier that is there may be replaced.
        weights: of the network, if the folder is to have them.

    Raises:
        ConfigError: there is something else there, or it cannot be written.
    """
    if not (replace and (folder / DESCRIPTION).is_file()):
        refuse_used("path", folder)
    described = {"format": FORMAT} | {
        name: value for name, value in saved._asdict().items() if not isinstance(value, Tensor)
    }
    with creating("path", folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = (TENSORS, DESCRIPTION) if weights is None else (WEIGHTS, TENSORS, DESCRIPTION)
        fresh = {name: folder / f".{name}.{os.getpid()}" for name in names}
        try:
            if weights is not None:
                whole = {name: value.contiguous() for name, value in weights.state.items()}
                save_file(whole, fresh[WEIGHTS], {NAMED: saved.weights, LICENCE: weights.licence or ""})
            save_file({"features": saved.features.contiguous(), "labels": saved.labels}, fresh[TENSORS])
            described["sha256"] = _digest(described, fresh[TENSORS])
            text = json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            fresh[DESCRIPTION].write_text(text, encoding="utf-8", errors="surrogateescape")
            for name, path in fresh.items():
                path.replace(folder / name)
        finally:
            for path in fresh.values():
                path.unlink(missing_ok=True)


def _digest(described: Mapping[str, Any], tensors: Path) -> str:
    """The SHA-256 of both files, without the field for it."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    with tensors.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def read(folder: Path, key: str, *, links: bool = False) -> Saved:
    """What a folder holds.

    Args:
        links: its files may be links, as those in the cache of a hub are.

    Raises:
        ConfigError: it is damaged, or not one that `write` has written.
    """
    try:
        for name in FILES:
            # A folder from elsewhere must not lead to other files of this machine.
            if (folder / name).is_symlink() and not links:
                raise ValueError(f"{name} is a link; copy the file that it leads to")
        content = read_object(folder / DESCRIPTION)
        check_header(folder / TENSORS)
        signed = content.pop("sha256", None)
        if signed is not None and signed != _digest(content, folder / TENSORS):  # earlier versions wrote none
            raise ValueError("it was changed after it was saved (sha256)")
        content.setdefault("origin", {})
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
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
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
    named = isinstance(saved.names, list) and len(saved.names) == count
    _wanted(named and all(isinstance(name, str) for name in saved.names), "names", "must be one for each picture")
    one_of("head", saved.report["head"], tuple(HEADS))
    if saved.report["accuracy"] is not None:
        fractions = [saved.report["accuracy"], *saved.report["interval95"]]
        between = len(fractions) == 3 and all(_is_number(value) and 0 <= value <= 1 for value in fractions)
        _wanted(between, "accuracy, interval95", "must be three fractions of 1")
        for name in ("pictures", "classes"):
            whole_number(name, saved.report[name], at_least=1)
    sharpness, threshold = saved.report["sharpness"], saved.report["threshold"]
    _wanted(_is_number(sharpness) and 0 < sharpness <= SHARPEST, "sharpness", f"must be above 0, at most {SHARPEST:g}")
    _wanted(threshold is None or _is_number(threshold), "threshold", "must be a number, or null")


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _wanted(fulfilled: bool, name: str, what: str) -> None:
    if not fulfilled:
        raise ValueError(f"{name} {what}")
