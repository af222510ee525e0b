"""Checkpoints and their links: an interruption at any call, and what others leave in the folder."""

import errno
import hashlib
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from omegaconf import OmegaConf

from metalearn.app.run import resume_or_begin
from metalearn.errors import ConfigError, RunError
from metalearn.runs.checkpoint import Snapshot, checkpointing, latest, read, rewind, start_params, write
from metalearn.runs.folder import FolderState, inspect
from metalearn.training.optimizers import Rates, adam
from metalearn.training.settings import TrainerSettings
from metalearn.training.trainer import TrainState
from tests.runs import slow

ERRORS = {10: 0.3, 50: 0.1}
"""The validations of `train` that are the best so far. At the other steps the error is 0.5."""

OUTER = adam(rates=Rates(1e-3), beta1=0.9, beta2=0.999, eps=1e-8)


SETTINGS = TrainerSettings(
    steps=1, meta_batch_size=1, task_chunk=1, val_every=1, val_tasks=2, test_tasks=2, eval_seed=0, ema_decay=None
)


class Outcome(NamedTuple):
    """What a run reports as its best step; the step whose parameters it tests; its folder; and the last parameters."""

    reported: int
    tested: int
    entries: dict[str, str]
    params: list[float]


def train(run_dir: Path, to: int, keep_best: int = 2) -> Outcome:
    """A run that saves every ten steps, as the loop does; it goes on from what the folder holds."""
    checkpointer = checkpointing(every=10, keep=2, keep_best=keep_best)(run_dir)
    parts = SimpleNamespace(
        job=SimpleNamespace(run_dir=run_dir, config=SimpleNamespace(resume="auto")),
        start_notes=[],
        checkpointer=checkpointer,
        new_state=lambda: TrainState.new({"w": torch.zeros(2)}, OUTER.start),
        restored=lambda saved: TrainState.restored(saved, OUTER.start),
    )
    state = resume_or_begin(cast(Any, parts), FolderState(latest(run_dir), None, False))
    for step in range(state.step + 10, to + 1, 10):
        with torch.no_grad():
            state.params["w"].add_(step).mul_(1.5)
        validation, improved = {"mse": ERRORS.get(step, 0.5), "step": step}, step in ERRORS
        state.step, state.best, state.latest = step, validation if improved else state.best, validation
        checkpointer.save(state.snapshot({"config": {}, "validation": validation}, {}), improved)
    best = checkpointer.best()
    assert best is not None and state.best is not None
    return Outcome(state.best["step"], best.meta["step"], listing(run_dir), state.params["w"].tolist())


def listing(run_dir: Path) -> dict[str, str]:
    folder = run_dir / "checkpoints"
    return {path.name: str(path.readlink()) if path.is_symlink() else "" for path in sorted(folder.iterdir())}


def interrupted(action: Callable[[], object], call: int) -> bool:
    """Runs `action` in a fork that is killed before its file-system call number `call`; False if it has fewer."""
    pid = os.fork()
    if pid == 0:
        left = call
        sync = os.fsync

        def count(event: str, arguments: tuple[Any, ...] = ()) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "shutil.")):
                left -= 1
                if left == 0:
                    os._exit(9)

        def fsync(descriptor: int) -> None:
            count("os.fsync")
            sync(descriptor)

        os.fsync = fsync
        sys.addaudithook(count)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def interruptions(before: Path, action: Callable[[Path], object], every: int = 1) -> Iterator[Path]:
    """Copies of the run folder `before`, in each of which `action` was interrupted at another call: at the first one
    and at every so many."""
    for call in itertools.count(1, every):
        run_dir = before.with_name(f"{before.name}{call}")
        shutil.copytree(before, run_dir, symlinks=True)
        if not interrupted(lambda run_dir=run_dir: action(run_dir), call):
            assert call > 10
            return
        yield run_dir


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill loses nothing that was written, so these tests need no sync; it is counted as a call all the same."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The folder of a run that has done 40 steps."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    train(run_dir, 40)
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Outcome]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return {to: train(folder, to) for to in (40, 50, 60)}


@pytest.mark.thorough
@pytest.mark.parametrize("every", [pytest.param(1, marks=slow), 7])
def test_a_save_may_be_interrupted_at_every_call(every: int, before: Path, undisturbed: dict[int, Outcome]) -> None:
    """The save of step 50, a new best. The same command makes it good; the next save removes what is left over."""
    for run_dir in interruptions(before, lambda run_dir: train(run_dir, 50), every):
        resumed, expected = train(run_dir, 50), undisturbed[50]
        assert resumed._replace(entries={}) == expected._replace(entries={}), run_dir
        assert resumed.entries["last"] == "step_000050", run_dir
        assert train(run_dir, 60) == undisturbed[60], run_dir


@slow
def test_replacing_a_checkpoint_never_loses_it(before: Path, undisturbed: dict[int, Outcome]) -> None:
    def save_again(run_dir: Path) -> None:
        saved = latest(run_dir)
        assert saved is not None
        again = saved._replace(meta=saved.meta | {"again": True})
        checkpointing(every=10, keep=4, keep_best=2)(run_dir).save(again, True)

    for run_dir in interruptions(before, save_again):
        saved = latest(run_dir)
        assert saved is not None and saved.meta["step"] == 40, run_dir
        assert train(run_dir, 60) == undisturbed[60], run_dir


def test_where_there_are_no_links_best_and_last_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linked").mkdir()
    expected = train(tmp_path / "linked", 60, keep_best=1)

    def symlink_to(self: Path, target: str, target_is_directory: bool = False) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented", str(self))

    monkeypatch.setattr(Path, "symlink_to", symlink_to)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for to in (20, 40, 60):
        outcome = train(run_dir, to, keep_best=1)
    assert outcome._replace(entries={}) == expected._replace(entries={}) and outcome.tested == 50
    assert outcome.entries["best"] == outcome.entries["last"] == ""
    assert read(run_dir / "checkpoints/last").meta["step"] == 60
    with pytest.raises(RunError, match=r"best_2: this file system has no symbolic links, .*checkpoint.keep_best=1"):
        train(run_dir, 80)


def test_going_back_may_be_interrupted_at_every_call(before: Path, undisturbed: dict[int, Outcome]) -> None:
    for run_dir in interruptions(before, lambda run_dir: rewind(run_dir, 30)):
        rewind(run_dir, 30)
        assert train(run_dir, 40) == undisturbed[40], run_dir


def rewritten(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces a file of a checkpoint, with a manifest that fits."""
    (checkpoint / name).write_bytes(content)
    manifest = checkpoint / "manifest.json"
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in {*checkpoint.iterdir()} - {manifest}
    }
    manifest.write_text(json.dumps(digests))


def state_of(step: int, groups: int = 1, **progress: Any) -> bytes:
    optimizer = OUTER.start({"w": torch.zeros(2, requires_grad=True)}).state_dict()
    optimizer["param_groups"] = optimizer["param_groups"] * groups
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer, "progress": {"step": step, **progress}}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("params.safetensors", b"nothing"),
        ("state.pt", b"nothing"),
        ("state.pt", state_of(40, groups=0)),
        ("state.pt", state_of(40, another=1)),
        ("meta.json", b"[]"),
        ("meta.json", b'{"kind": "checkpoint", "version": 1, "versions": {}, "step": 40}'),
        ("meta.json", b'{"kind": "learner", "version": 1, "versions": {}, "step": 40, "config": {}}'),
    ],
)
def test_an_unusable_checkpoint_gives_the_older_one(name: str, content: bytes, before: Path) -> None:
    rewritten(before / "checkpoints/step_000040", name, content)
    start = {"w": torch.zeros(2)}
    (before / ".hydra").mkdir()
    config = OmegaConf.create({"resume": "auto", "trainer": {"steps": 100}})
    found = inspect(before, config, start, lambda saved: TrainState.restored(saved, OUTER.start)).snapshot
    assert found is not None and found.meta["step"] == found.state["progress"]["step"] == 30


def test_users_folders_and_links_beside_checkpoints_stay(before: Path, tmp_path: Path) -> None:
    """Step 30 is moved to another disk, with a link in its place; the run removes the link, and nothing beyond it."""
    folder, elsewhere = before / "checkpoints", tmp_path / "elsewhere"
    for name in ("step_keep_this", "step_000040 (copy)", ".step_keep.old"):
        (folder / name).mkdir()
    (folder / "step_000030").rename(elsewhere)
    (folder / "step_000030").symlink_to(elsewhere)
    train(before, 60)
    assert {"step_keep_this", "step_000040 (copy)", ".step_keep.old"} < set(listing(before))
    assert not (folder / "step_000030").exists() and read(elsewhere).meta["step"] == 30


def test_a_copy_without_links_goes_on_all_the_same(before: Path, tmp_path: Path) -> None:
    """Object stores and `cp -L` make folders of `best` and `last`."""
    copy = tmp_path / "copy"
    shutil.copytree(before, copy, symlinks=False)
    assert listing(copy)["last"] == listing(copy)["best"] == ""
    assert train(copy, 60).params == train(before, 60).params
    assert listing(copy)["last"] == "step_000060" and listing(copy)["best"] == "step_000050"


def test_a_newer_checkpoint_that_is_damaged_counts_for_nothing(before: Path) -> None:
    torn = before / "checkpoints/step_000040/state.pt"
    torn.write_bytes(torn.read_bytes()[:-4])
    train(before, 30)  # settles
    entries = listing(before)
    assert (entries["last"], entries["best"]) == ("step_000030", "step_000010")
    train(before, 60)
    assert {"step_000050", "step_000060"} < set(listing(before))
    torn = before / "checkpoints/step_000060/state.pt"
    torn.write_bytes(b"")
    checkpointing(every=10, keep=2)(before).save(latest(before)._replace(meta={"step": 55, "config": {}}), False)
    assert {"step_000050", "step_000055", "step_000060"} < set(listing(before))


ACCURACIES = {10: 0.5, 20: 0.7, 30: 0.7, 40: 0.9, 50: float("nan"), 60: 0.6, 70: 0.8}


@pytest.fixture
def ranked(tmp_path: Path) -> Path:
    """A run that keeps its three best validations, and its two latest checkpoints; it paused after step 75."""
    run_dir = tmp_path / "ranked"
    run_dir.mkdir()
    best, checkpointer = 0.0, checkpointing(every=100, keep=2, keep_best=3)(run_dir)
    learner = TrainState.new({"w": torch.zeros(1)}, OUTER.start)
    for step in (*ACCURACIES, 75):
        accuracy = ACCURACIES.get(step)
        validation = None if accuracy is None else {"accuracy": accuracy, "step": step}
        improved = accuracy is not None and accuracy > best
        best = max(best, accuracy or 0.0) if improved else best
        meta = {"config": {}, "validation": validation}
        learner.step = step
        checkpointer.save(learner.snapshot(meta, {}), improved)
    return run_dir


LINKED = {"best": 40, "best_2": 70, "best_3": 20, "last": 75}


def links_of(run_dir: Path) -> dict[str, int]:
    return {name: int(to.removeprefix("step_")) for name, to in listing(run_dir).items() if to.startswith("step_")}


def test_the_best_validations_are_kept_and_named_in_order(ranked: Path) -> None:
    """Of equal validations the earlier one is better, and one that is no number is the worst."""
    assert links_of(ranked) == LINKED
    assert {name for name, to in listing(ranked).items() if not to} == {f"step_{n:06d}" for n in (20, 40, 70, 75)}


def test_the_next_best_follow_a_run_that_goes_back(ranked: Path) -> None:
    rewind(ranked, 70)
    checkpointing(every=100, keep=2, keep_best=3)(ranked).settle(70, 40)
    assert links_of(ranked) == LINKED | {"last": 70}
    rewind(ranked, 40)
    (ranked / "checkpoints/best_practice").symlink_to("step_000040")
    checkpointing(every=100, keep=2, keep_best=3)(ranked).settle(40, 40)
    assert links_of(ranked) == {"best": 40, "best_2": 20, "last": 40, "best_practice": 40}
    checkpointing(every=100, keep=2)(ranked).settle(40, 40)
    assert links_of(ranked) == {"best": 40, "last": 40, "best_practice": 40}


def test_a_damaged_validation_is_not_ranked(ranked: Path) -> None:
    (ranked / "checkpoints/step_000070/meta.json").write_text("{")
    checkpointing(every=100, keep=2, keep_best=3)(ranked).settle(75, 40)
    assert links_of(ranked) == {"best": 40, "best_2": 20, "last": 75}


def test_validated_steps_are_saved_where_the_best_are_kept(tmp_path: Path) -> None:
    wanted = {
        kept: [checkpointing(every=10, keep=2, keep_best=kept)(tmp_path).due(*case) for case in DUE] for kept in (1, 2)
    }
    assert wanted == {1: [True, False, False], 2: [True, True, False]}


DUE = ((10, False), (15, True), (15, False))
"""Steps, and whether they are validated."""


def test_a_run_folder_that_was_moved_away_is_not_made_anew(before: Path, tmp_path: Path) -> None:
    saved = latest(before)
    assert saved is not None
    before.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"run: is not there any more .*; move it back, and the same command resumes"):
        checkpointing(every=10, keep=2)(before).save(saved, True)
    assert not before.exists()


# Parameters of another run


def test_init_from_takes_what_fits_and_names_the_rest(tmp_path: Path) -> None:
    theirs = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(3), "c": torch.ones(1)}
    state = {"optimizer": {}, "progress": {"step": 0}}
    path = write(tmp_path / "run", Snapshot(theirs, state, {"step": 0, "config": {}}))
    ours = {"a": torch.zeros(2), "b": torch.zeros(4), "d": torch.zeros(1)}
    params, notes = start_params(path, theirs, ours, strict=False)
    assert torch.equal(params["a"], torch.ones(2)) and params["a"].dtype == torch.float32
    assert params["b"] is ours["b"] and params["d"] is ours["d"] and params.keys() == ours.keys()
    assert notes == [
        "init_from: b [4] keeps its first value: the checkpoint has the shape [3]",
        "init_from: d [1] keeps its first value: the checkpoint has none",
        "init_from: c [1] is left: there is none here",
    ]
    with pytest.raises(ConfigError, match=r"another model: b \(here \(4,\), there \(3,\)\), c .*, d "):
        start_params(path, theirs, ours, strict=True)
    assert start_params(path, theirs, {"a": ours["a"], "b": theirs["b"], "c": theirs["c"]}, strict=True)[1] == []
    with pytest.raises(ConfigError, match="none of its 3 fits"):
        start_params(path, theirs, {"x": torch.zeros(1)}, strict=False)
