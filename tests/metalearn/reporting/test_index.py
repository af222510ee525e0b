"""index.html: every run below a folder is a row, also one that is damaged or hostile."""

import json
import os
import re
from pathlib import Path

import pytest

from metalearn.cli.runs import index
from metalearn.reporting.report import write_index
from tests.metalearn.reporting.test_report import RESULT, Page

HOSTILE = "a<script>b"


def put(folder: Path, *typed: str, result: object = None, lines: str | None = None) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text(json.dumps(typed))
    (folder / ".hydra/config.yaml").write_text("seed: 0\ntrainer: {steps: 5}\n")
    if result is not None:
        (folder / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
        (folder / "report.html").write_text("")
    if lines is not None:
        (folder / "metrics.jsonl").write_text(lines)
    return folder


def table(page: Path) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", page.read_text(), re.DOTALL)
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_runs_are_rows_with_what_was_typed_and_what_came_out(tmp_path: Path) -> None:
    done = {"status": "completed"} | RESULT
    put(tmp_path / "x/one", "seed=1", "model.filters=8", "run=one", "logger.every=2", result=done)
    put(tmp_path / "x/two", "model.filters=8", result=done | {"test": {"mse": 0.25, "ci95": None}, "seconds": 1234.5})
    put(tmp_path / "x/running", "seed=2", "model.filters=8", lines='{"step": 3, "split": "train"}\n')
    assert index([str(tmp_path)]) == 0
    assert table(tmp_path / "index.html") == [
        ["run", "status", "test", "best validation", "seed", "steps", "seconds"],
        ["x/one", "completed", "50.00% &#177; 10.00%", "50.00% &#177; 10.00%", "1", "1", "2"],
        ["x/running", "no result yet, step 3", "", "", "2", "", ""],
        ["x/two", "completed", "0.25 mse", "50.00% &#177; 10.00%", "0", "1", "1,234"],
    ]
    page = Page(tmp_path / "index.html")
    assert "Typed for all of them: model.filters=8" in page.text
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["./x/one/report.html", "./x/two/report.html"]
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


def test_names_that_are_no_text_are_no_trouble(tmp_path: Path) -> None:
    put(tmp_path / os.fsdecode(b"\xff"), "seed=1", result={"status": "completed"} | RESULT)
    assert write_index(tmp_path) == 1
    assert table(tmp_path / "index.html")[1][:2] == ["&#56575;", "completed"]
    assert 'href="./%FF/report.html"' in (tmp_path / "index.html").read_text()


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err and not (tmp_path / "index.html").exists()
