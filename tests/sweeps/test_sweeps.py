"""Sweeps of the real program: exact totals, the bits of plain runs, kills of every kind of process."""

import json
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from metalearn.app.job import script
from metalearn.app.sweep import check_trials, reason_in
from metalearn.config.compose import compose_sweeper
from metalearn.errors import ConfigError
from metalearn.runs.folder import lock
from tests.runs import ROOT, Program, slow, until, why_not_isolable
from tests.sweeps.programs import FIXED, PLOTS, completed, params, rows, run_until_killed, sweep

pytestmark = pytest.mark.thorough

SPACE = ("algorithm.inner_lr=tag(log,interval(1e-3,1e-1))", "trainer.steps=choice(40,120)")
SEARCH = ("hydra/sweeper=async", "hydra.sweeper.sampler=random", "hydra.sweeper.n_trials=5", "hydra.sweeper.n_jobs=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "sweep"
    yield folder, completed(folder, *SPACE, *SEARCH, PLOTS)


def test_every_trial_is_there_once_with_the_bits_of_a_plain_run(undisturbed: tuple[Path, str]) -> None:
    folder, text = undisturbed
    table = rows(folder)
    assert [row["number"] for row in table] == ["0", "1", "2", "3", "4"]
    assert {row["outcome"] for row in table} == {"completed"}
    assert len({row["algorithm.inner_lr"] for row in table}) == 5
    best = min(table, key=lambda row: float(row["val.mse"]))
    results = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    assert results["best_value"] == float(best["val.mse"])
    assert results["best_params"]["algorithm.inner_lr"] == float(best["algorithm.inner_lr"])
    assert results["best_folder"] == f"trial_{int(best['number']):04d}" and results["trials"]["total"] == 5
    assert f"the best configuration: {results['command']}" in text
    assert (folder / "multirun.yaml").exists() and (folder / "plots/history.png").exists()

    command = results["command"].split()
    assert command[:2] == ["python", "train.py"] and command[-1] == "run=best"
    plain = folder.parent / "plain"
    outcome = Program(
        [sys.executable, str(ROOT / "train.py"), *command[2:], f"hydra.run.dir={plain}"], folder.parent
    ).wait()
    assert outcome.code == 0, outcome.text
    assert (plain / "checkpoints/last/params.safetensors").read_bytes() == params(folder)[results["best_folder"]]
    assert not (folder / results["best_folder"] / "plots").exists()  # trials draw none


def test_a_larger_total_adds_trials(undisturbed: tuple[Path, str]) -> None:
    folder, _ = undisturbed
    before = {path: path.stat().st_mtime_ns for path in folder.glob("trial_*/result.json")}
    text = completed(folder, *SPACE, *SEARCH, "hydra.sweeper.n_trials=6")
    assert "trial 5: starts" in text and "trial 4: starts" not in text
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(rows(folder)) == 6


def test_another_space_in_the_same_folder_is_refused(undisturbed: tuple[Path, str]) -> None:
    folder, _ = undisturbed
    other = sweep(folder, "algorithm.inner_lr=interval(0.001,0.5)", *SEARCH).wait()
    assert other.code == 2, other.text
    assert "space.algorithm.inner_lr.high: 0.1 → 0.5" in other.text
    assert "hydra.sweeper.study_name=NAME" in other.text
    shorter = sweep(folder, *SPACE, *SEARCH, "pause_after=10").wait()
    assert shorter.code == 2 and "config.pause_after: None → 10" in shorter.text, shorter.text


RATE, PBT = "algorithm.inner_lr=interval(0.1,1)", ("hydra/sweeper=pbt", "trainer.steps=91", "optimizer.lr=1e-3,1e-2")

REFUSED: dict[str, tuple[str, ...]] = {
    "algorithm.inner_lr=interval(0.1,0.01): ": (*SEARCH, "algorithm.inner_lr=interval(0.1,0.01)"),
    "did you mean algorithm.inner_lr": (*SEARCH, "algorithm=maml", "algorithm.iner_lr=interval(0.1,1)"),
    "algorithm.inner_lr=-1.0": (*SEARCH, "algorithm.inner_lr=interval(-1,1)"),
    "hydra.sweeper.objective=val.accuracy": (*SEARCH, RATE, "hydra.sweeper.objective=val.accuracy"),
    "model: it cannot take": (*SEARCH, RATE, "dataset=glyphs"),
    "model=nope": (*SEARCH, "model=mlp,nope"),
    "hydra.sweeper.pruner=median": (*SEARCH, RATE, "hydra.sweeper.pruner=median", "hydra.sweeper.objective=seconds"),
    "val.mse or val.mae?": (*SEARCH, "metric=mse,mae"),
    "algorithm=protonet": (*SEARCH, RATE, "algorithm=maml,protonet"),
    "trainer.steps: all members": (*PBT, "trainer.steps=91,92"),
    "gives the model other parameters": (*PBT, "model.hidden=[40,40],[20,20]"),
    "hydra.sweeper.rounds=92: trainer.steps=91": (*PBT, "hydra.sweeper.rounds=92"),
    "pause_after=9": (*PBT, "pause_after=9"),
    "n_trials: there is no such key; type hydra.sweeper.n_trials": (*SEARCH, RATE, "n_trials=3"),
    "hydra.sweeper.objective=test.mse": (*PBT, "hydra.sweeper.objective=test.mse"),
}
"""From what the message names to the overrides."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_search_that_cannot_run_is_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [*FIXED, *REFUSED[name]]
    try:
        checked = check_trials(script(ROOT / "train.py"), overrides, compose_sweeper(overrides)[0])
        assert checked == 2
        text = capfd.readouterr().err  # of the child that has checked the trials
    except ConfigError as error:
        text = str(error)
    assert name in text, text
    assert ("the search combines it" in text) == (name == "algorithm=protonet")  # where a group is searched


@pytest.mark.parametrize(
    ("override", "message"),
    [("metric=mse,mae", "val.mse or val.mae?"), ("hydra.sweep.subdir=same", "hydra.sweep.subdir=same: all trials")],
)
def test_a_sweep_that_cannot_run_makes_no_folder(tmp_path: Path, override: str, message: str) -> None:
    outcome = sweep(tmp_path / "sweep", *SEARCH, RATE, override).wait()
    assert outcome.code == 2 and message in outcome.text, outcome.text
    assert not (tmp_path / "sweep").exists() and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(("words", "objective"), [((), "val.top_k"), (("trainer.best_by=loss",), "val.loss")])
def test_a_search_ranks_as_a_run_does(words: tuple[str, ...], objective: str) -> None:
    """By what chooses the best validation; and metrics of which more is better are maximised."""
    sweeper = compose_sweeper(["hydra/sweeper=async"])[0]
    overrides = ["experiment=maml_glyphs", "metric=top_k", "metric.k=2", "optimizer.lr=choice(1e-9,0.003)", *words]
    checked = check_trials(script(ROOT / "train.py"), overrides, sweeper)
    assert not isinstance(checked, int) and checked.objective == objective
    assert set(checked.maximized) == {"accuracy", "top_k", "f1", "exact_match", "score"}


def test_the_command_of_the_best_configuration_can_be_typed(tmp_path: Path) -> None:
    search = ("experiment=maml_sinusoid", "trainer.steps=2", "seed=range(0,9)", *SEARCH, "hydra.sweeper.n_trials=1")
    outcome = Program([sys.executable, "-m", "metalearn", "sweep", *search, "workers=1"], tmp_path).wait()
    assert outcome.code == 0, outcome.text
    assert "the best configuration: python -m metalearn train experiment=maml_sinusoid " in outcome.text


def test_an_unexpected_error_in_the_check_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> int:
        raise KeyError("of the user's own network")

    monkeypatch.setattr("metalearn.app.sweep._check", fail)
    with pytest.raises(ConfigError, match="the check of the trials has ended with exit code 1"):
        check_trials(script(ROOT / "train.py"), ["seed=range(0,9)"], compose_sweeper(["hydra/sweeper=async"])[0])
    assert 'KeyError: "of the user\'s own network"' in capfd.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "sweep").touch()
    outcome = sweep(tmp_path / "sweep", "seed=range(0,9)", *SEARCH).wait()
    assert outcome.code == 2, outcome.text
    assert f"error: hydra.sweep.dir={tmp_path}/sweep: cannot be written: Not a directory; type hydra" in outcome.text


def test_more_failures_than_allowed_are_listed_at_the_end(tmp_path: Path) -> None:
    """Every trial's folder is a file already."""
    for number in range(5):
        (tmp_path / f"trial_{number:04d}").touch()
    outcome = sweep(tmp_path, "seed=range(0,9)", *SEARCH, "hydra.sweeper.max_retries=0").wait()
    assert outcome.code == 1, outcome.text
    assert "error: 5 of 5 trials have failed, and hydra.sweeper.max_failure_rate=0:\n  trial " in outcome.text
    assert "Traceback" not in outcome.text.rpartition("5 of 5 trials have failed")[2]


@slow
def test_equal_parameters_are_not_trained_twice(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    search = (*SEARCH[:2], "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2")
    completed(folder, "trainer.steps=40", "algorithm.inner_lr=choice(0.01,0.02)", *search)
    table = rows(folder)
    trained = [row for row in table if not row["same_as"]]
    assert len(table) == 4 and len(trained) == len({row["algorithm.inner_lr"] for row in table}) <= 2
    by_number = {row["number"]: row for row in table}
    for row in table:
        if row["same_as"]:
            twin = by_number[row["same_as"]]
            assert (row["val.mse"], row["algorithm.inner_lr"]) == (twin["val.mse"], twin["algorithm.inner_lr"])
    longer = sweep(folder, "trainer.steps=80", "algorithm.inner_lr=choice(0.01,0.02)", *search).wait()
    assert longer.code == 2 and "config.trainer.steps: 40 → 80" in longer.text, longer.text


def test_a_diverged_and_a_refused_trial_do_not_end_the_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    options = ("hydra/sweeper=async", "hydra.sweeper.n_jobs=2")
    completed(folder, "trainer.steps=40", "algorithm.inner_lr=1e30,0.01", *options)
    table = {row["algorithm.inner_lr"]: row for row in rows(folder)}
    assert table["1e+30"]["outcome"] == "diverged" and table["0.01"]["outcome"] == "completed"
    result = json.loads((folder / "trial_0000/result.json").read_text())
    assert result["status"] == "diverged" and result["steps"] < 40
    assert yaml.safe_load((folder / "optimization_results.yaml").read_text())["best_trial"] == 1


# Kills


def killed_sweep(folder: Path, kinds: list[str], seed: int, *overrides: str) -> None:
    """Runs a sweep to its end, with a kill of each kind at a random moment on the way."""
    rng = random.Random(seed)
    for kind in kinds:
        run_until_killed(sweep(folder, *SPACE, *SEARCH, *overrides), kind, rng.uniform(0, 4))
    completed(folder, *SPACE, *SEARCH, *overrides)


def assert_same(folder: Path, undisturbed: Path) -> None:
    assert len(rows(folder)) == 5 and {row["outcome"] for row in rows(folder)} == {"completed"}
    whole = params(undisturbed)
    assert params(folder) == {name: whole[name] for name in params(folder)} and len(params(folder)) == 5
    keys = ("number", "val.mse", "algorithm.inner_lr", "trainer.steps")
    both = [[[row[key] for key in keys] for row in rows(where)[:5]] for where in (folder, undisturbed)]
    assert both[0] == both[1]


@slow
def test_kills_lose_no_trial_and_no_bit(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    killed_sweep(tmp_path / "sweep", ["controller", "nursery", "trial"], 1)
    assert_same(tmp_path / "sweep", undisturbed[0])


@slow
def test_ten_kills_lose_no_trial_and_no_bit(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    kinds = ["controller", "trial", "nursery", "controller", "trial", "nursery", "controller", "controller", "nursery"]
    killed_sweep(tmp_path / "sweep", [*kinds, "trial"], 2)
    assert_same(tmp_path / "sweep", undisturbed[0])


@slow
def test_a_run_that_ended_unseen_is_told_on_resume(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    folder = tmp_path / "sweep"
    shutil.copytree(undisturbed[0], folder, symlinks=True)
    whole = rows(folder)
    journal = folder / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    (last, *_) = [at for at, line in enumerate(lines) if b'"told":%d,' % (len(whole) - 1) in line]
    journal.write_bytes(b"".join(lines[:last]))
    (folder / "trials.csv").unlink()
    shutil.rmtree(folder / "plots")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("trial_*/result.json")}
    completed(folder, *SPACE, *SEARCH, PLOTS)
    keys = ("number", "told", "outcome", "val.mse", "algorithm.inner_lr", "trainer.steps")
    assert [[row[key] for key in keys] for row in rows(folder)] == [[row[key] for key in keys] for row in whole]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (folder / "plots/history.png").exists()


def test_a_trial_waits_for_an_orphaned_process(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with lock(folder / "trial_0000"):
        program = sweep(folder, "trainer.steps=4", "algorithm.inner_lr=0.01,0.02", *SEARCH[:1])
        log = folder / "logs/trial_0000.log"
        until(lambda: log.exists() and ": waiting" in log.read_text(), "the wait")
    outcome = program.wait()
    assert outcome.code == 0, outcome.text
    assert [row["outcome"] for row in rows(folder)] == ["completed", "completed"]


def test_a_stopped_sweep_saves_and_resumes(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    program = sweep(tmp_path / "sweep", *SPACE, *SEARCH)
    until(lambda: any((tmp_path / "sweep").glob("trial_*/metrics.jsonl")), "a step")
    program.process.send_signal(signal.SIGTERM)
    outcome = program.wait()
    assert outcome.code == 143, outcome.text
    assert "the same command resumes the sweep" in outcome.text
    completed(tmp_path / "sweep", *SPACE, *SEARCH)
    assert_same(tmp_path / "sweep", undisturbed[0])


# Other launchers


@slow  # tests/faults/test_slurm.py has submitit in the default set
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_launchers_give_the_same_bits(tmp_path: Path, launcher: str, undisturbed: tuple[Path, str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher" if launcher == "joblib" else "submitit")
    completed(tmp_path / "sweep", *SPACE, *SEARCH[:2], "hydra.sweeper.n_trials=2", f"hydra/launcher={launcher}")
    whole = params(undisturbed[0])
    found = params(tmp_path / "sweep")
    assert len(found) == 2 and found == {name: whole[name] for name in found}


@slow
def test_a_sweep_of_two_workers_has_the_same_bits(tmp_path: Path, undisturbed: tuple[Path, str]) -> None:
    completed(tmp_path / "sweep", *SPACE, *SEARCH[:2], "hydra.sweeper.n_trials=2", "workers=2")
    whole = params(undisturbed[0])
    found = params(tmp_path / "sweep")
    assert len(found) == 2 and found == {name: whole[name] for name in found}
    log = (tmp_path / "sweep/logs/trial_0000.log").read_text()
    assert "2 workers" in log
    assert ("in a network of this run's own" in log) == (why_not_isolable() is None), log
    assert not list((tmp_path / "sweep").glob("trial_*/plots"))


@slow
def test_trials_of_two_workers_with_two_threads_each_end(tmp_path: Path) -> None:
    """Their ranks cannot be forks of the trial, whose threads the check of its parts has started."""
    search = ("hydra/sweeper=async", "workers=2", "threads=2", "trainer.steps=2", "algorithm.inner_lr=0.01,0.02")
    completed(tmp_path / "sweep", *search)
    assert [row["outcome"] for row in rows(tmp_path / "sweep")] == ["completed", "completed"]


def test_the_last_line_of_a_log_says_why_a_trial_has_failed(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    for lines, reason in (
        ("2026-01-02 03:04:05,678  DEBUG    ended by RunError: the link is gone\n", "the link is gone"),
        ("2026-01-02 03:04:05,678  ERROR    the run failed\nTraceback\nOSError: [Errno 5]\n\n", "OSError: [Errno 5]"),
        ("", "nothing is in its log"),
    ):  # fmt: skip
        log.write_text(lines)
        assert reason_in(log) == reason
    log.unlink()
    assert reason_in(log) == "its log cannot be read: No such file or directory"


@slow
def test_the_grid_of_hydra_is_as_before(tmp_path: Path) -> None:
    outcome = sweep(tmp_path / "sweep", "trainer.steps=4", "seed=0,1").wait()
    assert outcome.code == 0, outcome.text
    folders = sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/result.json"))
    assert [name.partition(",")[0] for name in folders] == ["seed=0", "seed=1"]
