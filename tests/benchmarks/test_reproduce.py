"""The tables of published accuracies: rows can be run, a stopped run continues, and the page shows the results."""

import csv
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from metalearn.reporting import plots
from metalearn.reporting.figures import new_axes
from metalearn.reporting.plots import Panel, by_inner_step, curve_of
from scripts import reproduce
from scripts.reproduction.page import comparison_with_paper, page, panels_of
from scripts.reproduction.results import Result, result_of_evaluation, write_result
from scripts.reproduction.rows import LAST, TABLES, Published, Row, Table, read_tables
from tests.runs import ROOT, Outcome, Program, metrics, until

pytestmark = pytest.mark.thorough

TINY = "trainer.meta_batch_size=4 trainer.val_every=20 trainer.val_tasks=4 trainer.test_tasks=10 model.filters=16"
TABLE = f"""
title: Drawn characters
all: {TINY}
rows:
  short:
    method: MAML
    run: algorithm=maml trainer.steps=40
    paper: 0.99
    ci95: 0.01
    source: nobody
    seeds: [3]
  long:
    method: ANIL
    run: algorithm=anil trainer.steps=120 logger.tensorboard=false
    paper: {{0: 0.2, last: null}}
    seeds: [0]
  again:
    method: MAML, without the others
    of: short
    run: model.transductive=false dataset.queries=3
    paper: null
    seeds: [3]
  never:
    method: protonet
    run: algorithm=protonet trainer.steps=20
    paper: null
"""
KEYS = {
    "row", "algorithm", "dataset", "split", "ways", "shots", "queries", "accuracy", "ci95", "tasks", "task_list",
    "transductive", "by_step", "ci95_by_step", "steps", "seconds", "seed", "workers", "command", "date", "commit",
    "machine", "validation",
}  # fmt: skip
SHOWN = {
    "split": "paper", "queries": 1, "tasks": 600, "transductive": True, "steps": 1, "workers": 1, "date": "d",
    "commit": "c",
}  # fmt: skip
"""What the page shows of every result, beside its figures."""


def program(folder: Path, *arguments: str, script: str = "reproduce") -> Program:
    return Program([sys.executable, str(ROOT / "scripts" / f"{script}.py"), *arguments], folder)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Outcome]]]:
    """A folder of results, and the outcomes of three calls: one was stopped, one continued it, one drew the page."""
    folder = tmp_path_factory.mktemp("reproduced")
    (folder / "tables").mkdir()
    (folder / "tables" / "drawn.yaml").write_text(TABLE)
    places = ("--tables", str(folder / "tables"), "--output", str(folder / "out"), "--only", "long", "again")
    first = program(folder, *places, "--jobs", "2")
    outcomes = []
    try:
        row = folder / "out/runs/long/seed0"
        until(lambda: [line for line in metrics(row) if line["split"] == "val"], "a validation of the long run")
        first.process.send_signal(signal.SIGTERM)
        outcomes.append(first.wait())
        assert outcomes[0].code == 143, outcomes[0].text
        assert not (folder / "out/results/long_seed0.json").exists()
        assert (row / "checkpoints/last").exists() and not (row / "result.json").exists()
        outcomes += [program(folder, *places).wait(), program(folder, *places, "--render").wait()]
    finally:
        first.kill()
    yield folder, outcomes


def result_of(folder: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "out/results" / f"{name}.json").read_text())
    return result


def test_a_stopped_run_continues(reproduced: tuple[Path, list[Outcome]]) -> None:
    folder, (_, second, third) = reproduced
    assert second.code == 0 and third.code == 0, second.text + third.text
    log = (folder / "out/runs/long/seed0/train.log").read_text()
    assert "SIGTERM: saving, then stopping" in log and "going on after step" in log
    steps = [row["step"] for row in metrics(folder / "out/runs/long/seed0") if row["split"] == "val"]
    assert steps == list(range(20, 121, 20))


def test_a_result_is_kept_with_its_command(reproduced: tuple[Path, list[Outcome]]) -> None:
    folder, _ = reproduced
    kept = result_of(folder, "short_seed3")
    run_dir = folder / "out/runs/short/seed3"
    result = json.loads((run_dir / "result.json").read_text())
    assert set(kept) == KEYS
    assert kept["accuracy"] == result["test"]["accuracy"] and kept["seconds"] == result["seconds"]
    assert (kept["algorithm"], kept["dataset"], kept["ways"], kept["shots"]) == ("maml", "glyphs", 5, 1)
    assert (kept["seed"], kept["steps"], kept["tasks"], kept["workers"]) == (3, 40, 10, 1)
    assert kept["command"].startswith("python train.py algorithm=maml trainer.steps=40 ")
    assert kept["command"].endswith(f" seed=3 hydra.run.dir={run_dir}")
    assert f" {os.cpu_count()} core" in kept["machine"] and f"torch {version('torch')}" in kept["machine"]
    with (run_dir / "test.csv").open(newline="") as file:
        last = [float(task["accuracy_3"]) for task in csv.DictReader(file)]
    assert kept["ci95_by_step"]["3"] == pytest.approx(1.96 * statistics.stdev(last) / math.sqrt(10))
    assert kept["ci95_by_step"]["3"] == pytest.approx(kept["ci95"])
    assert kept["validation"]["steps"] == [20, 40]
    assert 0 < kept["validation"]["seconds"][0] < kept["validation"]["seconds"][1] < kept["seconds"] + 0.1


def test_a_row_may_evaluate_the_checkpoints_of_another(reproduced: tuple[Path, list[Outcome]]) -> None:
    folder, _ = reproduced
    trained, evaluated = result_of(folder, "short_seed3"), result_of(folder, "again_seed3")
    assert set(evaluated) == KEYS and evaluated["validation"] is None
    assert (trained["queries"], evaluated["queries"]) == (2, 3)
    assert (trained["transductive"], evaluated["transductive"]) == (True, False)
    assert (evaluated["steps"], evaluated["seconds"], evaluated["seed"]) == (40, trained["seconds"], 3)
    assert evaluated["command"].startswith("python scripts/evaluate.py checkpoint=")
    assert "seen_classes" not in evaluated
    assert trained["accuracy"] != evaluated["accuracy"] and trained["task_list"] != evaluated["task_list"]


def test_an_evaluation_counts_only_for_the_present_training(reproduced: tuple[Path, list[Outcome]]) -> None:
    folder, _ = reproduced
    listing = ("--tables", str(folder / "tables"), "--output", str(folder / "out"), "--only", "again", "--list")
    assert program(folder, *listing).wait().text.count(" done") == 2
    path = folder / "out/results/short_seed3.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | {"seconds": 1e6}))
        assert "again                                seed 3  not run" in program(folder, *listing).wait().text
    finally:
        path.write_text(before)


def test_the_page_shows_the_results_and_what_was_not_run(reproduced: tuple[Path, list[Outcome]]) -> None:
    folder, _ = reproduced
    text = (folder / "out/RESULTS.md").read_text()
    short, long = result_of(folder, "short_seed3"), result_of(folder, "long_seed0")
    lines = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    assert f"{short['accuracy']:.2%} ± {short['ci95']:.2%} | 99.00% ± 1.00% | *" in lines["short"]
    assert f"ANIL, 0 steps | {long['by_step']['0']:.2%}" in text and f"{long['accuracy']:.2%}" in lines["long"]
    assert "| *not run* | – |" in lines["never"]
    assert short["command"] in text and "python scripts/reproduce.py --only never  # not run" in text
    assert "![validation against time and steps](results/drawn.png)" in text
    assert (folder / "out/results/drawn.png").read_bytes().startswith(b"\x89PNG")


def test_runs_are_compared_in_one_plot(reproduced: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    folder, _ = reproduced
    runs = folder / "out/runs"
    curve = curve_of(runs / "long/seed0")
    rows = [row for row in metrics(runs / "long/seed0") if row["split"] == "val"]
    assert curve.values == [row["accuracy"] for row in rows]
    assert curve.seconds == sorted(row["elapsed_seconds"] for row in rows)
    named = (f"one={runs}/long/seed0", f"{runs}/short/seed3")
    drawn = program(tmp_path, *named, "--output", "both.png", script="compare").wait()
    assert drawn.code == 0 and (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG"), drawn.text
    refused = program(tmp_path, str(tmp_path), script="compare").wait()
    assert refused.code == 2 and "metrics.jsonl" in refused.text


def test_every_row_that_trains_can_be_composed() -> None:
    trained = [row for table in read_tables(TABLES) for row in table.rows if row.of is None]
    assert len(trained) >= 25
    for row in trained:
        compose_config([*row.overrides, "seed=0", "hydra.run.dir=x"])


def test_a_run_that_fails_is_reported_and_leaves_no_result(tmp_path: Path) -> None:
    rows = "  a: {method: M, run: algorithm=nope, seeds: [0]}\n  b: {method: M, of: a, run: dataset.ways=3, seeds: [0]}"
    (tmp_path / "bad.yaml").write_text(f"title: x\nrows:\n{rows}")
    (tmp_path / "out/runs/a/seed0/checkpoints/best").mkdir(parents=True)  # that of an earlier training
    (tmp_path / "out/runs/a/seed0.log").write_text("an earlier try\n")
    failed = program(tmp_path, "--tables", str(tmp_path), "--output", "out").wait()
    assert failed.code == 1 and "Traceback" not in failed.text, failed.text
    assert "a seed 0: failed with exit code 2\n  error: algorithm=nope: there is no such choice" in failed.text
    assert "an earlier try" not in failed.text
    assert (tmp_path / "out/runs/a/seed0.log").read_text().startswith("an earlier try\nerror: algorithm=nope")
    assert "b seed 0: left out: it evaluates a seed 0, which is not done" in failed.text
    assert not (tmp_path / "out/runs/b").exists()
    assert not list((tmp_path / "out/results").glob("*.json")) and (tmp_path / "out/RESULTS.md").exists()


def test_a_row_that_does_not_exist_is_named_before_anything_runs(tmp_path: Path) -> None:
    refused = program(tmp_path, "--only", "mamml_5w1s").wait()
    assert refused.code == 2 and "--only mamml_5w1s: no such row; allowed: maml_5w1s" in refused.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: {}", "KeyError: 'title'"),
        ("title: x\nrows:\n  a: {method: M}", "KeyError: 'run'"),
        ("title: x\nrows:\n  a: {method: M, run: b, papper: 1}", "a: papper"),
        ("title: x\nmetric: f1\nrows: {}", "metric='f1': must be one of accuracy, mse"),
        ("title: x\nby_step: 5\nrows: {}", "by_step=5: must be true or false"),
        ("title: x\nrows:\n  a: {method: M, run: b, ensemble: true}", "a: an ensemble has the seeds of the row"),
        ("title: x\nrows:\n  a: {method: M, run: b, seeds: []}", "a: seeds=[]: name one or more"),
        ("title: x\nrows:\n  a: {method: M, run: b, seeds: [x]}", "a: seed='x'"),
        ("title: x\nrows:\n  a: {method: M, run: b, paper: {first: 1}}", "a: paper, number of inner steps='first'"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tables(tmp_path)
    assert "bad.yaml" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a: {of: b, method: M, run: c=d}", "a: of=b: must name a row that trains; allowed: none here"),
        ("t: {method: M, run: c=d}, a: {of: t, method: M, run: c}, e: {of: a, method: M, run: c}", "of=a: .*: t$"),
    ],
)
def test_a_row_that_evaluates_another_needs_one_that_trains(rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(f"title: x\nrows: {{{rows}}}")
    with pytest.raises(ConfigError, match=message):
        read_tables(tmp_path)


def test_a_training_whose_checkpoint_is_gone_is_done_again_with_its_evaluations(tmp_path: Path) -> None:
    rows = "a: {method: M, run: b=c, seeds: [0]}, d: {method: D, of: a, run: '', seeds: [0]}"
    (tmp_path / "table.yaml").write_text(f"title: t\nrows: {{{rows}, e: {{method: E, of: a, run: '', seeds: [0]}}}}")
    (table,) = read_tables(tmp_path)
    places = reproduce.Places(tmp_path / "runs", tmp_path / "results", tmp_path / "page.md")
    jobs = [reproduce._job(row, 0, table.rows, places, []) for row in table.rows]
    for job in jobs[:2]:
        command = reproduce._command_line(job)
        write_result(places.results, {"row": job.row.name, "seed": 0, "command": command, "seconds": 1.0})
    assert reproduce._waiting(jobs, places) == jobs
    (tmp_path / "runs/a/seed0/checkpoints/best").mkdir(parents=True)
    for status, waiting in (("pruned", jobs), ("completed", jobs[2:])):
        assert reproduce._waiting(jobs, places) == jobs, "that training is under way: its best is not the last"
        (tmp_path / "runs/a/seed0/result.json").write_text(json.dumps({"status": status}))
        assert reproduce._waiting(jobs, places) == waiting


def test_a_training_that_fails_again_is_not_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its result is that of an earlier training, and its best checkpoint that of the failed one."""
    (tmp_path / "table.yaml").write_text("title: t\nrows: {a: {method: M, run: b=c}, d: {method: D, of: a, run: ''}}")
    (table,) = read_tables(tmp_path)
    places = reproduce.Places(tmp_path / "runs", tmp_path / "results", tmp_path / "page.md")
    training, evaluation = (reproduce._job(row, 0, table.rows, places, []) for row in table.rows)
    command = reproduce._command_line(training)
    write_result(places.results, {"row": "a", "seed": 0, "command": command, "seconds": 1.0})
    (training.run_dir / "checkpoints/best").mkdir(parents=True)
    assert reproduce.run_all([evaluation], places, 1) == reproduce.FAILED
    assert "d seed 0: left out: it evaluates a seed 0, which is not done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "metric", "after", "message"),
    [
        ({}, "mse", LAST, "metric=mse: the test of the row long has none"),
        ({}, "accuracy", "70", "has inner steps 0, 1, 2, 3, and not 70; type algorithm.eval_steps in its run"),
        ({"test": None}, "accuracy", LAST, "ended without a test"),
    ],
)
def test_a_run_without_what_its_row_asks_for_is_reported(
    changed: dict[str, Any],
    metric: str,
    after: str,
    message: str,
    reproduced: tuple[Path, list[Outcome]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = tmp_path / "runs/long/seed0"
    shutil.copytree(reproduced[0] / "out/runs/long/seed0", run_dir, symlinks=True)
    result = json.loads((run_dir / "result.json").read_text())
    (run_dir / "result.json").write_text(json.dumps(result | changed))
    row = Row("long", None, "M", metric, [], [Published(after, None, None)], "", [0], "")
    job = reproduce.Job(row, 0, run_dir, ["-c", ""], [])
    places = reproduce.Places(tmp_path / "runs", tmp_path / "results", tmp_path / "page.md")
    assert reproduce.Runs([job], places).run(1) == reproduce.FAILED
    assert "long seed 0: no result: " in (text := capsys.readouterr().err) and message in text
    assert not list(tmp_path.glob("results/*.json"))


@pytest.mark.parametrize("content", ["<<<<<<< HEAD", "[]", '{"row": "a"}'])
def test_a_damaged_result_is_named(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.yaml").write_text("title: t\nrows: {a: {method: M, run: b=c, seeds: [0]}}")
    (tmp_path / "out/results").mkdir(parents=True)
    (tmp_path / "out/results/a_seed0.json").write_text(content)
    for instead in ("--render", "--list"):
        code = reproduce.main(["--tables", str(tmp_path), "--output", str(tmp_path / "out"), instead])
        assert code == reproduce.BAD_USAGE and "results/a_seed0.json: " in capsys.readouterr().err


def test_a_result_of_another_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "t.yaml"
    table.write_text("title: t\nrows: {a: {method: M, run: b=c, paper: null, seeds: [1]}}")
    places = ["--tables", str(tmp_path), "--output", str(tmp_path / "out")]
    command = f"python train.py b=c seed=0 hydra.run.dir={tmp_path}/out/runs/a/seed0"
    result = SHOWN | {"row": "a", "seed": 0, "command": command, "seconds": 1.0, "validation": None}
    write_result(tmp_path / "out/results", result | {"accuracy": 0.5, "ci95": 0.1})
    for run, named in (("b=c", False), ("b=d", True)):
        table.write_text(table.read_text().replace("b=c", run))
        assert reproduce.main([*places, "--render"]) == reproduce.OK
        text = capsys.readouterr().err
        assert ("a seed 0: its result was made by another command" in text) is named and "seed 1" not in text


def test_the_results_here_are_those_of_the_tables() -> None:
    assert not reproduce._outdated(read_tables(TABLES), reproduce.USUAL._replace(results=ROOT / "results"), [])


def test_a_run_keeps_the_facts_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commits and machines as it went on, and nothing of the time at which it is recorded."""
    row = Row("r", None, "M", "accuracy", [], [], "", [0], "")
    job = reproduce.Job(row, 0, tmp_path / "r/seed0", ["train.py"], [])
    job.run_dir.mkdir(parents=True)
    monkeypatch.setattr(reproduce, "machine_name", lambda: "m")
    for commit, complete, expected in (
        ("1", False, "1"), ("1", False, "1"), ("2", False, "1, then 2"), ("2", False, "1, then 2"),
        ("3", True, "1, then 2"),
    ):  # fmt: skip
        monkeypatch.setattr(reproduce, "_commit", lambda commit=commit: commit)
        (job.run_dir / "result.json").write_text(f'{{"status": "{"completed" if complete else "pruned"}"}}')
        facts = reproduce._facts(job)
        assert (facts["commit"], facts["machine"], facts["command"]) == (expected, "m", "python train.py")
    longer = reproduce._facts(job._replace(command=["train.py", "trainer.steps=9"]))
    assert (longer["commit"], longer["command"]) == ("1, then 2, then 3", "python train.py trainer.steps=9")
    shutil.rmtree(job.run_dir)
    assert reproduce._facts(job)["commit"] == "3", "removed, to run again"


def test_a_new_file_is_a_change_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    git = ("git", "-c", "user.name=n", "-c", "user.email=e")
    for words in (["init", "--quiet"], ["add", "train.py"], ["commit", "--quiet", "--message", "m"]):
        subprocess.run([*git, *words], check=True)
    commit = reproduce._commit()
    assert commit is not None and not commit.endswith("+")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/new.yaml").touch()
    assert reproduce._commit() == f"{commit}+"


def test_a_complete_run_whose_checkpoints_are_gone_trains_again(reproduced: tuple[Path, list[Outcome]]) -> None:
    folder, _ = reproduced
    best = folder / "out/runs/short/seed3/checkpoints/best/params.safetensors"
    before = best.read_bytes()
    shutil.rmtree(folder / "out/runs/short/seed3/checkpoints")
    (folder / "out/results/again_seed3.json").unlink()
    outcome = program(folder, "--tables", f"{folder}/tables", "--output", f"{folder}/out", "--only", "again").wait()
    assert outcome.code == 0 and "short seed 3: trains again" in outcome.text, outcome.text
    assert best.read_bytes() == before and (folder / "out/results/again_seed3.json").exists()


def test_a_quick_evaluation_has_the_test_of_a_quick_training(tmp_path: Path) -> None:
    rows = "a: {method: M, run: b=c}, d: {method: D, of: a, run: ''}"
    (tmp_path / "table.yaml").write_text(f"title: t\nall: trainer.test_tasks=9\nrows: {{{rows}}}")
    (table,) = read_tables(tmp_path)
    for row in table.rows:
        job = reproduce._job(row, 0, table.rows, reproduce.USUAL, list(reproduce.QUICK))
        assert [word for word in job.command if "test_tasks" in word][-1] == "trainer.test_tasks=600"


def test_a_row_overrides_what_its_table_says_of_all_rows(tmp_path: Path) -> None:
    rows = "a: {method: M, run: d=e k=15}, b: {method: M, of: a, run: ''}"
    (tmp_path / "table.yaml").write_text(f"title: t\nall: s=5 k=5\nrows: {{{rows}}}")
    (table,) = read_tables(tmp_path)
    assert [row.overrides for row in table.rows] == [["d=e", "k=15", "s=5"], ["s=5", "k=5"]]


def test_an_ensemble_evaluates_all_seeds_of_a_row_together(tmp_path: Path) -> None:
    rows = "a: {method: M, run: b=c, seeds: [4, 5]}, e: {method: E, of: a, ensemble: true, run: d=e}"
    (tmp_path / "table.yaml").write_text(f"title: t\nrows: {{{rows}}}")
    (table,) = read_tables(tmp_path)
    places = reproduce.Places(tmp_path / "runs", tmp_path / "results", tmp_path / "page.md")
    job = reproduce._job(table.rows[1], 0, table.rows, places, [])
    best = [f"{tmp_path}/runs/a/seed{seed}/checkpoints/best" for seed in (4, 5)]
    assert [of.seed for of in job.of] == [4, 5]
    assert job.command[1:4] == [f"checkpoint={best[0]}", f"ensemble=[{best[1]}]", "d=e"]
    assert f" 'ensemble=[{best[1]}]' d=e " in reproduce._command_line(job), "it can be typed in a shell"
    for of in job.of:
        command = reproduce._command_line(of)
        write_result(places.results, {"row": "a", "seed": of.seed, "command": command, "seconds": 60.5})
    for seconds, done in ((121.0, True), (60.5, False)):
        command = reproduce._command_line(job)
        write_result(places.results, {"row": "e", "seed": 0, "command": command, "seconds": seconds})
        assert reproduce._is_done(job, places) is done


def test_an_evaluation_has_its_own_algorithm_seed_and_classes(tmp_path: Path) -> None:
    """Of the training it has what it took, and nothing that its own test says otherwise."""
    test = {"accuracy": 0.5, "ci95": 0.1, "tasks": 20, "by_step": {"0": 0.5}, "ci95_by_step": {"0": 0.1}}
    (tmp_path / "result.json").write_text(json.dumps({"test": test}))
    (tmp_path / "config.yaml").write_text("dataset: {split: paper, ways: 5, shots: 1, queries: 15}")
    row = Row("e", "a", "M", "accuracy", ["algorithm=tim", "dataset.queries=15"], [], "", [0], "")
    took = {"steps": 7, "seconds": 60.5, "workers": 2}
    trained = {"row": "a", "algorithm": "protonet", "dataset": "omniglot", "seed": 4, "seen_classes": {}} | took
    result = result_of_evaluation(row, 0, [trained, trained | {"seed": 5}], tmp_path, {"command": "c"})
    assert (result["row"], result["algorithm"], result["dataset"], result["seed"]) == ("e", "tim", "omniglot", 0)
    assert (result["steps"], result["seconds"], result["workers"], result["queries"]) == (7, 121.0, 2, 15)
    assert "seen_classes" not in result and result["command"] == "c"


def test_rows_on_request_run_only_if_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "rare.yaml").write_text("on_request: true\nabout: Needs more.\n" + TABLE.strip())
    (tmp_path / "usual.yaml").write_text("title: t\nrows: {a: {method: m, run: algorithm=maml, seeds: [0]}}")
    rare, usual = read_tables(tmp_path)
    assert reproduce._usual([rare, usual]) == usual.rows
    assert "\n## Drawn characters\n\nNeeds more.\n\n| row |" in page([rare, usual], {}, {})


def test_an_empty_folder_of_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tables"):
        read_tables(tmp_path)


@pytest.mark.parametrize(
    ("metric", "ours", "ci95", "paper", "paper_ci95", "expected"),
    [
        ("accuracy", 0.985, 0.003, 0.987, 0.004, "within"),
        ("accuracy", 0.9821, 0.003, 0.987, 0.004, "within"),  # 0.005 is the hypotenuse of the two
        ("accuracy", 0.9815, 0.003, 0.987, 0.004, "below"),
        ("accuracy", 0.9925, 0.003, 0.987, 0.004, "above"),
        ("accuracy", 0.985, 0.001, 0.987, None, "below"),
        ("mse", 0.60, 0.01, 0.67, None, "above"),
        ("mse", 0.70, 0.01, 0.67, None, "below"),
        ("accuracy", 0.5, 0.1, None, None, ""),
    ],
)
def test_the_comparison_with_the_paper(
    metric: str, ours: float, ci95: float, paper: float | None, paper_ci95: float | None, expected: str
) -> None:
    assert comparison_with_paper(metric, ours, ci95, Published(LAST, paper, paper_ci95)) == expected


def test_seeds_are_shown_side_by_side_and_compared_by_their_mean() -> None:
    row = Row("r", None, "M", "accuracy", ["a=b"], [Published(LAST, 0.98, 0.005)], "", [0, 1], "a note")
    common = SHOWN | {"steps": 10, "workers": 2}
    results = [
        common | {"accuracy": accuracy, "ci95": 0.002, "seconds": seconds, "command": f"seed={seed}"}
        for seed, (accuracy, seconds) in enumerate([(0.97, 60.0), (0.99, 90.0)])
    ]
    results[1]["machine"] = "a CPU, 2 cores"  # older results have none
    text = page([Table("t", "T", [row])], {"r": results}, {})
    cells = "98.00% ± 0.50% | *within* | paper | 1 | 600 | yes | 10 | 1.0, 1.5 | 2 |"
    assert f"| 97.00% ± 0.20%, 99.00% ± 0.20% | {cells}" in text
    assert "- `r`: a note" in text and "seed=0  # d, c\nseed=1  # d, c, a CPU, 2 cores\n" in text


def test_a_result_without_the_inner_steps_of_its_row_is_named() -> None:
    row = Row("r", None, "M", "accuracy", [], [Published("70", 0.98, None)], "", [0], "")
    result = SHOWN | {"row": "r", "seed": 0, "by_step": {"0": 0.2}, "seconds": 1.0, "command": "c"}
    with pytest.raises(ConfigError, match="the row r, seed 0, has inner steps 0, and not 70; remove the result"):
        page([Table("t", "T", [row])], {"r": [result]}, {})


@pytest.mark.parametrize(
    ("trained_on", "validated_on", "classes", "complete", "shown"),
    [
        (3, 2, 9, True, "; **trained or validated on 5 of 9 test classes**"),
        (3, 0, 9, False, "; **trained or validated on at least 3 of 9 test classes**"),
        (0, 0, 9, True, ""),
        (0, 0, 9, False, "; **not known which test classes it was trained on**"),
        (None, None, None, False, "; **not known which test classes it was trained on**"),
    ],
)
def test_the_page_says_which_tests_have_classes_that_were_seen(
    trained_on: int | None, validated_on: int | None, classes: int | None, complete: bool, shown: str
) -> None:
    row = Row("r", None, "M", "accuracy", ["a=b"], [Published(LAST, 0.9, None)], "", [0], "")
    counted = {"trained_on": trained_on, "validated_on": validated_on, "classes": classes, "complete": complete}
    result = SHOWN | {"accuracy": 0.9, "ci95": 0.1, "seconds": 1.0, "command": "x", "seen_classes": counted}
    assert f"| `r` | M{shown} |" in page([Table("t", "T", [row])], {"r": [result]}, {})


def test_a_machine_is_named_with_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        (tmp_path / f"0000:0{number}:00.0/information").write_text("Model: \t\t NVIDIA H100\nIRQ:   \t\t 38\n")
    monkeypatch.setattr(environment, "_GPUS", tmp_path)
    assert ", NVIDIA H100, NVIDIA H100, torch 2" in environment.machine_name()


def test_an_error_that_has_no_bound_is_written_with_an_exponent() -> None:
    row = Row("r", None, "M", "mse", ["a=b"], [Published(LAST, None, None)], "", [0, 1], "")
    common = SHOWN | {"tasks": 9, "transductive": False, "split": None}
    errors = [0.25, 1.8e18]
    results = [common | {"mse": mse, "ci95": mse / 4, "seconds": 1.0, "command": "x"} for mse in errors]
    assert "| 0.250 ± 0.062, 1.8e+18 ± 4.5e+17 |" in page([Table("t", "T", [row])], {"r": results}, {})


@pytest.mark.parametrize(
    ("longest", "scale", "labels"), [(900, "linear", None), (20_000, "symlog", ["1,000", "10,000"])]
)
def test_short_and_long_runs_can_be_told_apart(longest: int, scale: str, labels: list[str] | None) -> None:
    _, axes = new_axes(4, 4)
    for end in (0, 100, longest):  # the first has been validated before any step only
        axes.plot([0, end], [1.0, 0.5])
    plots._spread_out(axes)
    assert axes.get_xscale() == scale
    if labels is not None:
        axes.figure.canvas.draw()
        assert [label.get_text() for label in axes.get_xticklabels()][-2:] == labels


def test_a_table_may_show_its_tests_against_inner_steps(tmp_path: Path) -> None:
    """A panel for each number of shots, and the mean of the seeds, here after the steps that both have."""
    rows = [Row(name, None, "M", "mse", ["a=b"], [Published(LAST, None, None)], "", [0], "") for name in "abc"]
    common = SHOWN | {"tasks": 9, "transductive": False, "split": None}
    common |= {"mse": 1.0, "ci95": 0.1, "seconds": 1.0, "command": "x", "validation": None}
    results = {
        "a": [
            common | {"algorithm": "maml", "shots": 10, "by_step": {"0": 3.0, "1": 1.0}},
            common | {"algorithm": "maml", "shots": 10, "by_step": {"0": 5.0, "1": 2.0, "2": 9.0}},
        ],
        "b": [common | {"algorithm": "in_context", "shots": 10, "by_step": {"0": 0.5}}],
        "c": [common | {"algorithm": "maml", "shots": 5, "by_step": {"0": 4.0, "10": 2.0}}],
    }
    table = Table("t", "T", rows, by_step=True)
    panels = panels_of(table, results)
    ten = Panel("10 shots", {"maml": {0: 4.0, 1: 1.5}, "in_context": {0: 0.5}})
    assert panels == [Panel("5 shots", {"maml": {0: 4.0, 10: 2.0}}), ten]
    assert "![test against inner steps](t.png)" in page([table], results, {"t": "t.png"})
    for shown in (panels, panels[:1]):
        assert by_inner_step(shown, "mse", tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_rows_are_named_by_kind_of_test_if_they_took_little_time() -> None:
    def result(accuracy: float, transductive: bool, minutes: float, workers: int) -> Result:
        common = SHOWN | {"command": "x", "ci95": 0.01}
        chosen = {"accuracy": accuracy, "transductive": transductive, "seconds": 60 * minutes, "workers": workers}
        return common | chosen | {"by_step": {"1": 0.1}, "ci95_by_step": {"1": 0.1}}

    results = {
        "good": [result(0.97, True, 50, 2)],
        "slow": [result(0.99, True, 61, 2)],
        "better": [result(0.98, True, 119, 1), result(0.97, True, 1, 1)],
        "inductive": [result(0.5, False, 1, 1)],
    }
    published = [Published("1", None, None), Published(LAST, None, None)]
    rows = [Row(name, None, "M", "accuracy", ["a=b"], published, "", [0], "") for name in [*results, "not run"]]
    text = page([Table("t", "T", rows)], results, {})
    best = "transductive `better`, 98.00% ± 1.00%, 97.00% ± 1.00%; inductive `inductive`, 50.00% ± 1.00%."
    assert f"**Best of ours**, as chosen by this test itself, within 120 minutes of one core: {best}" in text
    assert "Best of ours" not in page([Table("t", "T", rows)], {}, {})
    of_shots = {
        name: [one | {"shots": 5 if name == "good" else 10} for one in found] for name, found in results.items()
    }
    text = page([Table("t", "T", rows, by_step=True)], of_shots, {})
    assert re.findall("with ([0-9]+ shots).*: transductive `([a-z]+)`", text) == [
        ("5 shots", "good"), ("10 shots", "better"),
    ]  # fmt: skip


def test_the_page_has_all_tables_first_and_then_all_commands() -> None:
    rows = [Row(name, None, "M", "accuracy", ["a=b"], [Published(LAST, 0.9, None)], "", [0], "") for name in "ab"]
    text = page([Table(row.name, f"Table {row.name}", [row]) for row in rows], {}, {})
    shown, _, commands = text.partition("\n## Commands\n")
    assert re.findall("^## (.+)$", shown, re.MULTILINE) == re.findall("^### (.+)$", commands, re.MULTILINE)
    assert re.findall("^## (.+)$", shown, re.MULTILINE) == ["Table a", "Table b"]
    assert [shown.count(f"| `{name}` | M |") for name in "ab"] == [1, 1] and "```" not in shown
    assert [commands.count(f"--only {name}  # not run") for name in "ab"] == [1, 1] and "| " not in commands
