"""Checkpoints: folders that are written whole or not at all, and verified when they are read.

`checkpoints/step_000200/` is a saved form (`metalearn.saved.form`): `params.safetensors` has the meta-parameters and
`meta.json` step, config, versions and metrics. `state.pt` beside them has the optimiser's state and the counters.
`best` and `last` are relative links. They follow the checkpoints: a run that goes on sets them by its own progress.
`best_2`, `best_3` … are those to the next best, if the run keeps them.
"""

import errno
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

from metalearn.config.check import job_id, restarted
from metalearn.config.saved import DATA, OWN, check_saved
from metalearn.config.values import leaves
from metalearn.errors import ConfigError, DiskError, RunError, first_line, whole_number
from metalearn.runs.metrics import better, deciding
from metalearn.saved import form
from metalearn.saved.form import (
    MANIFEST,
    META,
    TENSORS,
    Kind,
    NotSavedError,
    SavedFolder,
    Unread,
    check_fields,
    kind_of,
    sync,
)
from metalearn.storage.files import (
    STANDS,
    read_json,
    read_object,
    room_at,
    unwritten,
    warn_once,
    write_atomically,
    writing,
)
from metalearn.types import FIXED, Params

log = logging.getLogger(__name__)

CHECKPOINT = Kind("checkpoint", 1, {"step": int, "config": dict, "versions": dict})
STATE = "state.pt"

ORIGIN = "origin"
"""The key of the checkpoint of another run, by `origin_of`, from which `resume` has begun a run, in its checkpoints."""

_WENT_BACK = ".went_back"
"""The file in which `rewind` notes its job. A restart of that job must not go back a second time."""

_STEP = re.compile(r"step_[0-9]+")  # the name of a checkpoint's folder. Other folders beside it are the user's own.
_NO_LINKS = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)  # what file systems without symbolic links answer
_NEXT_BEST = re.compile(r"best_[0-9]+")  # the name of a link to the second best checkpoint, the third best, and so on


class Snapshot(NamedTuple):
    """All that a run needs to continue: parameters, the optimiser's state and counters, step and config (`meta`)."""

    params: Params
    state: dict[str, Any]
    meta: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run. This one keeps none: it is for ranks that take the same steps as rank zero, which
    alone writes. `due(step, validated)`: whether a checkpoint is wanted, whatever its validation says; ranks that share
    their steps read figures at the same ones."""

    def __init__(self, due: Callable[[int, bool], bool] = lambda step, validated: False) -> None:
        self.due = due

    def save(self, snapshot: Snapshot, best: bool) -> None:
        """Writes one, points `last` (and, if `best`, `best` too) to it, and removes old ones. Its validation, if it has
        one that counts, is `meta["validation"]`. Raises RunError if it cannot be written."""

    def best(self) -> Snapshot | None:
        """The best one; None if none can be read."""
        return None

    def settle(self, step: int, best: int | None) -> bool:
        """Completes what an interrupted save has left, for a run that goes on after `step` and whose best step is
        `best`: the links follow these two. Returns whether the best one can be read."""
        return False


class _InFolder(Checkpointer):
    """Checkpoints in the run folder."""

    def __init__(self, run_dir: Path, every: int, keep: int, keep_best: int) -> None:
        # Whether a validation is among the best is known only later, so each one is saved.
        super().__init__(lambda step, validated: step % every == 0 or (validated and keep_best > 1))
        self._folder, self._keep, self._keep_best = run_dir / "checkpoints", keep, keep_best

    def save(self, snapshot: Snapshot, best: bool) -> None:
        folder, step = self._folder, snapshot.meta["step"]
        path = write(folder, snapshot)
        with writing(folder):
            for name in ("last", "best") if best else ("last",):
                _point(folder / name, path.name)
            _point_to_next_best(folder, self._keep_best, step)
            # Last, so that what the links name stays. Checkpoints of later steps are damaged, or the run would have
            # gone on from them; they must not push out good ones.
            linked = {link.resolve() for link in (folder / "best", folder / "last", *_next_best(folder))}
            for old in [path for number, path in _steps(folder).items() if number <= step][: -self._keep]:
                if old.resolve() not in linked:
                    _remove(old)

    def best(self) -> Snapshot | None:
        path = self._folder / "best"
        try:
            return read(path) if path.exists() else None
        except RunError as error:
            log.warning("%s; the next validation counts as the best", error)
            return None

    def settle(self, step: int, best: int | None) -> bool:
        folder = self._folder
        with writing(folder):
            for path in _replaced(folder):  # put back, if its replacement did not come
                final = folder / path.name[1:-4]
                _remove(path) if final.exists() else path.rename(final)
            for path in folder.glob(".step_*.tmp"):
                _remove(path)
            # A kill between a save and its links leaves `best` at an older step, which the test would take.
            for name, number in (("last", step), ("best", best)):
                if number is not None and (folder / _name(number)).is_dir():
                    _point(folder / name, _name(number))
                else:
                    _remove(folder / name)
            _point_to_next_best(folder, self._keep_best, step)
        # Its folder may be there, and its files damaged.
        return self.best() is not None


def checkpointing(*, every: int, keep: int, keep_best: int = 1) -> Callable[[Path], Checkpointer]:
    """Returns a function from the run folder to its `Checkpointer`. conf/config.yaml explains the keys; checkpoints of
    `best` and `last` always stay. Raises ValueError for a number below 1."""
    for name, value in (("every", every), ("keep", keep), ("keep_best", keep_best)):
        whole_number(name, value, at_least=1)
    return lambda run_dir: _InFolder(run_dir, every, keep, keep_best)


def write(folder: Path, snapshot: Snapshot) -> Path:
    """Saves as `folder`/step_NNNNNN: writes a temporary folder, syncs it to disk, renames it. Raises RunError if it
    cannot be written. What was saved before is still there."""
    final = folder / _name(snapshot.meta["step"])
    temporary, replaced = folder / f".{final.name}.tmp", folder / f".{final.name}.old"
    if not folder.parent.is_dir():
        raise DiskError(
            f"{folder.parent}: is not there any more ({room_at(folder.parent)}); move it back, and the same command "
            "resumes the run"
        )
    try:
        folder.mkdir(exist_ok=True)
        _remove(temporary)
        temporary.mkdir()
        with (temporary / STATE).open("wb") as file:  # by Python's file, whose error says what is wrong with the disk
            torch.save(snapshot.state, file)
        versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
        form.fill(temporary, CHECKPOINT, snapshot.params, snapshot.meta | {"versions": versions})
        # The old checkpoint goes last: after a kill at any line, one of the two is there and whole.
        if final.exists() or final.is_symlink():
            _remove(replaced)
            final.rename(replaced)
        temporary.rename(final)
        sync(folder)
        _remove(replaced)
    except (OSError, SafetensorError, RuntimeError) as error:
        with suppress(OSError):
            _remove(temporary)  # gives back the space
        # torch wraps the error of the disk, and safetensors has its number in the text.
        cause = error if isinstance(error, OSError) else error.__context__
        number = re.search(r"\(os error ([0-9]+)\)", str(error))
        if number is not None:
            cause = OSError(int(number[1]), os.strerror(int(number[1])))
        if isinstance(cause, OSError):
            raise unwritten(final, OSError(cause.errno, cause.strerror), "saved") from error
        raise RunError(f"{final}: cannot be saved: {str(error).splitlines()[0]}; {STANDS}") from error
    return final


def read(path: Path, *, later: bool = False) -> Snapshot:
    """The checkpoint in the folder `path`, verified against its manifest; its parameters `later`, see `form.load`.
    Raises RunError if it is not complete, or a file has changed since it was written."""
    try:
        saved = form.load(path, CHECKPOINT, later=later)
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except NotSavedError as error:
        raise RunError(str(error)) from error
    except Exception as error:  # torch raises many types for what it cannot read
        raise RunError(f"{path / STATE}: holds no state of a run ({first_line(error)})") from error
    return Snapshot(saved.tensors, state, saved.meta)


def read_named(key: str, path: Path) -> Snapshot:
    """The checkpoint or the learner that the config's `key` names; a learner has no state. The file of the parameters
    is read for the first of them, and their shapes are known before. Raises ConfigError if it cannot be read."""
    with _naming(key, path):
        if kind_of(path) != LEARNER.name:
            snapshot = read(path, later=True)
        else:
            learner = read_learner(path, later=True)
            snapshot = Snapshot(learner.tensors, {}, learner.meta)
    unread: Any = snapshot.params

    def tensors() -> Params:
        with _naming(key, path):
            return unread.read()  # type: ignore[no-any-return]

    return snapshot._replace(params=cast(Params, Unread(unread.shapes, tensors)))


@contextmanager
def _naming(key: str, path: Path) -> Iterator[None]:
    """Errors within are those of the config's `key`."""
    try:
        yield
    except NotSavedError as error:
        raise ConfigError(f"{key}={path}: {error}; save or publish it again, or take another") from error
    except RunError as error:
        raise ConfigError(f"{key}={path}: {error}; type {key}=…/checkpoints/best, or another checkpoint") from error


def latest(run_dir: Path, check: Callable[[Snapshot], object] = lambda snapshot: None) -> Snapshot | None:
    """The newest usable checkpoint of a run, or None if it has no checkpoint yet. Damaged ones, and those for which
    `check` raises RunError, are skipped with a warning. Raises ConfigError if there are some, but none can be used."""
    paths = _steps(run_dir / "checkpoints").values()
    for path in reversed(paths):
        try:
            snapshot = read(path)
            check(snapshot)
            return snapshot
        except RunError as error:
            log.warning("%s; trying an earlier one", error)
    if paths:
        raise ConfigError(f"{run_dir}: none of its checkpoints can be read; type run=NAME to start in another folder")
    return None


def origin_of(path: Path) -> str | None:
    """What names the checkpoint in the folder `path`, wherever it lies: its step and the digest of its parameters; None
    if they cannot be read."""
    try:
        return f"step {read_object(path / META)['step']} of {read_object(path / MANIFEST)[TENSORS]}"
    except (OSError, ValueError, KeyError):
        return None


def has_checkpoints(run_dir: Path) -> bool:
    """Whether a run has saved already; what it has saved may be damaged."""
    return bool(_steps(run_dir / "checkpoints"))


def rewind(run_dir: Path, step: int) -> None:
    """Removes the result and the checkpoints after `step`, the latest first, so that the run continues from there.
    Raises RunError if a file cannot be removed."""
    folder = run_dir / "checkpoints"
    with writing(run_dir):
        (run_dir / "result.json").unlink(missing_ok=True)
        for number, path in reversed(_steps(folder).items()):  # interrupted, it leaves a run of fewer steps
            if number > step:
                _remove(path)
        _point(folder / "last", _name(step))
        if job_id():
            write_atomically(folder / _WENT_BACK, job_id())


def has_gone_back(run_dir: Path) -> bool:
    """Whether this process is a restart of a job that has called `rewind` before; see `restarted`."""
    marker = run_dir / "checkpoints" / _WENT_BACK
    try:
        return restarted() and marker.read_bytes() == job_id().encode()
    except (OSError, ValueError):
        return False


def start_params(path: Path, loaded: Params, params: Params, *, strict: bool) -> tuple[Params, list[str]]:
    """The parameters `loaded` from `path` where name and shape fit, in the dtypes of `params`; the others are those of
    `params`. Also returns a line for each one that does not fit. Raises ConfigError if nothing fits; or, with `strict`,
    one parameter does not fit."""

    def name_here(name: str) -> str:
        """What learned there may be fixed here, and the reverse."""
        bare = name.removeprefix(FIXED)
        return next((one for one in (name, bare, f"{FIXED}{bare}") if one in params), name)

    names = {name_here(name): name for name in loaded}
    ours, shapes = _shapes(params), _shapes(loaded)
    theirs = {here: shapes[name] for here, name in names.items()}
    if strict:
        advice = "; type the model of that run, or init_strict=false to take what fits"
        _check_shapes("init_from", path, theirs, ours, advice)
    fits = {name for name in ours if theirs.get(name) == ours[name]}
    if not fits:
        raise ConfigError(
            f"init_from={path}: holds parameters of another model: none of its {len(theirs)} fits; type the algorithm "
            "and the model of that run, or leave init_from out"
        )
    notes = [
        f"init_from: {name} {list(ours[name])} keeps its first value: the checkpoint has "
        + (f"the shape {list(theirs[name])}" if name in theirs else "none")
        for name in sorted(ours.keys() - fits)
    ]
    notes += [
        f"init_from: {name} {list(theirs[name])} is left: there is none here"
        for name in sorted(theirs.keys() - ours.keys())
    ]
    return {n: loaded[names[n]].to(value.dtype) if n in fits else value for n, value in params.items()}, notes


def fitted(key: str, path: Path, loaded: Params, params: Params, advice: str = "") -> Params:
    """The parameters `loaded` from the checkpoint at `path`, in the dtypes of `params`; the config's `key` names it.
    Raises ConfigError if they have other names or shapes than `params`. The message ends with `advice`."""
    _check_shapes(key, path, _shapes(loaded), _shapes(params), advice)
    return {name: loaded[name].to(value.dtype) for name, value in params.items()}


_Shapes = Mapping[str, tuple[int, ...]]


def _check_shapes(key: str, path: Path, theirs: _Shapes, ours: _Shapes, advice: str) -> None:
    if ours != theirs:
        differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        parts = ", ".join(f"{n} (here {ours.get(n, 'absent')}, there {theirs.get(n, 'absent')})" for n in differ[:3])
        parts += f", and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ConfigError(f"{key}={path}: holds parameters of another model: {parts}{advice}")


def _shapes(params: Params) -> _Shapes:
    held: Any = params
    return held.shapes if isinstance(held, Unread) else {name: tuple(value.shape) for name, value in params.items()}


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _steps(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by their steps in order. A kill between the two renames of `write` leaves of a step
    only the old one, under its other name."""
    paths = [*_replaced(folder), *folder.glob("step_*")]  # the latter count if both are there
    named = {path.name.strip(".").removesuffix(".old"): path for path in paths if path.is_dir()}
    return dict(sorted((int(name[5:]), path) for name, path in named.items() if _STEP.fullmatch(name)))


def _replaced(folder: Path) -> list[Path]:
    return [path for path in folder.glob(".step_*.old") if _STEP.fullmatch(path.name[1:-4])]


def _point_to_next_best(folder: Path, count: int, step: int) -> None:
    """Sets the links `best_2` to `best_count` by the validations of the checkpoints up to `step`; removes others."""
    best = (folder / "best").resolve()
    ranked: list[tuple[dict[str, Any], Path]] = []  # the best first; of equal ones, the earlier step first
    for path in [path for number, path in _steps(folder).items() if number <= step] if count > 1 else ():
        value = read_json(path / META).get("validation")  # none in a damaged one
        if value is not None:
            metric = deciding(value)
            behind = (n for n, (other, _) in enumerate(ranked) if better(metric, value[metric], other.get(metric)))
            ranked.insert(next(behind, len(ranked)), (value, path))
    others = [path for _, path in ranked if path.resolve() != best][: count - 1]
    for link in _next_best(folder):
        link.unlink()
    for place, path in enumerate(others, start=2):
        _point(folder / f"best_{place}", path.name)


def _next_best(folder: Path) -> list[Path]:
    """The links to the next best checkpoints. Other names like these are the user's own."""
    return [link for link in folder.glob("best_*") if _NEXT_BEST.fullmatch(link.name) and link.is_symlink()]


def _point(link: Path, target: str) -> None:
    """Makes a link to a checkpoint; a copy, where the file system has no links: exFAT, SMB and many a mounted cloud."""
    temporary = link.with_name(f".{link.name}.tmp")  # renamed, so that a reader always finds a link
    _remove(temporary)
    try:
        temporary.symlink_to(target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if link.name not in ("best", "last"):
            raise RunError(
                f"{link}: this file system has no symbolic links, which checkpoint.keep_best needs; type "
                "checkpoint.keep_best=1, or another launch.outputs"
            ) from error
        warn_once(f"{link.parent}: this file system has no symbolic links, so best and last are copies")
        shutil.copytree(link.with_name(target), temporary)
    if not link.is_symlink():  # a copy of the folder may have a checkpoint in its place
        _remove(link)
    temporary.replace(link)


def _remove(path: Path) -> None:
    """Removes a folder with its content, or, where a link stands in its place, the link alone."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


GROUPS = ("algorithm", "inner", "loss", "model", "dataset", "trainer")  # groups of the config that are published
LEARNER = Kind("learner", 1, {
    "config": dict.fromkeys(GROUPS, dict) | {"precision": str}, "preprocessing": dict | None, "step": int,
})  # fmt: skip

OBJECT_FIELDS: dict[str, dict[str, Any]] = {
    "model": {OWN: str, "shape": [int], "transductive": bool, "dropout": bool},
    "dataset": {OWN: str, "shape": [int], "classes": dict},
}
"""The fields of a group that was an object of the program."""

WEIGHTS = "weights.safetensors"
"""The pretrained weights, where they came from a file. Networks need it even if their parameters are all saved: it says
how pictures are shown to them."""

_LOCAL_KEYS = ("root", "download", "seed", "eval_seed")  # keys of a dataset that are not published


def fill_learner(
    folder: Path, params: Mapping[str, Tensor], config: Mapping[str, Any], facts: Mapping[str, Any], *,
    weights: bytes | None = None, without: Collection[str] = (),
) -> None:  # fmt: skip
    """Writes a learner into an empty folder. Raises ConfigError if the config holds a path of this machine, or has no
    such key.

    Args:
        facts: what else meta.json says: its `preprocessing`, the `step`, and fields for its readers.
        weights: a safetensors file in place of the path of the network's pretrained weights.
        without: keys of the config whose paths are left out.
    """
    parts: dict[str, Any] = {group: deepcopy(dict(config[group])) for group in GROUPS}
    dataset = parts["dataset"]
    local = [name for name in _LOCAL_KEYS if name in dataset]
    dataset |= dict.fromkeys([*local, *(["split"] if is_path(dataset.get("split")) else [])])  # a folder of lists
    if weights is not None:
        parts["model"]["weights"] = WEIGHTS
    for key in without:
        *groups, name = key.split(".")
        node: Any = parts
        for group in groups:
            node = node.get(group) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node or isinstance(node[name], dict):
            paths = ", ".join(key for key, value in leaves(parts) if is_path(value)) or "none: leave it out"
            raise ConfigError(f"without={key}: is no key of the config that has a path; these have: {paths}")
        node[name] = None
    for key, value in leaves(parts):
        if is_path(value):
            raise ConfigError(
                f"{key}={value}: is a path of this machine, and a published model holds none; if the network needs no "
                f"file there once it has its parameters, type metalearn export … --without {key}, which tries that"
            )
    if weights is not None:
        (folder / WEIGHTS).write_bytes(weights)
    published = parts | {"precision": config.get("precision", "float32")}
    form.fill(folder, LEARNER, params, {"config": published} | dict(facts))


def read_learner(folder: Path, *, later: bool = False) -> SavedFolder:
    """The learner in a folder. The data of its config are those of this machine, wherever it says that they are. Raises
    NotSavedError if it is damaged, not complete, or refused."""
    saved = form.load(folder, LEARNER, later=later)
    config = check_saved(saved.meta["config"])
    for group, fields in OBJECT_FIELDS.items():
        if OWN in config[group]:
            check_fields(config[group], fields, f"{META}: {group}")
    here = {"root": os.environ.get("METALEARN_DATA", DATA), "download": True, "seed": 0}
    here["eval_seed"] = config["trainer"].get("eval_seed")  # which it follows
    config["dataset"] |= {name: value for name, value in here.items() if name in config["dataset"]}
    weights = config["model"].get("weights")
    if weights == WEIGHTS:
        config["model"]["weights"] = str(folder.absolute() / WEIGHTS)
    elif is_path(weights):
        raise NotSavedError(f"{folder}: model.weights={weights}: is a path, and a published model names none")
    return saved


def is_path(value: object) -> bool:
    """Whether a value is a path, or has one within it."""
    if isinstance(value, dict | list):
        return any(map(is_path, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and (os.sep in value or "\\" in value or value.startswith("~"))
