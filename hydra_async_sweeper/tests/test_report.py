"""Tables, plots and the view of a sweep, on trials made by hand."""

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState
from PIL import Image

from hydra_async_sweeper.controller import SweepView
from hydra_async_sweeper.report import draw, text_table, write_tables
from hydra_async_sweeper.space import Category, Number, Params, Space, to_plain, uniform
from hydra_async_sweeper.study import Study, distribution
from hydra_async_sweeper.trials import (
    FinishedTrial,
    FinishedTrials,
    Lanes,
    StartedTrial,
    TrialResult,
    Values,
)

pytestmark = pytest.mark.thorough
slow = pytest.mark.slow

FINDS_THE_SOURCES = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "src")}

SPACE: Space = {
    "algorithm.inner_lr": Number(1e-4, 1.0, log=True),
    "model.width": Number(8, 64, step=8, whole=True),
    "algorithm": Category(("maml", "'a b'", "[1,2]")),
}


def ended(
    number: int,
    values: Values | None = None,
    outcome: str = "completed",
    *,
    params: Params | None = None,
    told: int | None = None,
    same_as: int | None = None,
    failure: str = "",
    seconds: float | None = 2.0,
) -> FinishedTrial:
    """A trial that has ended; it was told in the order of numbers unless `told` says otherwise."""
    return FinishedTrial(
        number, params or {}, outcome, values, number if told is None else told, same_as, failure, seconds
    )


BY_HAND = [
    ended(2, (0.5,), told=0, params={"algorithm.inner_lr": 0.01, "algorithm": "maml"}),
    ended(0, (0.75,), told=1, params={"algorithm.inner_lr": 0.1, "algorithm": "'a b'"}, seconds=12.25),
    ended(1, None, "failed", told=2, failure="RuntimeError: out\nof memory", seconds=None),
    ended(3, (0.9,), "pruned", told=3, params={"algorithm.inner_lr": 1e-05, "algorithm": "[1,2]"}),
    ended(4, (0.75,), told=4, params={"algorithm.inner_lr": 0.1, "algorithm": "3"}, same_as=0, seconds=0.0),
]


# Tables


def tables(folder: Path, ended: FinishedTrials, **others: Any) -> Any:
    """Writes the tables; what optimization_results.yaml holds."""
    write_tables(folder, ended, **({"total": len(ended.trials), "command": None} | others))
    return yaml.safe_load((folder / "optimization_results.yaml").read_text())


ACCURACY = FinishedTrials(BY_HAND, ["val.accuracy"], ["maximize"])


def test_trials_csv_has_a_line_for_each_trial_by_number(tmp_path: Path) -> None:
    tables(tmp_path, ACCURACY)
    assert (tmp_path / "trials.csv").read_text() == (
        "number,told,outcome,val.accuracy,seconds,same_as,failure,algorithm.inner_lr,algorithm\n"
        "0,1,completed,0.75,12.25,,,0.1,'a b'\n"
        "1,2,failed,,,,RuntimeError: out of memory,,\n"
        "2,0,completed,0.5,2.0,,,0.01,maml\n"
        '3,3,pruned,0.9,2.0,,,1e-05,"[1,2]"\n'
        "4,4,completed,0.75,0.0,0,,0.1,3\n"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"trials.csv", "optimization_results.yaml"}


def test_a_sweep_ends_with_its_trials_the_best_first() -> None:
    assert text_table(ACCURACY).splitlines() == [
        "trial  val.accuracy  algorithm.inner_lr  algorithm",
        "0      0.75          0.1                 'a b'      best",
        "4      0.75          0.1                 3",
        "2      0.5           0.01                maml",
        "1                                                   failed",
        "3      0.9           1e-05               [1,2]      pruned",
    ]
    many = [ended(number, (float(number), -float(number)), params={"x": 1}) for number in range(40)]
    front = text_table(FinishedTrials(many, ["a", "b"], ["minimize"] * 2)).splitlines()
    assert front[1].split() == ["0", "0", "-0", "1", "best"] and len(front) == 32
    assert front[-1] == "and 10 more in trials.csv"


def test_trials_csv_names_islands_and_every_objective(tmp_path: Path) -> None:
    trials = [ended(4, (1.0, 2.0)), ended(5, None, "diverged")]
    tables(tmp_path, FinishedTrials(trials, ["a", "b"], ["minimize"] * 2, Lanes("island", 3)))
    lines = [line.split(",")[:6] for line in (tmp_path / "trials.csv").read_text().splitlines()]
    assert lines == [
        ["number", "told", "outcome", "island", "a", "b"],
        ["4", "4", "completed", "1", "1.0", "2.0"],
        ["5", "5", "diverged", "2", "", ""],
    ]


def test_results_have_the_names_of_hydras_optuna_sweeper(tmp_path: Path) -> None:
    tables(tmp_path, ACCURACY, total=6, command="python train.py 'a=[1]' b=2", folder_of="trial_{:04d}".format)
    assert (tmp_path / "optimization_results.yaml").read_text() == (
        "name: async\n"
        "best_params:\n"
        "  algorithm.inner_lr: 0.1\n"
        "  algorithm: a b\n"
        "best_value: 0.75\n"
        "best_trial: 0\n"
        "best_folder: trial_0000\n"
        "command: python train.py 'a=[1]' b=2\n"
        "objectives:\n"
        "  val.accuracy: maximize\n"
        "trials:\n"
        "  total: 6\n"
        "  completed: 3\n"
        "  pruned: 1\n"
        "  diverged: 0\n"
        "  failed: 1\n"
    )


def test_results_of_several_objectives_are_the_pareto_front(tmp_path: Path) -> None:
    trials = [ended(0, (0.9, 5.0), params={"a": 1}), ended(1, (0.8, 5.0)), ended(2, (0.7, 4.0), params={"a": 2})]
    both = FinishedTrials(trials, ["x", "y"], ["maximize", "minimize"])
    results = tables(tmp_path, both, command="python train.py a=2")
    assert results["solutions"] == [
        {"params": {"a": 1}, "values": [0.9, 5.0], "trial": 0, "folder": "0"},
        {"params": {"a": 2}, "values": [0.7, 4.0], "trial": 2, "folder": "2"},
    ]
    assert "best_params" not in results


def test_results_without_a_completed_trial_name_none(tmp_path: Path) -> None:
    results = tables(tmp_path, FinishedTrials([ended(0, None, "diverged")], ["x"], ["minimize"]))
    assert {results[key] for key in ("best_params", "best_value", "best_trial", "best_folder")} == {None}
    assert results["trials"] == {"total": 1, "completed": 0, "pruned": 0, "diverged": 1, "failed": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("3", 3), ("1e-3", 0.001), ("null", None), ("maml", "maml"), ("'3'", "3"), ("[1,2]", "[1,2]")],
)
def test_best_params_have_the_values_that_hydra_reads(tmp_path: Path, text: str, value: object) -> None:
    trials = [ended(0, (1.0,), params={"a": text})]
    assert tables(tmp_path, FinishedTrials(trials, ["x"], ["minimize"]))["best_params"] == {"a": value}


def test_two_processes_may_write_the_tables_at_once(tmp_path: Path) -> None:
    child = os.fork()
    try:
        for _ in range(200):
            write_tables(tmp_path, ACCURACY, total=6, command=None)
    finally:
        if child == 0:
            os._exit(1 if sys.exc_info()[0] else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"trials.csv", "optimization_results.yaml"}


# The best trials


def best(trials: Sequence[FinishedTrial], *directions: str) -> list[FinishedTrial]:
    return FinishedTrials(trials, ["x"] * len(directions), directions).best()


def test_the_best_trial_is_the_earliest_of_equal_completed_ones() -> None:
    assert [trial.number for trial in best(BY_HAND, "maximize")] == [0]
    assert [trial.number for trial in best(BY_HAND, "minimize")] == [2]
    assert best([], "minimize") == []


def test_the_pareto_front_by_hand() -> None:
    #  b
    #  4  0 .  .  .      a: higher is better, b: lower is better
    #  3  .  1  .  4     3 equals 2; 1 has the a of 2 and 3 but a higher b; 0 loses to all; 5 was pruned
    #  2  .  2  .  .
    #  1  6  .  .  .
    values = {0: (1.0, 4.0), 1: (2.0, 3.0), 2: (2.0, 2.0), 3: (2.0, 2.0), 4: (4.0, 3.0), 6: (1.0, 1.0)}
    trials = [*(ended(number, pair) for number, pair in values.items()), ended(5, (9.0, 0.0), "pruned")]
    assert [trial.number for trial in best(trials, "maximize", "minimize")] == [2, 3, 4, 6]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=30))
def test_the_pareto_front_is_what_no_other_trial_beats(points: list[tuple[int, int, int]]) -> None:
    trials = [ended(number, tuple(map(float, point))) for number, point in enumerate(points)]

    def beats(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return a[0] <= b[0] and a[1] >= b[1] and a[2] <= b[2] and a != b

    expected = [n for n, point in enumerate(points) if not any(beats(other, point) for other in points)]
    front = best(random.Random(0).sample(trials, len(trials)), "minimize", "maximize", "minimize")
    assert [trial.number for trial in front] == expected


def test_a_lineage_goes_back_to_the_first_round() -> None:
    parents = {0: None, 1: None, 4: 1, 5: 1, 9: 4}
    trials = [ended(number)._replace(parent=parent) for number, parent in parents.items()]
    assert [trial.number for trial in FinishedTrials(trials, ["x"], ["minimize"]).lineage(9)] == [1, 4, 9]


def study_of(folder: Path, space: Space, directions: Sequence[str], values: Sequence[Values]) -> Study:
    """A study with a trial for each of the values, whose parameters are drawn at random."""
    identity = {"space": to_plain(space), "objective": ["val.accuracy", "seconds"][: len(directions)],
                "directions": list(directions), "sampler": "random", "islands": {}}  # fmt: skip
    study = Study(folder / "study.journal", "sweep", space, list(directions), identity)  # type: ignore[arg-type]
    study.enqueue(len(values))
    for number, pair in enumerate(values):
        study.begin(number, optuna.samplers.RandomSampler(seed=number))
        study.tell(number, TrialResult("completed", pair))
    return study


# Plots


LONG: Space = {
    "algorithm.inner.learning_rate_schedule.warmup_fraction_of_all_steps": Number(1e-5, 1.0, log=True),
    "algorithm": Category(("maml", "anil", "a_very_long_name_of_an_algorithm_that_nobody_types")),
    "model.width": Number(8, 512, log=True, whole=True),
    "optimizer.momentum": Number(0, 0.9, step=0.1),
    "model.depth": Number(1, 6, whole=True),
    "training.clip": Number(-1.5, 2.5),
    "data.path": Category(("'${oc.env:A}'", "'$x$y'", "[1,2,3]", "数据")),
    "many": Category(tuple(f"option_{number}" for number in range(40))),
    "seed": Category(("0",)),
    "narrow": Number(0.4, 0.9, log=True),
}


def made_up(count: int, dimensions: int, objectives: int = 1, *, completed: bool = True) -> list[FinishedTrial]:
    """Trials of every outcome; the first has completed, unless none has."""
    rng = random.Random(0)
    trials = []
    for number in range(count):
        outcome = "completed" if completed and number % 5 != 4 else rng.choice(["pruned", "diverged", "failed"])
        has_values = outcome == "completed" or (outcome == "pruned" and number % 2 == 0)
        values = tuple(rng.lognormvariate(0, 3) for _ in range(objectives)) if has_values else None
        params = {key: uniform(rng, dimension) for key, dimension in list(LONG.items())[:dimensions]}
        trials.append(ended(number, values, outcome, params={} if outcome == "failed" else params))
    return trials


def plots(folder: Path, ended: FinishedTrials, space: Space) -> set[str]:
    """Draws the plots of trials, of which those that were pruned have reported values; their names."""
    study = optuna.create_study(directions=list(ended.directions))
    states = {"completed": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    for trial in ended.trials:
        state = states.get(trial.outcome, TrialState.FAIL)
        study.add_trial(
            optuna.trial.create_trial(
                state=state, params=trial.params, values=trial.values if state == TrialState.COMPLETE else None,
                distributions={key: distribution(space[key]) for key in trial.params},
                intermediate_values={5: 0.5} if trial.outcome == "pruned" and len(ended.objectives) == 1 else None,
            )
        )  # fmt: skip
    paths = draw(folder, study, ended, space)
    assert set((folder / "plots").iterdir()) == set(paths)
    for path in paths:  # each is a whole PNG file in which something is drawn
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert 600 <= image.width <= 2600 and 150 <= image.height <= 1800, (path.name, image.size)
            shades = image.convert("L").histogram()
            assert sum(shades[:100]) > 0 and shades[255] > 0
    return {path.stem for path in paths}


BY_OPTUNA = {"history", "parallel", "slice", "timeline"}


def first(dimensions: int) -> Space:
    return dict(list(LONG.items())[:dimensions])


@pytest.mark.parametrize(
    ("count", "dimensions"),
    [(60, 4), *(pytest.param(*case, marks=slow) for case in ((1, 1), (5, 10), (200, 1), (60, 10)))],
)
def test_plots_of_few_and_many_trials(tmp_path: Path, count: int, dimensions: int) -> None:
    trials = made_up(count, dimensions)
    names = BY_OPTUNA | ({"importance"} if count >= 60 else set())
    names |= {"intermediate"} if any(trial.outcome == "pruned" for trial in trials) else set()
    assert plots(tmp_path, FinishedTrials(trials, ["val.mse"], ["minimize"]), first(dimensions)) == names


@pytest.mark.parametrize("objectives", [1, pytest.param(2, marks=slow), pytest.param(3, marks=slow)])
def test_plots_without_a_completed_trial(tmp_path: Path, objectives: int) -> None:
    trials = made_up(9, 3, objectives, completed=False)
    ended = FinishedTrials(trials, list("xyz")[:objectives], ["minimize"] * objectives, Lanes("island", 3))
    assert plots(tmp_path, ended, first(3)) == {"timeline", *(["intermediate"] if objectives == 1 else [])}


@pytest.mark.parametrize("count", [pytest.param(1, marks=slow), 12, pytest.param(60, marks=slow)])
def test_plots_of_two_objectives(tmp_path: Path, count: int) -> None:
    objectives = ["val.accuracy_after_ten_inner_steps_on_characters_of_new_alphabets", "seconds"]
    ended = FinishedTrials(made_up(count, 3, 2), objectives, ["maximize", "minimize"])
    assert plots(tmp_path, ended, first(3)) == BY_OPTUNA | {"history_1", "parallel_1", "slice_1", "front"}


@slow  # tests/sweeps/test_pbt.py has this plot in the default set
def test_plots_of_a_population(tmp_path: Path) -> None:
    trials = [trial._replace(parent=trial.number - 4 if trial.number > 3 else None) for trial in made_up(16, 4)]
    ended = FinishedTrials(trials, ["val.mse"], ["minimize"], Lanes("member", 4, by_round=True))
    assert "population" in plots(tmp_path, ended, first(4))


@pytest.mark.parametrize("value", [0.0, pytest.param(-3.0, marks=slow), pytest.param(1e300, marks=slow)], ids=str)
def test_plots_of_equal_values_rank_no_parameter(tmp_path: Path, value: float) -> None:
    trials = [ended(number, (value,), params={"seed": "0"}) for number in range(12)]
    assert plots(tmp_path, FinishedTrials(trials, ["x"], ["minimize"]), {"seed": LONG["seed"]}) == BY_OPTUNA


# The view


class Clock:
    """Seconds that pass only when they are set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr("hydra_async_sweeper.controller.time", self)

    def monotonic(self) -> float:
        return self.now


def test_the_view_logs_a_line_when_a_trial_starts_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hydra_async_sweeper")
    clock = Clock(monkeypatch)
    earlier = [ended(n, (0.5,), seconds=30.0) for n in range(6)]
    earlier[3] = ended(3, (0.9512,), seconds=30.0)
    done = FinishedTrials(earlier, ["val.accuracy"], ["maximize"])
    view = SweepView(24, 2, done)
    view.start(StartedTrial(6, {"algorithm.inner_lr": 0.0123456, "algorithm": "maml"}))
    view.start(StartedTrial(7, {}))
    clock.now = 30.0
    view.end(ended(7, (0.93121,), seconds=12.31))
    view.end(ended(6, None, "failed", failure="exit code 1\nin its process", seconds=95.0))
    view.end(ended(8, (0.99,), same_as=4, seconds=None))
    assert [record.getMessage() for record in caplog.records] == [
        "trial 6: starts with algorithm.inner_lr=0.01235 algorithm=maml",
        "trial 7: starts with the defaults",
        # 30 s each: trial 6 may end at once, so 16 more trials take 8 rounds
        "trial 7: completed, val.accuracy 0.9312, 12.3 s; best 0.9512 (trial 3); 7 of 24 done, about 0:04:00 left",
        "trial 6: failed (exit code 1 in its process), 0:01:35; best 0.9512 (trial 3); 8 of 24 done, "
        "about 0:04:00 left",
        "trial 8: completed (same as trial 4), val.accuracy 0.99; best 0.99 (trial 8); 9 of 24 done, "
        "about 0:03:45 left",
    ]


def test_the_view_logs_no_missing_best_trial_or_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hydra_async_sweeper")
    none = FinishedTrials([], ["a", "b"], ["minimize", "minimize"])
    view = SweepView(2, 2, none)
    view.end(ended(0, None, "diverged", seconds=None))
    view.end(ended(1, (1.0, 2e-7), seconds=0.25))
    assert [record.getMessage() for record in caplog.records] == [
        "trial 0: diverged; 1 of 2 done",
        "trial 1: completed, a 1, b 2e-07, 0.2 s; Pareto front of 1 trial; 2 of 2 done",
    ]


# The script


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the report where torch cannot be imported."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        f"sys.argv[1:] = {list(arguments)!r}; runpy.run_module('hydra_async_sweeper.report', run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=FINDS_THE_SOURCES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_script_draws_the_plots_of_a_running_sweep(tmp_path: Path) -> None:
    study = study_of(tmp_path, SPACE, ["maximize"], [(0.5,), (0.75,), (0.625,)])
    study.enqueue(5)
    study.begin(3, optuna.samplers.RandomSampler(seed=3))  # under way
    with (tmp_path / "study.journal").open("a") as journal:
        journal.write('{"op_code":')  # another process is writing a line
    before = contents(tmp_path)
    run = run_script(str(tmp_path))
    assert run.returncode == 0, run.stderr
    after = contents(tmp_path)
    assert after == before
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"{name}.png" for name in BY_OPTUNA}
    study.close()


def damaged(folder: Path) -> None:
    study_of(folder, SPACE, ["maximize"], [(0.5,)]).close()
    lines = (folder / "study.journal").read_bytes().splitlines(keepends=True)
    (folder / "study.journal").write_bytes(b"".join([*lines[:3], b"\x00\xff{broken\n", *lines[3:]]))


def of_another_program(folder: Path) -> None:
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    optuna.create_study(storage=optuna.storages.JournalStorage(journal), study_name="sweep")


def two_studies(folder: Path) -> None:
    for name in ("one", "two"):
        Study(folder / "study.journal", name, SPACE, ["maximize"], {}).close()


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda folder: None, [], "study.journal: there is no such journal"),
        (lambda folder: (folder / "study.journal").touch(), [], "holds no study yet"),
        (damaged, [], "study.journal: "),
        pytest.param(of_another_program, [], "has no identity", marks=slow),
        (two_studies, [], "holds one, two; type --study-name one"),
        pytest.param(two_studies, ["--study-name", "three"], "type --study-name one", marks=slow),
    ],
    ids=["no journal", "no study", "damaged", "another program", "two studies", "unknown study"],
)
def test_the_script_refuses(tmp_path: Path, make: Callable[[Path], None], arguments: list[str], message: str) -> None:
    make(tmp_path)
    before = contents(tmp_path)
    run = run_script(str(tmp_path), *arguments)
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    assert run.stderr.startswith("error: ") and message in run.stderr and "Traceback" not in run.stderr
    assert contents(tmp_path) == before
