"""The rows of RESULTS.md can be run anew, a stopped run continues, and the page shows the results."""

import csv
import json
import math
import re
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import reproduce
from benchmarks.reproduce import LAST, ResultRow, ResultTable, read_results, read_tables, write_results
from benchmarks.results_page import (
    BESIDE_PAPERS,
    PICTURES,
    comparison_with_paper,
    curves_of,
    curves_picture,
    page,
    rows_picture,
)
from metalearn.config.compose import compose_config
from metalearn.errors import ConfigError
from tests.runs import ROOT, Outcome, Program, metrics, slow, until

pytestmark = pytest.mark.thorough

TINY = "trainer.meta_batch_size=4 trainer.val_every=20 trainer.val_tasks=4 trainer.test_tasks=10 model.filters=16"
TABLE = f"""
- title: Drawn characters
  all: {TINY}
  rows:
    short: {{method: MAML, run: algorithm=maml trainer.steps=40, paper: 0.99, ci95: 0.01, source: nobody, seeds: [3]}}
    long: {{method: ANIL, run: algorithm=anil trainer.steps=80, paper: {{0: 0.2, last: null}}, seeds: [0]}}
    again: {{method: MAML, of: short, run: model.transductive=false dataset.queries=3, seeds: [3]}}
    never: {{method: protonet, run: algorithm=protonet trainer.steps=20}}
"""
KEYS = {
    "row", "algorithm", "dataset", "split", "ways", "shots", "queries", "accuracy", "ci95", "tasks", "task_list",
    "transductive", "by_step", "ci95_by_step", "steps", "seconds", "seed", "workers", "command", "date", "commit",
    "machine", "validation",
}  # fmt: skip


def program(folder: Path, *arguments: str) -> Program:
    return Program([sys.executable, "-m", "metalearn", "reproduce", *arguments], folder, {"PYTHONPATH": str(ROOT)})


def places(folder: Path, *rows: str) -> list[str]:
    return ["--tables", str(folder / "tables"), "--output", str(folder / "out"), *(["--only", *rows] if rows else [])]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Outcome]]:
    """A folder of results, and the outcome of the second call: the first one was stopped in the long run."""
    folder = tmp_path_factory.mktemp("reproduced")
    (folder / "tables").mkdir()
    (folder / "tables/drawn.yaml").write_text(TABLE)
    first = program(folder, *places(folder, "long", "again"))
    try:
        row = folder / "out/runs/long/seed0"
        until(lambda: [line for line in metrics(row) if line["split"] == "val"], "a validation of the long run")
        first.process.send_signal(signal.SIGTERM)
        stopped = first.wait()
        assert stopped.code == 143, stopped.text
        assert (row / "checkpoints/last").exists() and not (row / "result.json").exists()
        assert not list(folder.glob("out/results/*"))
        yield folder, program(folder, *places(folder, "long", "again")).wait()
    finally:
        first.kill()


def result_of(folder: Path, row: str, seed: int) -> dict[str, Any]:
    return read_results(folder / "out/results")[row, seed]


@slow
def test_a_stopped_run_continues(reproduced: tuple[Path, Outcome]) -> None:
    folder, second = reproduced
    assert second.code == 0, second.text
    log = (folder / "out/runs/long/seed0/train.log").read_text()
    assert "SIGTERM: saving, then stopping" in log and "going on after step" in log
    steps = [row["step"] for row in metrics(folder / "out/runs/long/seed0") if row["split"] == "val"]
    assert steps == list(range(20, 81, 20))


@slow
def test_a_result_is_kept_with_its_command(reproduced: tuple[Path, Outcome]) -> None:
    folder, _ = reproduced
    kept, run_dir = result_of(folder, "short", 3), folder / "out/runs/short/seed3"
    result = json.loads((run_dir / "result.json").read_text())
    assert set(kept) == KEYS
    assert kept["accuracy"] == result["test"]["accuracy"] and kept["seconds"] == result["seconds"]
    assert (kept["algorithm"], kept["dataset"], kept["ways"], kept["shots"]) == ("maml", "glyphs", 5, 1)
    assert (kept["seed"], kept["steps"], kept["tasks"], kept["workers"]) == (3, 40, 10, 1)
    assert kept["command"] == f"python train.py algorithm=maml trainer.steps=40 {TINY} seed=3 hydra.run.dir={run_dir}"
    with (run_dir / "test.csv").open(newline="") as file:
        last = [float(task["accuracy_3"]) for task in csv.DictReader(file)]
    assert kept["ci95_by_step"]["3"] == pytest.approx(1.96 * statistics.stdev(last) / math.sqrt(10))
    assert kept["validation"]["steps"] == [20, 40] and len(kept["validation"]["values"]) == 2


@slow
def test_a_row_may_evaluate_the_checkpoints_of_another(reproduced: tuple[Path, Outcome]) -> None:
    folder, _ = reproduced
    trained, evaluated = result_of(folder, "short", 3), result_of(folder, "again", 3)
    assert set(evaluated) == KEYS and evaluated["validation"] is None
    assert (trained["queries"], evaluated["queries"]) == (2, 3)
    assert (trained["transductive"], evaluated["transductive"]) == (True, False)
    assert (evaluated["steps"], evaluated["seconds"], evaluated["seed"]) == (40, trained["seconds"], 3)
    assert evaluated["command"].startswith("python scripts/evaluate.py checkpoint=")
    assert trained["accuracy"] != evaluated["accuracy"] and trained["task_list"] != evaluated["task_list"]


@slow
def test_the_page_shows_the_results_and_what_was_not_run(reproduced: tuple[Path, Outcome]) -> None:
    folder, _ = reproduced
    text = (folder / "out/RESULTS.md").read_text()
    short, long = result_of(folder, "short", 3), result_of(folder, "long", 0)
    assert f"{short['accuracy']:.2%} ± {short['ci95']:.2%}" in text and "99.00% ± 1.00% [1] | *" in text
    assert f"ANIL, 0 steps | {long['by_step']['0']:.2%}" in text and f"{long['accuracy']:.2%}" in text
    assert "`never` (protonet, –)" in text and "[1] nobody." in text


@slow
def test_an_evaluation_counts_only_for_the_present_training(reproduced: tuple[Path, Outcome]) -> None:
    folder, _ = reproduced
    listing = [*places(folder, "again"), "--list"]
    assert re.findall(r"\w+ seed 3 +(.*)", program(folder, *listing).wait().text) == ["done", "done"]
    path = folder / "out/results/drawn.csv"
    before, seconds = path.read_text(), result_of(folder, "short", 3)["seconds"]
    try:
        path.write_text(before.replace(f",{seconds},", ",1000000.0,", 1))
        assert re.search(r"again seed 3 +not run", program(folder, *listing).wait().text)
    finally:
        path.write_text(before)


def test_a_run_that_fails_is_reported_and_leaves_no_result(tmp_path: Path) -> None:
    rows = "a: {method: M, run: algorithm=nope, seeds: [0]}, b: {method: M, of: a, run: dataset.ways=3, seeds: [0]}"
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/bad.yaml").write_text(f"- title: x\n  rows: {{{rows}}}")
    failed = program(tmp_path, *places(tmp_path)).wait()
    assert failed.code == 1 and "Traceback" not in failed.text, failed.text
    assert "a seed 0: failed with exit code 2\n  error: algorithm=nope: there is no such choice" in failed.text
    assert "b seed 0: left out: it needs a seed 0, which is not done" in failed.text
    assert not list((tmp_path / "out").glob("results/*")) and (tmp_path / "out/RESULTS.md").exists()


def test_an_ensemble_evaluates_all_seeds_of_a_row_together(tmp_path: Path) -> None:
    rows = "a: {method: M, run: d=e k=15, seeds: [4, 5]}, e: {method: E, of: a, ensemble: true, run: ''}"
    (tmp_path / "table.yaml").write_text(f"- title: t\n  all: s=5 k=5\n  rows: {{{rows}}}")
    (table,) = read_tables(tmp_path)
    assert [row.overrides for row in table.rows] == [["d=e", "k=15", "s=5"], ["s=5", "k=5"]]
    run = reproduce.run_of(table.rows[1], 0, {row.name: row for row in table.rows}, tmp_path)
    best = [f"{tmp_path}/runs/a/seed{seed}/checkpoints/best" for seed in (4, 5)]
    assert run.command[1:4] == [f"checkpoint={best[0]}", f"ensemble=[{best[1]}]", "s=5"]
    kept = {of.key: {"command": of.command_line, "seconds": 60.5} for of in run.of}
    for seconds, done in ((121.0, True), (60.5, False)):
        kept[run.key] = {"command": run.command_line, "seconds": seconds}
        assert reproduce.is_done(run, kept) is done


def test_a_row_begins_with_the_network_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation needs all trainings before it, also where results are there and their folders are not."""
    rows = "a: {method: A, run: k=1}, b: {method: B, start: a, run: k=2}, c: {method: C, of: b, run: ''}"
    (tmp_path / "table.yaml").write_text(f"- title: t\n  rows: {{{rows}}}")
    by_name = {row.name: row for table in read_tables(tmp_path) for row in table.rows}
    run = reproduce.run_of(by_name["c"], 0, by_name, tmp_path)
    first, second, last = run.with_all_before
    assert f"init_from={tmp_path}/runs/a/seed0/checkpoints/best" in second.command and last is run
    assert not any(word.startswith("init_from") for word in first.command)
    kept: Any = {each.key: {"command": each.command_line, "seconds": 1.0} for each in (first, second)}
    assert reproduce.is_done(second, kept) and not reproduce.is_done(run, kept)
    monkeypatch.setattr(sys, "executable", "false")
    assert reproduce.run_all(run.with_all_before, kept, [], tmp_path) == 1
    assert "a seed 0: failed with exit code 1" in capsys.readouterr().err


def test_a_picture_has_the_seeds_and_the_figures_of_others() -> None:
    rows = [row_named("one", papers={LAST: 0.7}), row_named("two")]
    drawn = ElementTree.fromstring(rows_picture(rows, {"one": [result(0.6), result(0.8)], "two": [result(0.9)]}))
    names = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert names[-3:] == ["1: one", "2: two", "figures of others"]
    low, high, *others = [float(dot.get("y", "")) for dot in drawn.iter("{http://www.w3.org/2000/svg}use")][:4]
    assert [0.6 + 0.2 * (low - y) / (low - high) for y in others] == pytest.approx([0.9, 0.7])  # then the legend's


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- rows: {}", "missing 1 required positional argument: 'title'"),
        ("- {title: x, rows: {a: {method: M}}}", "missing 1 required keyword-only argument: 'run'"),
        ("- {title: x, rows: {a: {method: M, run: b, papper: 1}}}", "unexpected keyword argument 'papper'"),
        ("- {title: x, rows: {a: {method: M, run: b, paper: high}}}", "a='high': must be a finite number"),
        ("- {title: x, rows: {a: {of: b, method: M, run: c}}}", "a: of: b: must name a row that trains"),
        ("- {title: x, rows: {a: {start: b, method: M, run: c}}}", "a: start: b: must name a row that trains"),
    ],
)
def test_a_file_that_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tables(tmp_path)


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    kept = read_results(reproduce.TABLES)
    for group in (path.name.removesuffix("_curves.csv") for path in reproduce.TABLES.glob("*_curves.csv")):
        rows = [row.name for table in read_tables(reproduce.TABLES) if table.group == group for row in table.rows]
        write_results(tmp_path, group, rows, kept)
        for name in (f"{group}.csv", f"{group}_curves.csv"):
            assert (tmp_path / name).read_text() == (reproduce.TABLES / name).read_text()
    head, first, *others = (tmp_path / "sinusoid.csv").read_text().splitlines(keepends=True)
    (tmp_path / "sinusoid.csv").write_text("".join([head, *others]))  # and its curves stay
    row, seed = first.split(",")[:2]
    assert kept.keys() - read_results(tmp_path).keys() == {(row, int(seed))}
    (tmp_path / "omniglot.csv").write_text("<<<<<<< HEAD\nx\n")
    with pytest.raises(ConfigError, match=r"omniglot.csv, line 2: "):
        read_results(tmp_path)


def test_a_row_that_does_not_exist_is_named_before_anything_runs(tmp_path: Path) -> None:
    refused = program(tmp_path, "--only", "mamml_5w1s").wait()
    assert refused.code == 2 and "--only mamml_5w1s: no such row; allowed: maml_5w1s" in refused.text


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=slow) for first in range(1, 6))])
def test_every_row_that_trains_can_be_composed(first: int) -> None:
    """Every sixth row from `first` on."""
    trained = [row for table in read_tables(reproduce.TABLES) for row in table.rows if row.of is None]
    assert len(trained) >= 25
    for row in trained[first::6]:
        compose_config([*row.overrides, "seed=0", "hydra.run.dir=x"])


def test_the_page_is_that_of_the_results_and_the_rows() -> None:
    tables = read_tables(reproduce.TABLES)
    rows = {row.name: row for table in tables for row in table.rows}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for (name, seed), result in sorted(read_results(reproduce.TABLES).items()):
        results[name].append(result)
        run = reproduce.run_of(rows[name], seed, rows, Path())
        assert result["command"] == run.command_line, f"{run.name}: its row has another command"
    for name, path in reproduce.PAGES.items():
        text = (ROOT / path).read_text()
        shown = [table for table in tables if table.page == name]
        assert text == page(shown, results), "type metalearn reproduce --render"
        assert len(text.splitlines()) <= 180
    for name, picture in PICTURES.items():
        curves = curves_of([table for table in tables if table.page == name], results)
        drawn = (ROOT / picture.path).read_text() if curves else None
        assert drawn == (curves_picture(picture, curves) if curves else None), "type metalearn reproduce --render"
    for table in tables:
        if table.title in BESIDE_PAPERS:
            drawn = (ROOT / BESIDE_PAPERS[table.title]).read_text()
            assert drawn == rows_picture(table.rows, results), "type metalearn reproduce --render"
    assert BESIDE_PAPERS.keys() <= {table.title for table in tables}


def test_the_curves_are_means_of_the_seeds() -> None:
    rows = [row_named("steps"), row_named("none"), row_named("one")]
    seeds = [result(0.9, by_step={"0": 0.2, "10": low, "20": 0.9}) for low in (0.6, 0.8)]
    found = {"steps": seeds, "none": [], "one": [result(0.9, by_step={"0": 0.9})]}
    curves = curves_of([ResultTable("T", rows=rows, group="t")], found)
    assert curves == {"steps": {"0": 0.2, "10": pytest.approx(0.7), "20": 0.9}}
    drawn = ElementTree.fromstring(curves_picture(PICTURES["drawn"], curves))
    names = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert names[-1] == "steps" and "inner step of the test" in names
    places = [float(dot.get("y", "")) for dot in drawn.iter("{http://www.w3.org/2000/svg}use")]
    assert len(places) == 3 and places[0] > places[1]  # the third is of the legend; step 20 is not shown


# The page


def row_named(name: str, metric: str = "accuracy", **fields: Any) -> ResultRow:
    papers = fields.pop("papers", {LAST: None})
    return ResultRow(name, metric, overrides=[], papers=papers, seeds=[0], method="M", **fields)


def result(value: float, metric: str = "accuracy", **fields: Any) -> dict[str, Any]:
    return {
        metric: value, "ci95": 0.002, "seconds": 60.0, "split": "paper", "shots": 1, "queries": 1, "tasks": 600,
        "transductive": True, "steps": 10, "workers": 1, "algorithm": "maml", "seed": 0, "task_list": "v1-same",
    } | fields  # fmt: skip


def test_documents_are_shown_by_position(tmp_path: Path) -> None:
    curves = {"ci95_by_position": {"0": 0.1, "128": 0.1}, "optimum_by_position": {"0": 2.5, "128": 2.0}}
    several = [
        result(bits, "bits", row="read", seed=seed, by_step={}, validation=None, task_list="", command="", date="",
               dataset="chains", commit="", machine="", ways=None, bits_by_position={"0": 3.0, "128": bits}, **curves)
        for seed, bits in enumerate((2.0, 2.5))
    ]  # fmt: skip
    write_results(tmp_path, "documents", ["read"], {("read", seed): one for seed, one in enumerate(several)})
    kept = read_results(tmp_path)
    assert kept["read", 1]["bits_by_position"] == {"0": 3.0, "128": 2.5} and kept["read", 1]["bits"] == 2.5
    text = page(
        [ResultTable("T", [row_named("read", "bits")], "documents", page="sequences")], {"read": [*kept.values()]}
    )
    assert "| row | method | bits | from 0 | from 128 | steps |" in text
    assert "| `read` | M | 2.000 ± 0.002, 2.500 ± 0.002 | 3.000 | 2.250 | 10 |" in text
    assert "|  | best prediction |  | 2.500 | 2.000 |" in text and "by counts" not in text.split("##")[1]


@pytest.mark.parametrize(
    ("metric", "ours", "paper", "expected"),
    [
        ("accuracy", (0.985, 0.003), (0.987, 0.004), "within"),
        ("accuracy", (0.9821, 0.003), (0.987, 0.004), "within"),  # 0.005 is the hypotenuse of the two
        ("accuracy", (0.9815, 0.003), (0.987, 0.004), "below"),
        ("accuracy", (0.9925, 0.003), (0.987, 0.004), "above"),
        ("mse", (0.60, 0.01), (0.67, 0.0), "above"),
        ("mse", (0.70, 0.01), (0.67, 0.0), "below"),
    ],
)
def test_the_comparison_with_the_paper(
    metric: str, ours: tuple[float, float], paper: tuple[float, float], expected: str
) -> None:
    assert comparison_with_paper(metric, [ours], paper) == f"{expected}, one seed"
    assert comparison_with_paper(metric, [ours, ours], paper) == expected


def test_the_spread_of_the_seeds_enters_the_comparison() -> None:
    """Two seeds 0.8% apart say nothing of a figure between them and 4.9% around."""
    seeds, paper = [(0.9765, 0.0031), (0.9843, 0.0026)], (0.9768, 0.0004)
    assert comparison_with_paper("accuracy", seeds, paper) == "within"
    assert comparison_with_paper("accuracy", [(0.9804, 0.003), (0.9805, 0.003)], paper) == "above"


def test_seeds_are_side_by_side_and_the_best_is_bold() -> None:
    rows = [
        row_named("a", papers={LAST: 0.98}, ci95=0.005, source="s", note="why"),
        row_named("slow"), row_named("inductive"), row_named("other tasks"),
        row_named("seen"), row_named("absent"),
    ]  # fmt: skip
    seen = {"trained_on": 3, "validated_on": 2, "classes": 9, "complete": False}
    results = {
        "a": [result(0.97), result(0.99, seconds=90.0)],
        "slow": [result(0.99, seconds=61 * 60, workers=2)],
        "inductive": [result(0.995, transductive=False)],
        "other tasks": [result(0.996, task_list="v1-other")],
        "seen": [result(0.4, seen_classes=seen)],
        "absent": [],
    }
    text = page([ResultTable("T", rows=rows, group="t")], results)
    cells = "98.00% ± 0.50% [1] | *within* | paper | 1 | 600 | yes | 10 | 1.0, 1.5 | 1 | why |"
    assert f"| `a` | M | **97.00% ± 0.20%, 99.00% ± 0.20%** | {cells}" in text
    assert all(f"| {other}% ± 0.20% | – |" in text for other in ("99.00", "99.50", "99.60"))
    assert "| M; **trained or validated on at least 5 of 9 test classes** |" in text


def test_a_table_may_have_a_column_for_each_number_of_shots() -> None:
    rows = [row_named("a", metric="mse", papers={LAST: None}), row_named("a_with_5", metric="mse", of="a")]
    results = {
        "a": [result(1.8e18, "mse", shots=10)],
        "a_with_5": [result(0.25, "mse", shots=5, task_list="v1-other")],
    }
    text = page([ResultTable("T", rows=rows, group="t", by_shots=True)], results)
    cells = "0.250 ± 0.002 | 1.8e+18 ± 2.0e-03 | 10 | 1.0 |  |"
    assert f"| rows | algorithm | 5 shots | 10 shots | steps | minutes | note |\n{'| --- ' * 7}|\n" in text
    assert f"| `a`, `…_with_5` | maml | {cells}" in text
