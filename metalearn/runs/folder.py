"""The run folder: what it holds already, whether this run may go on in it, and its result."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from metalearn.config.check import LOCK, is_new_run, refuse_changes, restarted
from metalearn.config.saved import read_config
from metalearn.config.values import leaves, to_container
from metalearn.errors import ConfigError, RunError
from metalearn.runs.checkpoint import CHECKPOINT, ORIGIN, Snapshot, fitted, has_gone_back, latest, origin_of, read_named
from metalearn.runs.metrics import BY_SET, PARTS, describe, from_json, jsonable, main_metric
from metalearn.saved.form import kind_of, replacing
from metalearn.storage.files import (
    held,
    holder_of,
    is_disk_fault,
    read_json,
    refuse_nameless,
    refuse_used,
    unwritten,
    write_atomically,
)
from metalearn.types import Params

STOP = "stop"
"""A run that finds a file of this name in its folder saves and pauses. Without the file, the same command resumes."""

_REPORTED_STEPS = (0, 1, 2, 3, 4, 5, 10, 20, 50, 100)

PAUSED, PRUNED = "paused", "pruned"
"""Statuses of a paused run: `PAUSED` after the step `pause_after`, `PRUNED` for the file `STOP`."""

PATIENCE = "patience"  # the key of a result whose training was ended by `trainer.patience`: its value


class FolderState(NamedTuple):
    """The checkpoint to go on from; the result, if the run is complete; and whether to rewind first: to remove the
    checkpoints of later steps."""

    snapshot: Snapshot | None
    result: dict[str, Any] | None
    rewinds: bool


def inspect(run_dir: Path, config: DictConfig, start: Params, restore: Callable[[Snapshot], object]) -> FolderState:
    """The state of the run folder for a run of this config, under its `resume`, from the meta-parameters `start`. A
    checkpoint of this run that `restore` cannot make a learner of counts as damaged. Raises ConfigError if the folder
    holds another run, a run that has done more steps, or something that is no run; or the checkpoint that `resume`
    names has a config that differs in more than `resume_changes`, or is not the one that the run in the folder began
    from."""
    resume, steps = config.resume, config.trainer.steps
    path = None if resume in ("auto", "never") else Path(resume)
    back = rewinds(run_dir, resume)
    empty = is_new_run(run_dir, resume)
    asked = to_container(config)

    def check_usable(place: Path, saved: Snapshot, named: Sequence[str] | None) -> None:
        """Raises ConfigError for another config (but for keys below `named`), another model or more steps than `asked`,
        and RunError for a checkpoint that was saved whole, but whose content does not fit."""
        refuse_changes(place, saved.meta["config"], asked, named=named)
        done = saved.meta["step"]
        if done > steps:
            raise ConfigError(
                f"trainer.steps={steps}: {place} has already done {done}; type trainer.steps={done} or more, "
                "or run=NAME for another folder"
            )
        if place == path:
            fitted("resume", place, saved.params, start, "; type the model of that run")
        # Found here, it costs the steps since an older checkpoint. Found later, it would end the run.
        try:
            fitted("checkpoint", Path(f"step_{done:06d}"), saved.params, start)
            restore(saved)
        except Exception as error:  # of any kind: state.pt may hold anything, and torch's optimizers raise many
            why = f"it does not fit this run ({type(error).__name__}: {error})"
            raise RunError(f"step {done} cannot be restored: {why}") from error

    def check_own(saved: Snapshot) -> None:
        started = saved.meta.get(ORIGIN)
        # A restarted job has the arguments of its first start, and a link such as `last` may have moved since.
        if path is not None and not is_own(run_dir, resume) and not restarted() and origin_of(path) != started:
            raise ConfigError(
                f"resume={path}: {run_dir} holds a run that has not begun from this checkpoint; type run=NAME to begin "
                "from it in another folder, or resume=auto 'resume_changes=[]' to go on with the run that is there"
            )
        check_usable(run_dir, saved, None)

    snapshot = None if empty or back else latest(run_dir, check_own)
    if snapshot is None and path is not None:
        snapshot = read_named("resume", path)
        if not back:
            for name in ("pending", "digest"):  # of another run's log
                snapshot.state.pop(name, None)
            snapshot.meta[ORIGIN] = origin_of(path)
        named = None if back else [*map(str, config.resume_changes)]
        try:
            check_usable(path, snapshot, named)
        except RunError as error:
            raise ConfigError(f"resume={path}: {error}; type resume=PATH with another checkpoint") from error
        snapshot = snapshot._replace(params=dict(snapshot.params))  # read by now, and other ranks get them
    elif snapshot is None and not empty:
        # It was killed before its first checkpoint: only Hydra's record says which run this is.
        try:
            recorded = read_config(run_dir / ".hydra" / "config.yaml")
        except (OSError, ValueError):  # nothing is known of it
            recorded = {}
        # Hydra records `${oc.env:…}` as typed, which never equals the value.
        typed = [key for key, value in leaves(recorded) if isinstance(value, str) and "${oc.env:" in value]
        refuse_changes(run_dir, recorded, asked, typed)
    return FolderState(snapshot, None if back else finished(run_dir, steps, config.trainer.get(PATIENCE)), back)


def rewinds(run_dir: Path, resume: str) -> bool:
    """Whether `resume` names a checkpoint of this very run, to which it has not gone back yet."""
    return is_own(run_dir, resume) and not has_gone_back(run_dir)


def is_own(run_dir: Path, resume: str) -> bool:
    """Whether `resume` names a checkpoint in the run folder."""
    return resume not in ("auto", "never") and Path(resume).resolve().is_relative_to(run_dir.resolve())


def report_if_done(run_dir: Path, config: DictConfig, state: FolderState | None) -> str | None:
    """The message for a complete or paused run, else None. On a rank other than zero `state` is None, and the message
    for a complete run is empty."""
    if state is not None and state.result is not None:
        return f"{run_report(run_dir, state.result)}\nnothing was trained now: the run was complete"
    if state.rewinds if state is not None else rewinds(run_dir, config.resume):
        return None
    if state is None and finished(run_dir, config.trainer.steps, config.trainer.get(PATIENCE)) is not None:
        return ""
    return pause_of(run_dir, config.pause_after) or None


def finished(run_dir: Path, steps: int, patience: int | None = None) -> dict[str, Any] | None:
    """The result of a run that has completed `steps` steps, or that this patience has ended before; else None."""
    result = read_json(run_dir / "result.json")
    ended = patience is not None and result.get(PATIENCE) == patience
    if result.get("status") != "completed" or not (ended or result.get("steps") == steps):
        return None
    return result | {"test": from_json(result["test"])}


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    """Writes result.json, whole or not at all."""
    write_atomically(run_dir / "result.json", json.dumps(jsonable(result), indent=2, allow_nan=False) + "\n")


def check_copy(target: str | None) -> None:
    """Raises ConfigError if launch.model, where `copy_best` puts the best checkpoint, names something else than a new
    folder or an earlier copy."""
    if target is not None:
        refuse_nameless("launch.model", Path(target))
        if kind_of(Path(target)) != CHECKPOINT.name or not (Path(target) / "result.json").exists():
            refuse_used("launch.model", Path(target))


def copy_best(run_dir: Path, target: Path) -> None:
    """Copies the best checkpoint of a completed run, and its result.json, into the folder `target`: whole, or not at
    all. An earlier copy is replaced. Raises RunError if the folder cannot be written."""
    try:
        check_copy(str(target))
        with replacing("launch.model", target, CHECKPOINT) as temporary:
            shutil.copytree(run_dir / "checkpoints/best", temporary, dirs_exist_ok=True)
            shutil.copy2(run_dir / "result.json", temporary)
    except ConfigError as error:
        raise RunError(f"{error}; the run itself is complete") from error


def pause_of(run_dir: Path, pause_after: int | None) -> str:
    """The reason why the run is paused, and how to resume it; empty if it is not paused."""
    result = read_json(run_dir / "result.json")
    if result.get("status") == PRUNED and (run_dir / STOP).exists():
        return f"paused: remove {run_dir / STOP}, and the same command resumes the run"
    done = result.get("steps")
    if result.get("status") == PAUSED and pause_after is not None and isinstance(done, int) and pause_after <= done:
        return f"paused after step {done}: pause_after=null resumes the run"
    return ""


def run_report(run_dir: Path, result: dict[str, Any]) -> str:
    """A result in words: the last lines that a run prints."""
    return (
        f"test {evaluation_report(result['test'])}\n"
        f"{result['steps']} steps, {result['seconds']:.0f} s, {result['workers']} workers; all in {run_dir}"
    )


def evaluation_report(figures: dict[str, Any]) -> str:
    """The figures of an evaluation in words: one line, and one more where there are inner steps."""
    form = ".2%" if main_metric(figures) in PARTS else ".4f"
    steps = figures["by_step"]
    reported = [step for step in steps if int(step) in _REPORTED_STEPS or int(step) == len(steps) - 1]
    by_step = ", ".join(f"{step}: {steps[step]:{form}}" for step in reported)
    kind = "transductive" if figures["transductive"] else "not transductive"
    line, seen = "", figures.get("seen_classes")
    if seen is not None and seen["classes"] is None:
        line = "\nclasses trained on before: not known"
    elif seen is not None:
        line = f"\nclasses trained on before: {seen['trained_on']} of {seen['classes']}"
        line += f", and {seen['validated_on']} more validated on" if seen["validated_on"] else ""
        line += "" if seen["complete"] else ", of those that are known"
    each = "".join(f"\nof {name}: {describe(of_set)}" for name, of_set in figures.get(BY_SET, {}).items())
    if positions := figures.get("bits_by_position"):
        line += "\nbits by position  " + ", ".join(f"{place}: {value:.3f}" for place, value in positions.items())
        for name, words in (("optimum", "best prediction"), ("window_optimum", "by counts in the window's reach")):
            if best := figures.get(f"{name}_by_position"):
                line += f"\n{words}  " + ", ".join(f"{place}: {value:.3f}" for place, value in best.items())
    return f"{describe(figures)}, {kind}{line}" + (f"\nby inner step  {by_step}" if len(steps) > 1 else "") + each


@contextmanager
def lock(run_dir: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds the folder, which is made if need be, for this process. Raises ConfigError if another process is running in
    it, unless it is to `wait` for that without a time limit, or if it cannot be written."""
    with ExitStack() as holding:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            # A trial of a sweep may outlive its controller on another host. The next controller must wait for its end.
            holding.enter_context(held(run_dir / LOCK, f"{run_dir} is in use", wait=wait))
        except TimeoutError as error:
            holder = holder_of(run_dir / LOCK)
            raise ConfigError(f"{run_dir} is in use by {holder}; type run=NAME for another folder") from error
        except OSError as error:
            if is_disk_fault(error):
                raise unwritten(run_dir / LOCK, error) from error
            raise ConfigError(
                f"{run_dir}: cannot be written: {error.strerror} ({error.filename}); start in a folder that you may "
                "write, or type hydra.run.dir=FOLDER"
            ) from error
        yield
