"""index.html: every run below a folder is a row, also one that is damaged or hostile."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metalearn.cli.runs import index
from metalearn.reporting.index import (
    _best,
    colour,
    index_page,
    jobs_table,
    report_at,
    runs_below,
    short_keys,
    short_names,
    what_differs,
    write_index,
)
from tests.metalearn.reporting.test_report import RESULT, Page, assert_stands_alone

HOSTILE = "a<script>b"


def put(folder: Path, *typed: str, result: object = None, lines: str | None = None) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text(json.dumps(typed))
    config = OmegaConf.merge({"seed": 0, "trainer": {"steps": 5}}, OmegaConf.from_dotlist(list(typed)))
    OmegaConf.save(config, folder / ".hydra/config.yaml")
    if result is not None:
        (folder / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
        (folder / "report.html").write_text("")
    if lines is not None:
        (folder / "metrics.jsonl").write_text(lines)
    return folder


def table(page: Path) -> list[list[str]]:
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page.read_text(), re.DOTALL)
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_runs_are_rows_with_what_was_typed_and_what_came_out(tmp_path: Path) -> None:
    done = {"status": "completed"} | RESULT
    put(tmp_path / "x/one", "seed=1", "model.filters=8", "run=one", "logger.every=2", result=done)
    put(tmp_path / "x/two", "model.filters=8", result=done | {"test": {"mse": 0.25, "ci95": None}, "seconds": 1234.5})
    put(tmp_path / "x/stopped", "seed=2", "model.filters=8", lines='{"step": 3, "split": "train"}\n')
    assert index([str(tmp_path)]) == 0
    assert table(tmp_path / "index.html") == [
        ["run", "status", "test", "best validation", "seed", "steps done", "seconds"],
        ["one", "completed", "50.00% &#177; 10.00%", "50.00% &#177; 10.00%", "1", "1", "2"],
        ["stopped", "stopped at step 3 of 5", "", "", "2", "", ""],
        ["two", "completed", "0.25 mse", "50.00% &#177; 10.00%", "0", "1", "1,234"],
    ]
    page = Page(tmp_path / "index.html")
    assert "Typed for all of them: model.filters=8" in page.text
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["./x/one/report.html", "./index-reports/x/stopped/report.html", "./x/two/report.html"]
    assert all((tmp_path / str(link)).is_file() for link in links)


@pytest.mark.parametrize("result", ["", {}, {"status": HOSTILE, "test": {"accuracy": "x"}}])
def test_a_damaged_run_is_one_row_that_says_so(result: object, tmp_path: Path) -> None:
    put(tmp_path / "good", "seed=1", result={"status": "completed"} | RESULT)
    put(tmp_path / HOSTILE, f"seed={HOSTILE}", result=result)
    assert write_index(tmp_path) == 2
    page = Page(tmp_path / "index.html")
    damaged, good = sorted(table(tmp_path / "index.html")[1:])
    assert damaged[0] == "a&lt;script&gt;b" and damaged[1].startswith("damaged: ") and good[1] == "completed"
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script"]  # that which sorts
    assert "./a%3Cscript%3Eb/report.html" in [attributes.get("href") for _, attributes in page.tags]


def test_what_differs_between_runs_is_their_name(tmp_path: Path) -> None:
    long = "seed={0},algorithm.inner_lr={1},experiment=maml_sinusoid-0123abcd"
    for seed, rate in ((0, "0.012345678"), (1, "0.5")):
        put(tmp_path / "grid" / long.format(seed, rate), "experiment=x", f"seed={seed}", f"algorithm.inner_lr={rate}")
    put(tmp_path / "grid/short", "experiment=x", "trainer.steps=7")
    put(tmp_path / "alone" / long.format(2, 0.1), "experiment=x", "seed=2", "algorithm.inner_lr=0.1")
    runs = runs_below(tmp_path)
    assert short_names(runs) == [
        ("alone", "seed=2 inner_lr=0.1 experiment=maml_sinusoid-0123abcd"), ("grid", "seed=0 inner_lr=0.01235"),
        ("grid", "seed=1 inner_lr=0.5"), ("grid", "short"),
    ]  # fmt: skip
    assert short_keys(["a.lr", "b.lr", "seed"]) == ["a.lr", "b.lr", "seed"]
    jobs = [
        ["experiment=x", f"seed={seed}", f"algorithm.inner_lr={rate}", "workers=1"]
        for seed in (1, 0)
        for rate in (0.5, "0.012345678")
    ]
    assert jobs_table(tmp_path, jobs).splitlines() == [
        "seed  inner_lr  best validation  test",
        "1     0.5                              no step yet",
        "0     0.01235                          no step yet",
    ]
    assert jobs_table(tmp_path, [["seed=7"]]) == jobs_table(tmp_path / "none", jobs) == ""


def test_a_grid_lists_its_own_runs_and_what_it_varies(tmp_path: Path) -> None:
    """Not an earlier run of the same words. Keys that change no number count; numbers may be typed in two ways."""
    for name, rate, workers in (("early", "1e-2", "1"), ("one", "0.01", "1"), ("two", "0.01", "2")):
        put(tmp_path / name, f"algorithm.inner_lr={rate}", f"workers={workers}")
    table = jobs_table(tmp_path, [], [tmp_path / "two", tmp_path / "one"]).splitlines()
    assert [line.split()[0] for line in table] == ["workers", "2", "1"]
    values, alike = what_differs(runs_below(tmp_path))
    assert values == {} and alike == {"algorithm.inner_lr": 0.01}


def test_a_run_without_a_report_gets_one_beside_the_index(tmp_path: Path) -> None:
    rows = [
        {"step": 2, "split": "train", "mse": 3.0, "loss": 3.0, "step_seconds": 1.0},
        {"step": 2, "split": "val", "mse": 2.5, "loss": 2.5, "ci95": 0.1, "tasks": 4, "elapsed_seconds": 6.0},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "spl'  # a line that is being written
    run = put(tmp_path / "x/one", "seed=1", lines=lines)
    (run / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}")
    before = sorted(run.rglob("*"))
    assert write_index(tmp_path) == 1
    assert table(tmp_path / "index.html")[1][1] == "running, step 2 of 5, about 9 s left"
    report = tmp_path / "index-reports/x/one/report.html"
    assert "mse 2.5000 &#177; 0.1000 (4 tasks), after step 2" in report.read_text()
    assert_stands_alone(Page(report))
    assert sorted(run.rglob("*")) == before
    os.utime(report, ns=(0, 0))  # older than the run's lines
    write_index(tmp_path)
    made = report.stat().st_mtime_ns
    write_index(tmp_path)
    assert report.stat().st_mtime_ns == made > 0
    (run / "report.html").write_text("")
    write_index(tmp_path)
    assert 'href="./x/one/report.html"' in (tmp_path / "index.html").read_text()


def test_the_curves_of_runs_share_a_chart_for_each_metric(tmp_path: Path) -> None:
    for name, metric in (("a", "mse"), ("b", "accuracy"), ("c", "mse")):
        rows = [{"step": step, "split": "val", metric: step / 10} for step in (1, 2)]
        put(tmp_path / name, lines="".join(json.dumps(row) + "\n" for row in rows))
    runs = runs_below(tmp_path)
    assert [run.curve for run in runs] == [
        ("mse", "validation", [(1, 0.1), (2, 0.2)]), ("accuracy", "validation", [(1, 0.1), (2, 0.2)]),
        ("mse", "validation", [(1, 0.1), (2, 0.2)]),
    ]  # fmt: skip
    page = index_page(tmp_path, runs)
    charts = page.split("<svg")[1:]
    assert [re.findall(r'data-line="(\d+)"', drawn) for drawn in charts] == [["0", "2"], ["1"]]
    assert len({colour(number) for number in range(40)}) == 40


def test_names_that_are_no_text_are_no_trouble(tmp_path: Path) -> None:
    put(tmp_path / os.fsdecode(b"\xff"), "seed=1", result={"status": "completed"} | RESULT)
    assert write_index(tmp_path) == 1
    assert table(tmp_path / "index.html")[1][:2] == ["&#56575;", "completed"]
    assert 'href="./%FF/report.html"' in (tmp_path / "index.html").read_text()


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err and not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("line", ['{"step": "3", "split": "val", "mse": 1}', '{"step": 3, "split": "val", "mse": []}'])
def test_a_metric_that_is_no_number_is_one_damaged_row(line: str, tmp_path: Path) -> None:
    put(tmp_path / "good", "seed=1", result={"status": "completed"} | RESULT)
    put(tmp_path / "bad", "seed=2", lines=f"{line}\n")
    assert write_index(tmp_path) == 2
    assert sorted(row[1].partition(":")[0] for row in table(tmp_path / "index.html")[1:]) == ["completed", "damaged"]


def test_a_validation_that_is_not_finite_is_not_the_best(tmp_path: Path) -> None:
    results = [{"status": "paused", "val": {"mse": value, "ci95": 0.1, "step": 1}} for value in (None, 0.5, None)]
    for number, result in enumerate([*results, {"status": "failed"}]):
        put(tmp_path / str(number), f"seed={number}", result=result)
    best = _best(runs_below(tmp_path))
    assert best is not None and best.path == Path("1")


def test_a_report_that_is_a_link_out_of_the_folder_is_not_served(tmp_path: Path) -> None:
    run = put(tmp_path / "runs/one", result={"status": "completed"} | RESULT)
    (tmp_path / "secret").write_text("secret")
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(tmp_path / "secret")
    assert report_at(tmp_path / "runs", runs_below(tmp_path / "runs"), "/one/report.html") is None
