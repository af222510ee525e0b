"""scripts/gpu_check.py on the CPU, in its short mode: it needs no GPU to show that a wrong result is a failed row."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check.agreement import layers
from benchmarks.gpu_check.check import (
    ERROR_LINES,
    FAILED,
    LEFT_OUT,
    PARTS,
    PASSED,
    CheckRow,
    at_most,
    report,
    row_of,
    rows_in,
    rows_of,
)
from benchmarks.gpu_check.learners import ALGORITHMS, ON_SAMPLES, training_of
from benchmarks.gpu_check.training import GROWTH, growth, worlds
from metalearn.nn.surroundings import compute_with
from tests.runs import ROOT, said_by, slow

LIMIT = 240.0
"""Seconds after which it counts as hanging."""


@pytest.fixture(autouse=True)
def no_omniglot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("METALEARN_DATA", str(tmp_path))
    yield
    compute_with("float32")


def gpu_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/gpu_check.py"), *arguments]
    return said_by(command, Path.cwd(), environment, LIMIT)


def on_cpu(part: str) -> list[CheckRow]:
    return list(rows_in(part, "cpu", short=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "part",
    ["machine", "layers", "speed", "recipe", *(pytest.param(part, marks=slow) for part in ("gradients", "algorithms"))],
)
def test_a_part_passes_on_the_cpu(part: str) -> None:
    rows = on_cpu(part)
    assert rows and [(row.name, row.error) for row in rows if row.state != PASSED] == []
    assert {row.part for row in rows} == {part}


def test_every_algorithm_is_checked() -> None:
    assert {*ALGORITHMS, "pfn", "reading", "reweight"} == {path.stem for path in ROOT.glob("conf/algorithm/*.yaml")}
    assert {name for name in ALGORITHMS if training_of(name).algorithm.trained_on == "samples"} == set(ON_SAMPLES)


def test_rounded_products_are_wrong_layers() -> None:
    """TF32, which a GPU may use unasked, rounds operands to ten bits; bfloat16 rounds them to seven."""
    compute_with("bf16")
    failed = [row.name for row in layers("cpu", short=True) if row.state == FAILED]
    assert "convolution 3×3, float32" in failed
    assert not [name for name in failed if "float64" in name or "norm" in name]


def test_memory_that_grows_fails() -> None:
    assert row_of("recipe", "memory", lambda: growth(10, 10 + GROWTH)).state == PASSED
    assert row_of("recipe", "memory", lambda: growth(10, 11 + GROWTH)).state == FAILED


def test_a_value_that_is_no_number_is_too_large() -> None:
    row = row_of("layers", "x", lambda: {"error": at_most("error", float("nan"), 1.0)})
    assert (row.state, row.error) == (FAILED, "error: nan, and must be 1 at most")


def test_a_part_that_crashes_keeps_its_rows_and_last_lines() -> None:
    row = CheckRow("layers", "first", PASSED, 0.1, {"error": 0.0})
    program = (
        "import os, sys; print(*range(1000), sep='\\n', flush=True); "
        f"open(sys.argv[1], 'w').write({json.dumps(row._asdict())!r} + '\\n'); os.abort()"
    )
    first, last = rows_of("layers", [sys.executable, "-c", program], LIMIT)
    assert first == row
    assert (last.part, last.state) == ("layers", FAILED)
    assert last.error.splitlines()[-2:] == ["999", "exit code -6"] and last.error.count("\n") < ERROR_LINES


def test_a_part_that_hangs_is_ended() -> None:
    (row,) = rows_of("speed", [sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert (row.state, row.error) == (FAILED, "took more than 0 seconds")


def test_all_limits_together_are_less_than_the_docs_say() -> None:
    assert sum(part.limit for part in PARTS.values()) < 13.5 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_checked(tmp_path: Path) -> None:
    done = gpu_check("--output", str(tmp_path / "results"))
    assert (done.returncode, done.stdout) == (2, "") and "type --device cpu --short" in done.stderr
    assert not (tmp_path / "results").exists()
    rows = [row for row in worlds("cuda", short=True) if "local" not in row.name]
    assert {(row.name.split()[1], row.state, row.error) for row in rows} == {
        ("1", LEFT_OUT, "needs a GPU for each worker; workers: 1, GPUs: 0"),
        ("2", LEFT_OUT, "needs a GPU for each worker; workers: 2, GPUs: 0"),
    }


def results(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text())
    return values


@pytest.mark.slow
def test_all_parts_pass_on_the_cpu(tmp_path: Path) -> None:
    done = gpu_check("--device", "cpu", "--short", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = results(tmp_path)
    assert {row["part"] for row in found["rows"]} == set(PARTS) == set(found["parts"])
    figures = {row["name"]: row["figures"] for row in found["rows"] if row["part"] == "worlds"}
    for name, backend in (("rpc, 2 workers", "remote calls"), ("ddp, 2 workers", "gloo")):
        assert figures[name] == {"parameters part by": 0.0, "equal bits": "yes", "backend": backend}


def test_the_page_has_a_table_for_each_part() -> None:
    rows = [
        CheckRow("layers", "linear", PASSED, 1.0, {"error": 1.25e-7}),
        CheckRow("worlds", "ddp, 2 workers", LEFT_OUT, 0.0, {}, "needs 2 GPUs"),
        CheckRow("layers", "mean", FAILED, 2.0, {}, "two\nlines"),
    ]
    page = "\n".join(report(rows, "cuda", short=False))
    assert "3 rows, 1 failed" in page and "Failed: layers, mean\n\n```\ntwo\nlines\n```" in page
    assert (
        "| what | result | seconds | error |\n| --- | --- | --- | --- |\n| linear | passed | 1.0 | 1.25e-07 |" in page
    )
    assert "| ddp, 2 workers | left out: needs 2 GPUs | 0.0 |" in page
