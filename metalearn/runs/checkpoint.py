"""Checkpoints: folders that are written whole or not at all, and verified when they are read.

`checkpoints/step_000200/` holds `params.safetensors` (the meta-parameters), `state.pt` (optimiser and
counters), `meta.json` (step, config, versions, metrics) and `manifest.json` (SHA-256 of the others).
`best` and `last` are relative links.
"""

import hashlib
import io
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from metalearn.checks import whole_number
from metalearn.errors import ConfigError, RunError
from metalearn.files import open_regular, read_object
from metalearn.runs.state import load_state
from metalearn.types import Params

log = logging.getLogger(__name__)

LARGEST_FILE = 2**36
"""Bytes of a file of a checkpoint."""

_FILES = ("params.safetensors", "state.pt", "meta.json")


class Snapshot(NamedTuple):
    """All that a run needs to continue: parameters, the optimiser's state and counters, step and config (`meta`)."""

    params: Params
    state: dict[str, Any]
    meta: dict[str, Any]


class Checkpointer(NamedTuple):
    """The checkpoints of one run.

    `due(step)`: whether the schedule wants a checkpoint. `save(snapshot, best)` writes one, points `last` (and, if
    `best`, `best` too) to it, and removes old ones. `best()` reads the best one; None if none can be read.
    """

    due: Callable[[int], bool]
    save: Callable[[Snapshot, bool], None]
    best: Callable[[], Snapshot | None]


NO_CHECKPOINTS = Checkpointer(lambda step: False, lambda snapshot, best: None, lambda: None)
"""For ranks that take the same steps while rank zero writes."""


def checkpointing(*, every: int, keep: int) -> Callable[[Path], Checkpointer]:
    """Returns a function from the run folder to its `Checkpointer`.

    Args:
        every: steps between checkpoints.
        keep: number of latest checkpoints to keep; those of `best` and `last` always stay.

    Raises:
        ValueError: a number below 1.
    """
    whole_number("every", every, at_least=1)
    whole_number("keep", keep, at_least=1)

    def checkpointer(run_dir: Path) -> Checkpointer:
        folder = run_dir / "checkpoints"

        def save(snapshot: Snapshot, best: bool) -> None:
            path = write(folder, snapshot)
            for name in ("last", "best") if best else ("last",):
                _point(folder / name, path.name)
            _prune(folder, keep)

        def best() -> Snapshot | None:
            try:
                return read(folder / "best") if (folder / "best").exists() else None
            except RunError as error:
                log.warning("%s; the next validation counts as the best", error)
                return None

        return Checkpointer(lambda step: step % every == 0, save, best)

    return checkpointer


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Saves as `folder`/step_NNNNNN: writes a temporary folder, syncs it to disk, renames it."""
    final = folder / f"step_{snapshot.meta['step']:06d}"
    temporary = folder / f".{final.name}.tmp"
    _remove(temporary)
    temporary.mkdir(parents=True)
    plain = {name: value.detach().cpu().contiguous() for name, value in snapshot.params.items()}
    save_file(plain, temporary / "params.safetensors")
    torch.save(snapshot.state, temporary / "state.pt")
    versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
    (temporary / "meta.json").write_text(json.dumps(snapshot.meta | {"versions": versions}, indent=2))
    manifest = {name: _sha256(temporary / name) for name in _FILES}
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2))
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    _remove(final)
    temporary.rename(final)
    _sync(folder)
    return final


def read(path: Path) -> Snapshot:
    """The checkpoint in the folder `path`, verified against its manifest.

    Raises:
        RunError: it is not complete, or a file has changed since it was written.
    """
    try:
        manifest = read_object(path / "manifest.json")
        for name in _FILES:
            if manifest.get(name) != _sha256(path / name):
                raise RunError(f"{path / name}: differs from what was saved (SHA-256 in manifest.json)")
        # Copies: the loaded tensors are views of one mapped file with any alignment; kernels may round by alignment.
        params = {name: value.clone() for name, value in load_file(path / "params.safetensors").items()}
        return Snapshot(params, load_state(path / "state.pt"), _meta(path / "meta.json"))
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{path}: is not a complete checkpoint ({error})") from error


def _meta(path: Path) -> dict[str, Any]:
    meta = read_object(path)
    whole_number(f"{path}: step", meta.get("step"), at_least=0)
    if not isinstance(meta.get("config"), dict):
        raise ValueError(f"{path}: holds no config")
    return meta


def to_bytes(snapshot: Snapshot) -> bytes:
    """A snapshot for another process."""
    buffer = io.BytesIO()
    torch.save(tuple(snapshot), buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Snapshot:
    """The snapshot that `to_bytes` has packed."""
    return Snapshot(*torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def read_named(key: str, path: Path) -> Snapshot:
    """The checkpoint that the config's `key` names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return read(path)
    except RunError as error:
        raise ConfigError(f"{key}={path}: {error}; type {key}=…/checkpoints/best, or another checkpoint") from error


def latest(run_dir: Path) -> Snapshot | None:
    """The newest readable checkpoint of a run, or None if it has no checkpoint yet. Damaged ones are skipped with a
    warning.

    Raises:
        ConfigError: there are checkpoints, but none can be read.
    """
    paths = _steps(run_dir / "checkpoints")
    for path in reversed(paths):
        try:
            return read(path)
        except RunError as error:
            log.warning("%s; trying an earlier one", error)
    if paths:
        raise ConfigError(f"{run_dir}: none of its checkpoints can be read; type run=NAME to start in another folder")
    return None


def rewind(run_dir: Path, step: int) -> None:
    """Removes the result and the checkpoints after `step`, the latest first, so that the run continues from there."""
    folder = run_dir / "checkpoints"
    (run_dir / "result.json").unlink(missing_ok=True)
    for path in reversed(_steps(folder)):
        if _number(path) > step:
            shutil.rmtree(path)
    _point(folder / "last", f"step_{step:06d}")


def start_params(path: Path, params: Params) -> Params:
    """The parameters of the checkpoint at `path`, in the dtypes of `params`.

    Raises:
        ConfigError: it cannot be read, or its parameters have other names or shapes than `params`.
    """
    return fitted("init_from", path, read_named("init_from", path).params, params)


def fitted(key: str, path: Path, loaded: Params, params: Params) -> Params:
    """The parameters `loaded` from the checkpoint at `path`, in the dtypes of `params`; the config's `key` names it.

    Raises:
        ConfigError: they have other names or shapes than `params`.
    """
    ours, theirs = _shapes(params), _shapes(loaded)
    if ours != theirs:
        differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        parts = ", ".join(f"{n} (here {ours.get(n, 'absent')}, there {theirs.get(n, 'absent')})" for n in differ[:3])
        parts += f", and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{key}={path}: holds parameters of another model: {parts}")
    return {name: loaded[name].to(value.dtype) for name, value in params.items()}


def _shapes(params: Params) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in params.items()}


def _steps(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step_*") if path.is_dir()), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _prune(folder: Path, keep: int) -> None:
    linked = {(folder / name).resolve() for name in ("best", "last")}
    for path in _steps(folder)[:-keep]:
        if path.resolve() not in linked:
            shutil.rmtree(path)


def _point(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with open_regular(path, LARGEST_FILE) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
