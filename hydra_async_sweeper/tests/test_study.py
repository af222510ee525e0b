"""The study survives any cut: one test for each row of the crash table that the journal alone can show."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from by_hand import contains, settings
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, RandomSampler

from hydra_async_sweeper.controller import PruningWatch
from hydra_async_sweeper.islands import IslandSettings, fold, offspring
from hydra_async_sweeper.settings import PACKAGES
from hydra_async_sweeper.slots import TrialExit
from hydra_async_sweeper.space import Category, Number, Space, combinations
from hydra_async_sweeper.study import Study, search_of
from hydra_async_sweeper.trials import COMPLETED, DIVERGED, FAILED, PRUNED, StudyError, TrialResult, result_of

SPACE: Space = {"lr": Number(1e-3, 1e-1, log=True), "model": Category(("a", "b")), "steps": Number(1, 9, whole=True)}


def opened(folder: Path, **identity: object) -> Study:
    return Study(folder / "study.journal", "s", SPACE, ["minimize"], {"seed": 0, **identity})


def sampler_of(study: Study, number: int, sampler: str = "random") -> BaseSampler:
    chosen = settings(SPACE, sampler=sampler, n_trials=9, islands={"pop_size": 4})
    choice = search_of(study, chosen)(number)
    assert choice is not None and choice[1] is None
    return choice[0]


def begun(study: Study) -> dict[int, dict[str, object]]:
    """Begins every waiting trial; their parameters by number."""
    return {number: study.begin(number, sampler_of(study, number)).params for number in study.waiting()}


def again(study: Study, seed: int | None = None) -> dict[int, dict[str, object]]:
    """Begins every interrupted trial once more; their parameters by number."""
    return {number: study.begin(number, RandomSampler(seed=seed)).params for number in study.interrupted()}


def searched(study: Study, sampler: str, count: int) -> None:
    """Runs the trials that are left, one at a time, with a loss that is a function of their parameters."""
    study.enqueue(count)
    while numbers := [*study.interrupted(), *study.waiting()]:
        params: dict[str, Any] = study.begin(numbers[0], sampler_of(study, numbers[0], sampler)).params
        loss = abs(math.log10(params["lr"]) + 2) + params["steps"] / 9 + (params["model"] == "a")
        study.tell(numbers[0], TrialResult(COMPLETED, (loss,)))


def told(study: Study) -> list[tuple[int, Any, Any, int]]:
    return [(trial.number, trial.params, trial.values, trial.told) for trial in study.finished()]


@pytest.mark.parametrize("sampler", ["random", "tpe", "islands", "cmaes"])
def test_a_journal_cut_at_any_byte_leads_to_the_same_trials(tmp_path: Path, sampler: str) -> None:
    for package in PACKAGES.get(sampler, ()):
        pytest.importorskip(package)
    count = {"tpe": 12, "random": 3}.get(sampler, 6)  # the first ten of tpe are drawn at random
    study = opened(tmp_path)
    searched(study, sampler, count)
    undisturbed = told(study)
    study.close()
    content = (tmp_path / "study.journal").read_bytes()
    lines = content.splitlines(keepends=True)
    ends = [sum(map(len, lines[:number])) for number in range(len(lines))]
    cuts = range(0, len(content), 7) if sampler == "random" else [end + 9 for end in ends[-24:]]
    (tmp_path / "cut").mkdir()
    done = set[int]()
    for cut in cuts:
        (tmp_path / "cut/study.journal").write_bytes(content[:cut])
        study = opened(tmp_path / "cut")
        left = max(end for end in ends if end <= cut)
        assert (tmp_path / "cut/study.journal").read_bytes().startswith(content[:left])
        if left not in done:  # what is left after the torn line is removed decides all that follows
            searched(study, sampler, count)
            assert told(study) == undisturbed, cut
            done.add(left)
        study.close()
    assert len(done) >= min(len(lines), 24) - 1


def test_a_trial_cut_between_its_parameters_keeps_those_it_has(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.enqueue(1)
    whole = begun(study)[0]
    study.close()
    journal = tmp_path / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]))  # the last line sets the last parameter
    study = opened(tmp_path)
    params = again(study, seed=77)
    assert list(params) == [0] and params[0]["steps"] in range(1, 10)
    assert {key: params[0][key] for key in ("lr", "model")} == {key: whole[key] for key in ("lr", "model")}
    study.close()


@pytest.mark.parametrize("sampler", ["random", "tpe", "islands", "cmaes", "gp"])
def test_a_sampler_draws_the_same_after_every_restart(tmp_path: Path, sampler: str) -> None:
    """The parameters are those of a search that was never interrupted, and lie in the space."""
    for package in PACKAGES.get(sampler, ()):
        pytest.importorskip(package)
    study = opened(tmp_path / "once")
    searched(study, sampler, 14)
    whole = told(study)
    study.close()
    for count in range(1, 15):
        study = opened(tmp_path / "often")
        searched(study, sampler, count)
        study.close()
    study = opened(tmp_path / "often")
    assert told(study) == whole
    study.close()
    params = [entry[1] for entry in whole]
    assert all(contains(SPACE[key], one[key]) for one in params for key in SPACE)
    assert len({json.dumps(one) for one in params}) > 7


def test_a_sweep_that_is_held_or_another_one_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path, config={"steps": 3})
    for steps, message in ((3, "another process is running this sweep"), (4, r"config\.steps: 3 → 4")):
        with pytest.raises(StudyError, match=message):
            opened(tmp_path, config={"steps": steps})
        first.close()
    opened(tmp_path, config={"steps": 3}).close()


@pytest.mark.parametrize("text", ['{"broken\n', "[]\n", '{"op_code": 99}\n', "\xff\n"])
def test_a_file_that_is_no_journal_is_named_and_stays(text: str, tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.write_text(text, encoding="latin-1")
    for _ in range(2):  # nothing holds it after the refusal
        with pytest.raises(StudyError, match=r"study\.journal: is no journal of a study"):
            opened(tmp_path)
    assert path.read_text(encoding="latin-1").startswith(text)


def test_a_smaller_total_leaves_out_the_last_that_have_not_begun(tmp_path: Path) -> None:
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
    study.tell(1, TrialResult(outcome, values))
    study.tell(0, TrialResult(COMPLETED, (2.0,)))
    study.close()
    study = opened(tmp_path)
    first, second = study.finished()
    assert (first.number, first.told, second.number, second.told) == (1, 0, 0, 1)
    assert (first.outcome, first.values) == ends
    assert [trial.loss is not None for trial in study.losses()] == [ends == (COMPLETED, (1.5,)), True]
    study.close()


def test_islands_breed_the_same_child_whatever_was_asked_before(tmp_path: Path) -> None:
    study = opened(tmp_path)
    searched(study, "islands", 6)
    study.enqueue(8)
    child = study.begin(6, sampler_of(study, 6, "islands")).params
    law = IslandSettings(seed=0, pop_size=4)
    assert child == offspring(6, fold(study.losses(), law), SPACE, law)
    study.close()


def test_a_grid_has_every_combination_once(tmp_path: Path) -> None:
    grid: Space = {"x": Category(("a", "b")), "n": Number(2, 8, step=3, whole=True)}
    study = Study(tmp_path / "study.journal", "s", grid, ["minimize"], {})
    for _ in range(2):
        study.enqueue(6, combinations(grid))
    params = [study.begin(number, RandomSampler()).params for number in study.waiting()]
    assert params == [{"x": x, "n": n} for x in ("a", "b") for n in (2, 5, 8)]
    study.close()


def test_the_size_of_an_island_stays_as_it_was_at_first(tmp_path: Path) -> None:
    for asked in (3, 1):
        study = opened(tmp_path)
        assert study.keep("island_size", asked) == 3
        study.close()


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_date_is_a_seed(tmp_path: Path, sampler: str) -> None:
    study = opened(tmp_path)
    choice = search_of(study, settings(SPACE, sampler=sampler, n_trials=1, seed=20261125))(0)
    assert choice is not None
    study.close()


def test_a_trial_has_the_value_it_was_told_with(tmp_path: Path) -> None:
    """Optuna gives a pruned trial its last intermediate value, which is another one."""
    study = opened(tmp_path)
    study.enqueue(3)
    begun(study)
    for number in range(3):
        assert not study.prunes(number, 10, 0.9, NopPruner()) and not study.prunes(number, 20, 0.4, NopPruner())
    study.tell(0, TrialResult(PRUNED, (0.9,), seconds=100.5))
    study.tell(1, TrialResult(DIVERGED, None))
    study.tell(2, TrialResult(PRUNED, None))
    assert [trial.values for trial in study.finished()] == [(0.9,), None, None]
    by_trial, by_clock, _ = (trial.seconds for trial in study.finished())
    assert by_trial == 100.5 and by_clock is not None and by_clock < 100  # a sweep may stand still for a night
    study.close()


def test_a_run_says_how_many_seconds_it_took() -> None:
    run = {"status": "completed", "seconds": 12.5, "val": {"mse": 1.0}}
    ended = TrialExit(0, 0, {"status": "COMPLETED", "value": run})
    assert result_of(ended, ["val.mse"], 1, searching=True, stopping=False).seconds == 12.5


@pytest.mark.parametrize(
    ("value", "objective", "outcome", "reason"),
    [
        (None, None, FAILED, "the task returned None"),
        ([0.5, None], None, FAILED, "the task returned [0.5, None]"),
        ({"loss": None}, ["loss"], FAILED, "the task returned {'loss': None}"),
        ({"status": "completed", "loss": None}, ["loss"], DIVERGED, ""),  # a result.json: null is not finite
        (0.5, ["loss"], FAILED, "objective=loss: the task returned no such field, but 0.5"),
        ({"val": {"f1": 0.5, "name": "b"}, "loss": 1}, ["val.f2"], FAILED,
         "objective=val.f2: the task returned no such field, but val.f1, loss; type hydra.sweeper.objective=val.f1"),
        ({"loss": 1}, None, FAILED, "objective=val.accuracy: the task returned no such field, but loss; type"),
        ({"val.f1": 0.5}, ["val.f1"], COMPLETED, ""),
    ],
)  # fmt: skip
def test_a_failure_says_what_the_task_returned(
    value: object, objective: list[str] | None, outcome: str, reason: str
) -> None:
    ended = TrialExit(0, 0, {"status": "COMPLETED", "value": value})
    result = result_of(ended, objective, 1, searching=True, stopping=False)
    assert result.outcome == outcome and result.failure.startswith(reason) and bool(result.failure) == bool(reason)


def test_a_watch_reads_a_resumed_trial_from_its_start(tmp_path: Path) -> None:
    """A trial that goes back puts a shorter file in the place of the one that was read."""
    seen: list[tuple[int, float]] = []
    study = opened(tmp_path)
    watch = PruningWatch(study, NopPruner(), lambda number: tmp_path, "accuracy")
    file, fresh = tmp_path / "metrics.jsonl", tmp_path / "fresh"

    def write(path: Path, steps: range) -> None:
        path.write_text("".join(json.dumps({"step": n, "split": "val", "accuracy": n / 10}) + "\n" for n in steps))

    watch.start(0)
    write(file, range(1, 9))
    seen += watch._new_values(0, tmp_path)
    write(fresh, range(1, 4))
    fresh.replace(file)
    seen += watch._new_values(0, tmp_path)
    with file.open("a") as more:
        more.write('[]\n{"split": "val"}\n\n{"step": 4, "split": "val", "accuracy": [1]}\n')  # of another program
        more.write(json.dumps({"step": 4, "split": "val", "accuracy": 0.4, "note": "long" * 200}) + "\n")
    seen += watch._new_values(0, tmp_path)
    study.close()
    assert [step for step, _ in seen] == [*range(1, 9), *range(1, 4), 4]
