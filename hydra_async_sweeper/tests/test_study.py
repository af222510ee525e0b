"""The study survives any cut: one test for each row of the crash table that the journal alone can show."""

import fcntl
import json
import logging
import math
import stat
from pathlib import Path

import pytest
from optuna.samplers import BaseSampler, RandomSampler

from hydra_async_sweeper import islands
from hydra_async_sweeper import study as study_module
from hydra_async_sweeper.outcome import result_of
from hydra_async_sweeper.pruning import PruningWatch
from hydra_async_sweeper.samplers import combinations, search_of
from hydra_async_sweeper.settings import PACKAGES, settings_of
from hydra_async_sweeper.slots import TrialExit
from hydra_async_sweeper.space import Category, Number, Space, contains
from hydra_async_sweeper.study import Study
from hydra_async_sweeper.terms import COMPLETED, DIVERGED, FAILED, PRUNED, StudyError

SPACE: Space = {"lr": Number(1e-3, 1e-1, log=True), "model": Category(("a", "b")), "steps": Number(1, 9, whole=True)}
SETTINGS = islands.islands(seed=0, pop_size=4)
KEYS = {
    "n_trials": 9, "n_jobs": 1, "objective": None, "direction": None, "pruner": "none", "seed": 0, "study_name": "s",
    "storage": None, "max_failure_rate": 0.0, "max_retries": 0, "warm": True,
    "plots": True, "preload": [], "islands": {"pop_size": 4},
}  # fmt: skip


def opened(folder: Path, **identity: object) -> Study:
    return Study(folder / "study.journal", "s", SPACE, ["minimize"], {"seed": 0, **identity})


def sampler_of(study: Study, number: int, sampler: str = "random") -> BaseSampler:
    choice = search_of(study, settings_of({**KEYS, "sampler": sampler}, SPACE)).choose(number)
    assert choice is not None and choice.parent is None
    return choice.sampler


def begun(study: Study) -> dict[int, dict[str, object]]:
    """Begins every waiting trial; their parameters by number."""
    return {number: study.begin(number, sampler_of(study, number)).params for number in study.waiting()}


def again(study: Study, seed: int | None = None) -> dict[int, dict[str, object]]:
    """Begins every interrupted trial once more; their parameters by number."""
    return {number: study.begin(number, RandomSampler(seed=seed)).params for number in study.interrupted()}


def test_a_torn_last_line_is_removed_and_the_total_is_exact(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.enqueue(5)
    begun(study)
    study.close()
    journal = tmp_path / "study.journal"
    whole = journal.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(ends[2], len(whole), 97):
        journal.write_bytes(whole[:cut])
        study = opened(tmp_path)
        study.enqueue(5)
        assert study.count() == 5
        study.close()
        assert journal.read_bytes().endswith(b"\n")
        for line in journal.read_bytes().splitlines():
            json.loads(line)


def test_a_trial_cut_between_asking_and_its_last_parameter_keeps_those_it_has(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.enqueue(1)
    whole = begun(study)[0]
    study.close()
    journal = tmp_path / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))  # the last line sets the last parameter
    study = opened(tmp_path)
    params = again(study, seed=77)
    assert list(params) == [0]
    assert {key: params[0][key] for key in ("lr", "model")} == {key: whole[key] for key in ("lr", "model")}
    assert params[0]["steps"] in range(1, 10)
    study.close()


def test_a_trial_under_way_is_interrupted_and_a_told_one_is_not(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.enqueue(3)
    params = begun(study)
    study.tell(1, COMPLETED, (0.5,))
    study.close()
    study = opened(tmp_path)
    assert again(study) == {0: params[0], 2: params[2]}
    assert [(trial.number, trial.values) for trial in study.finished()] == [(1, (0.5,))]
    study.close()


def test_parameters_depend_on_seed_and_number_and_not_on_restarts(tmp_path: Path) -> None:
    study = opened(tmp_path / "once")
    study.enqueue(6)
    once = begun(study)
    study.close()
    for number in range(1, 7):
        study = opened(tmp_path / "often")
        study.enqueue(number)
        begun(study)
        study.close()
    study = opened(tmp_path / "often")
    assert again(study) == once
    assert len({json.dumps(params) for params in once.values()}) == 6
    study.close()


def test_two_controllers_cannot_hold_one_study(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(StudyError, match="another process is running this sweep"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_another_sweep_in_the_same_folder_is_refused_with_the_differences(tmp_path: Path) -> None:
    opened(tmp_path, config={"steps": 3}).close()
    with pytest.raises(StudyError, match=r"config\.steps: 3 → 4"):
        opened(tmp_path, config={"steps": 4})


def test_a_journal_that_somebody_else_holds_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(study_module, "_MOST_SECONDS", 1.3)
    monkeypatch.setattr(logging.getLogger("hydra_async_sweeper"), "propagate", True)
    lock = tmp_path / ".study.journal.lock"
    lock.touch(0o644)
    with lock.open() as reader:  # who may only read the file can lock it
        fcntl.flock(reader, fcntl.LOCK_EX)
        with pytest.raises(StudyError, match=r"\.study\.journal\.lock is held by another process, since 1 s; end"):
            opened(tmp_path)
    assert f"{lock} is held by another process: waiting" in caplog.text
    study = opened(tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob(".*")} == {0o600}
    study.close()
    tmp_path.chmod(0o770)
    opened(tmp_path).close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob(".*")} == {0o660}


@pytest.mark.parametrize("text", ['{"broken\n', "[]\n", '{"op_code": 99}\n', "\xff\n"])
def test_a_file_that_is_no_journal_is_named_and_stays(text: str, tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.write_text(text, encoding="latin-1")
    for _ in range(2):  # nothing holds it after the refusal
        with pytest.raises(StudyError, match=r"study\.journal: is no journal of a study, or .*move it away"):
            opened(tmp_path)
    assert path.read_text(encoding="latin-1").startswith(text)


def test_a_smaller_total_leaves_out_the_last_trials_that_have_not_begun(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.enqueue(6)
    for number in (0, 1, 4):
        study.begin(number, sampler_of(study, number))
    study.close()
    for wanted, waiting, count in ((3, [2], 4), (1, [], 3), (7, [2, 3, 5, 6], 7)):
        study = opened(tmp_path)
        study.enqueue(wanted)
        assert (study.waiting(), study.interrupted(), study.count()) == (waiting, [0, 1, 4], count)
        study.close()


@pytest.mark.parametrize(
    ("outcome", "values", "ends"),
    [
        (COMPLETED, (1.5,), (COMPLETED, (1.5,))),
        (COMPLETED, (math.nan,), (DIVERGED, None)),
        (COMPLETED, (math.inf,), (DIVERGED, None)),
        (PRUNED, (0.25,), (PRUNED, (0.25,))),
        (DIVERGED, None, (DIVERGED, None)),
        (FAILED, None, (FAILED, None)),
    ],
)
def test_only_a_completed_trial_with_a_finite_value_is_a_parent(
    tmp_path: Path, outcome: str, values: tuple[float, ...] | None, ends: tuple[str, tuple[float, ...] | None]
) -> None:
    study = opened(tmp_path)
    study.enqueue(2)
    begun(study)
    study.tell(1, outcome, values)
    study.tell(0, COMPLETED, (2.0,))
    study.close()
    study = opened(tmp_path)
    first, second = study.finished()
    assert (first.number, first.told, second.number, second.told) == (1, 0, 0, 1)
    assert (first.outcome, first.values) == ends
    assert [trial.loss is not None for trial in study.losses()] == [outcome == COMPLETED and ends[0] == COMPLETED, True]
    study.close()


def test_islands_breed_the_same_child_whatever_was_asked_before(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.enqueue(8)
    for number in range(6):
        study.begin(number, sampler_of(study, number, "islands"))
        study.tell(number, COMPLETED, (float(number),))
    child = study.begin(6, sampler_of(study, 6, "islands")).params
    assert child == islands.suggest(6, study.losses(), SPACE, SETTINGS)
    study.close()


def test_a_grid_has_every_combination_once(tmp_path: Path) -> None:
    grid: Space = {"x": Category(("a", "b")), "n": Number(2, 8, step=3, whole=True)}
    study = Study(tmp_path / "study.journal", "s", grid, ["minimize"], {})
    wanted = [{"x": x, "n": n} for x in ("a", "b") for n in (2, 5, 8)]
    for _ in range(2):
        study.enqueue_grid(combinations(grid))
    assert list(begun(study).values()) == wanted
    study.close()


def test_the_size_of_an_island_stays_as_it_was_when_the_study_was_made(tmp_path: Path) -> None:
    study = opened(tmp_path)
    assert study.keep("island_size", 3) == 3
    study.close()
    study = opened(tmp_path)
    assert study.keep("island_size", 1) == 3
    study.close()


@pytest.mark.parametrize("sampler", ["random", "tpe", "islands", "cmaes", "gp"])
def test_a_sampler_draws_the_same_after_every_restart(tmp_path: Path, sampler: str) -> None:
    """The parameters are those of a search that was never interrupted, and lie in the space."""
    for package in PACKAGES.get(sampler, ()):
        pytest.importorskip(package)

    def searched(folder: Path, restarts: bool) -> list[dict[str, object]]:
        study = opened(folder)
        study.enqueue(14)
        for number in range(14):
            trial = study.begin(number, sampler_of(study, number, sampler))
            rate, steps = trial.params["lr"], trial.params["steps"]
            assert isinstance(rate, float) and isinstance(steps, int)
            study.tell(number, COMPLETED, (abs(math.log10(rate) + 2) + steps / 9,))
            if restarts:
                study.close()
                study = opened(folder)
        params = [trial.params for trial in study.finished()]
        study.close()
        return params

    once = searched(tmp_path / "once", restarts=False)
    assert searched(tmp_path / "often", restarts=True) == once
    assert all(contains(SPACE[key], params[key]) for params in once for key in SPACE)
    assert len({json.dumps(params) for params in once}) > 7


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_a_date_is_a_seed(tmp_path: Path, sampler: str) -> None:
    study = opened(tmp_path)
    chosen = settings_of({**KEYS, "sampler": sampler, "seed": 20261125}, SPACE | {"lr": Category(("1", "2"))})
    choice = search_of(study, chosen).choose(0)
    assert choice is not None and choice.sampler is not None
    study.close()


def test_a_trial_that_has_not_completed_has_the_value_it_was_told_with(tmp_path: Path) -> None:
    """Optuna gives a pruned trial its last intermediate value, which is another one."""
    study = opened(tmp_path)
    study.enqueue(3)
    begun(study)
    for number in range(3):
        study.report(number, 10, 0.9)
        study.report(number, 20, 0.4)
    study.tell(0, PRUNED, (0.9,), seconds=100.5)
    study.tell(1, DIVERGED, None)
    study.tell(2, PRUNED, None)
    assert [trial.values for trial in study.finished()] == [(0.9,), None, None]
    own, by_clock, _ = (trial.seconds for trial in study.finished())
    assert own == 100.5 and by_clock is not None and by_clock < 100  # a sweep may stand still for a night
    study.close()


def test_a_run_says_how_many_seconds_it_took() -> None:
    run = {"status": "completed", "seconds": 12.5, "val": {"mse": 1.0}}
    ended = TrialExit(0, 0, {"status": "COMPLETED", "value": run})
    assert result_of(ended, ["val.mse"], 1, searching=True, stopping=False).seconds == 12.5


def test_a_watch_reads_the_file_of_a_resumed_trial_from_its_start(tmp_path: Path) -> None:
    """A trial that goes back puts a shorter file in the place of the one that was read."""
    seen: list[tuple[int, float]] = []
    study = opened(tmp_path)
    watch = PruningWatch(study, None, lambda number: tmp_path, "accuracy", lambda *point: seen.append(point[1:]))
    file, fresh = tmp_path / "metrics.jsonl", tmp_path / "fresh"

    def write(path: Path, steps: range) -> None:
        path.write_text("".join(json.dumps({"step": n, "split": "val", "accuracy": n / 10}) + "\n" for n in steps))

    watch.start(0)
    write(file, range(1, 9))
    watch.look([0])
    write(fresh, range(1, 4))
    fresh.replace(file)
    watch.look([0])
    with file.open("a") as more:
        more.write('[]\n{"split": "val"}\n\x1b\n{"step": 4, "split": "val", "accuracy": [1]}\n')  # of another program
        more.write(json.dumps({"step": 4, "split": "val", "accuracy": 0.4, "note": "long" * 200}) + "\n")
    watch.look([0])
    study.close()
    assert [step for step, _ in seen] == [*range(1, 9), *range(1, 4), 4]
