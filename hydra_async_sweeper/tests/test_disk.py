"""Disks that are full or gone: the sweep pauses, no trial is blamed, and it goes on to the same end."""

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from hydra_async_sweeper.controller import SweepController, TrialLimits
from hydra_async_sweeper.disk import PausedError, fault_at, fault_in, line_of
from hydra_async_sweeper.plan import SweepPlan, TaskTraits
from hydra_async_sweeper.report import SweepView
from hydra_async_sweeper.samplers import ParamChoice, SearchMethod, search_of
from hydra_async_sweeper.settings import PACKAGES, settings_of
from hydra_async_sweeper.slots import TrialSlots
from hydra_async_sweeper.space import Category, Number, Space
from hydra_async_sweeper.study import Study
from hydra_async_sweeper.sweep import _overrides_of
from hydra_async_sweeper.terms import COMPLETED, StartedTrial, StudyError

SPACE: Space = {"lr": Number(1e-3, 1e-1, log=True), "model": Category(("a", "b", "c")), "width": Number(0.0, 1.0)}

Work = Callable[[int, Sequence[str]], Any]


def completed(number: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    return {"status": "COMPLETED", "value": {"status": "completed", "exit": 0, "val": {"mse": float(number)}}}


@contextmanager
def controller(
    folder: Path, work: Work, n_jobs: int = 1, record: Callable[[], None] = lambda: None
) -> Iterator[tuple[SweepController, Study]]:
    """A sweep of three trials that may not fail at all."""
    slots = TrialSlots(work, folder / "logs")
    study = Study(folder / "study.journal", "s", SPACE, ["minimize"], {})
    study.enqueue(3)
    search = SearchMethod(lambda number: ParamChoice(RandomSampler(seed=number)))
    try:
        yield SweepController(
            study, slots, overrides_of=lambda trial: [], search=search, objective=["val.mse"],
            limits=TrialLimits(n_jobs, 0, True), watch=None, view=SweepView(3, ["val.mse"], ["minimize"], 1),
            record=record,
        ), study  # fmt: skip
    finally:
        slots.close()
        study.close()


def results(study: Study) -> list[tuple[int, str, tuple[float, ...] | None]]:
    return sorted((trial.number, trial.outcome, trial.values) for trial in study.finished())


def test_a_full_disk_of_a_trial_pauses_the_sweep_and_the_next_one_ends_with_every_trial(tmp_path: Path) -> None:
    def full(number: int, overrides: Sequence[str]) -> Any:
        with Path("/dev/full" if number == 1 else tmp_path / "file").open("w") as file:
            file.write("x")
        return completed(number)

    def told(number: int, overrides: Sequence[str]) -> Any:
        value = {"status": "failed", "exit": os.EX_IOERR, "error": "run/params: No space left on device"}
        return completed(number) if number != 1 else {"status": "COMPLETED", "value": value}

    for work, reason in ((full, "its disk failed, and is writable again"), (told, "run/params: No space left")):
        with controller(tmp_path, work) as (sweep, study), pytest.raises(PausedError, match=f"trial 1: {reason}"):
            sweep.run()
    with controller(tmp_path, completed) as (sweep, study):
        assert study.interrupted() == [1]
        assert sweep.run() == 0
        assert results(study) == [(number, COMPLETED, (float(number),)) for number in range(3)]


def test_a_failure_without_a_reason_in_a_folder_that_is_gone_pauses_and_others_are_told(tmp_path: Path) -> None:
    def work(number: int, overrides: Sequence[str]) -> Any:
        if number == 0:
            shutil.rmtree(tmp_path / "logs")
            raise ValueError("a consequence")
        return completed(number)

    with (
        controller(tmp_path, work, n_jobs=2) as (sweep, study),
        pytest.raises(PausedError, match=r"/logs: No such file or directory \([\d,]+ KiB are free in .*bring it back"),
    ):
        sweep.run()
    with controller(tmp_path, completed) as (sweep, study):
        assert sweep.run() == 0 and len(results(study)) == 3


def test_a_trial_that_fails_by_itself_is_blamed(tmp_path: Path) -> None:
    def work(number: int, overrides: Sequence[str]) -> Any:
        if number == 1:
            (tmp_path / "nothing").read_text()
        return completed(number)

    with controller(tmp_path, work) as (sweep, study):
        assert sweep.run() == 0
        assert [outcome for _, outcome, _ in results(study)] == [COMPLETED, "failed", COMPLETED]


@pytest.mark.parametrize("gone", ["removed", "cut"])
def test_a_journal_that_goes_while_the_sweep_runs_is_not_begun_anew(tmp_path: Path, gone: str) -> None:
    journal = tmp_path / "study.journal"

    def work(number: int, overrides: Sequence[str]) -> Any:
        if number == 1:
            journal.unlink() if gone == "removed" else os.truncate(journal, 100)
        return completed(number)

    with controller(tmp_path, work) as (sweep, study), pytest.raises(OSError) as error:
        sweep.run()
    assert error.value.errno in (errno.ENOENT, errno.ESTALE) and str(journal) in str(error.value)
    assert not journal.exists() or journal.stat().st_size == 100
    with controller(tmp_path, completed) as (sweep, study):
        assert sweep.run() == 0 and len(results(study)) == 3


@pytest.mark.parametrize("spoiled", ["no JSON", '{"op_code": 99}', "deleted"])
def test_a_journal_that_others_spoil_while_the_sweep_runs_stops_its_trials(tmp_path: Path, spoiled: str) -> None:
    journal, before = tmp_path / "study.journal", tmp_path / "before"

    def work(number: int, overrides: Sequence[str]) -> Any:
        if number == 1:
            signal.pause()  # until it is stopped
        shutil.copy(journal, before)
        if spoiled == "deleted":
            optuna.delete_study(study_name="s", storage=JournalStorage(JournalFileBackend(str(journal))))
        else:
            with journal.open("a") as file:
                file.write(f"{spoiled}\n")
        return completed(number)

    with (
        controller(tmp_path, work, n_jobs=2) as (sweep, study),
        pytest.raises(StudyError, match=f"{journal}: is no journal of a study, or is damaged .*; move it away"),
    ):
        sweep.run()
    shutil.copy(before, journal)
    with controller(tmp_path, completed) as (sweep, study):
        assert study.interrupted() == [0, 1]
        assert sweep.run() == 0 and len(results(study)) == 3


def test_half_an_append_is_taken_back_at_once(tmp_path: Path) -> None:
    """A limit on the size of files cuts an append at any byte, as a full disk does."""
    journal, whole = tmp_path / "study.journal", resource.getrlimit(resource.RLIMIT_FSIZE)
    with controller(tmp_path, completed) as (_, study):
        size = journal.stat().st_size
        try:
            for more in (1, 7, 60):
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, whole[1]))
                with pytest.raises(OSError, match="File too large"):
                    study.begin(0, RandomSampler(seed=0))
                assert journal.stat().st_size == size
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, whole)
        study.begin(0, RandomSampler(seed=0))
        assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_table_that_cannot_be_written_stops_the_others_and_raises(tmp_path: Path) -> None:
    def record() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "trials.csv"))

    with controller(tmp_path, completed, record=record) as (sweep, study):
        with pytest.raises(OSError, match="Read-only"):
            sweep.run()
        assert results(study) == [(0, COMPLETED, (0.0,))]


def searched(study: Study, sampler: str, count: int) -> None:
    """Runs the trials that are left, one at a time, with a loss that is a sum over their parameters."""
    keys = {
        "n_trials": count, "n_jobs": 1, "objective": None, "direction": None, "pruner": "none", "seed": 3,
        "study_name": "s", "storage": None, "max_failure_rate": 0.0, "max_retries": 0, "warm": True, "plots": True,
        "preload": [], "islands": {"pop_size": 2}, "sampler": sampler,
    }  # fmt: skip
    search = search_of(study, settings_of(keys, SPACE))
    study.enqueue(count)
    while numbers := [*study.interrupted(), *study.waiting()]:
        choice = search.choose(numbers[0])
        assert choice is not None
        params = study.begin(numbers[0], *choice).params
        study.tell(numbers[0], COMPLETED, (float(params["lr"]) + float(params["width"]) + (params["model"] == "a"),))


@pytest.mark.parametrize("sampler", ["random", "tpe", "islands", "cmaes"])
def test_a_journal_cut_at_any_byte_leads_to_the_same_trials(tmp_path: Path, sampler: str) -> None:
    for package in PACKAGES.get(sampler, ()):
        pytest.importorskip(package)
    count = {"tpe": 12, "random": 3}.get(sampler, 4)  # the first ten of tpe are drawn at random

    def opened(path: Path) -> Study:
        return Study(path, "s", SPACE, ["minimize"], {"seed": 3})

    def told(study: Study) -> list[tuple[int, Any, Any, int]]:
        return [(trial.number, trial.params, trial.values, trial.told) for trial in study.finished()]

    study = opened(tmp_path / "study.journal")
    searched(study, sampler, count)
    undisturbed = told(study)
    study.close()
    content = (tmp_path / "study.journal").read_bytes()
    lines = content.splitlines(keepends=True)
    ends = [sum(map(len, lines[:number])) for number in range(len(lines))]
    cuts = range(0, len(content), 7) if sampler == "random" else [end + 9 for end in ends[-24:]]
    path, done = tmp_path / "cut", set[int]()
    for cut in cuts:
        path.write_bytes(content[:cut])
        study = opened(path)
        left = max(end for end in ends if end <= cut)
        assert path.read_bytes().startswith(content[:left])
        if left not in done:  # what is left after the torn line is removed decides all that follows
            searched(study, sampler, count)
            assert told(study) == undisturbed, cut
            done.add(left)
        study.close()
    assert len(done) >= min(len(lines), 24) - 1


def test_faults_are_those_of_disks(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE):
        try:
            raise RuntimeError("of a library") from OSError(number, os.strerror(number), "file")
        except RuntimeError as error:
            fault = fault_in(error)
        assert fault is not None and fault.errno == number
        assert line_of(fault, tmp_path).startswith(f"file: {os.strerror(number)} (")
    for other in (FileNotFoundError(errno.ENOENT, "x"), PermissionError(errno.EACCES, "x"), ValueError("28")):
        assert fault_in(other) is None
    assert fault_at([tmp_path]) is None and not list(tmp_path.iterdir())
    missing = fault_at([tmp_path, tmp_path / "gone"])
    assert missing is not None and missing.filename == str(tmp_path / "gone")


def test_a_round_whose_parent_is_gone_is_not_started(tmp_path: Path) -> None:
    keys = {
        "n_jobs": 1, "objective": None, "direction": None, "seed": 0, "study_name": "pbt", "storage": None,
        "max_failure_rate": 0.0, "max_retries": 0, "warm": True, "plots": True, "preload": [], "members": 2,
        "rounds": 2, "quantile": 0.25, "factors": [0.8], "resample": 0.25, "replay": None,
    }  # fmt: skip

    def task(config: Any) -> float:
        return 0.0

    task.segment = lambda round_, rounds, parent, names: [f"from={parent}"]  # type: ignore[attr-defined]
    overrides_of = _overrides_of(
        SweepPlan({}, [], []), settings_of(keys, SPACE), TaskTraits.of(task), lambda number: tmp_path / str(number)
    )
    with pytest.raises(FileNotFoundError, match="trial 2 goes on from its checkpoint"):
        overrides_of(StartedTrial(2, {}, parent=0))
    (tmp_path / "0").mkdir()
    assert overrides_of(StartedTrial(2, {}, parent=0)) == [f"from={(tmp_path / '0').resolve()}"]
