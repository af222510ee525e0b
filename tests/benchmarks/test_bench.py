"""scripts/bench.py in its short mode: it measures everything and computes the same gradients; times do not matter."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT

pytestmark = pytest.mark.slow

LIMIT = 180.0
"""Seconds after which it counts as hanging."""

SHORT = {"5w1s", "5w1s-5steps", "5w1s-15queries", "sinusoid", "resnet12"}


def bench(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    """The program on its built-in characters: the folder `data` has no Omniglot, and its cache has none either."""
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments]
    return subprocess.run(
        command,
        env=os.environ | {"METALEARN_DATA": str(data), "METALEARN_CACHE": str(data / "cache")},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of a short run."""
    output = tmp_path_factory.mktemp("bench")
    done = bench("--short", "--threads", "1", "--output", str(output), data=output)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return values


def recipes(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The recipes of every number of threads."""
    return [recipe for measured in results["measurements"] for recipe in measured["recipes"]]


def test_every_recipe_is_measured(results: dict[str, Any]) -> None:
    assert [measured["threads"] for measured in results["measurements"]] == [1]
    for measured in results["measurements"]:
        assert {recipe["name"] for recipe in measured["recipes"]} == SHORT
    assert (results["characters"], results["short"], results["gpu"]) == ("glyphs", True, None)


def test_every_way_has_figures(results: dict[str, Any]) -> None:
    for recipe in recipes(results):
        assert {"ours", "loop", "vmap"} <= set(recipe["by_way"])
        assert recipe["gflop"] > 0
        for row in recipe["by_way"].values():
            low, high = row["quartiles_ms"]
            assert len(row["ms"]) == results["rounds"] == 2
            assert 0 < low <= row["median_ms"] <= high < math.inf
            assert 0 < row["fraction_of_limit"] < math.inf
        assert recipe["by_way"]["loop"]["ratio"] == 1


def test_all_ways_compute_the_same_gradient(results: dict[str, Any]) -> None:
    """ResNet-12 has max pooling: at its kinks, two correct float32 programs may differ. The others are smooth here."""
    for recipe in recipes(results):
        if recipe["kind"] == "resnet12":
            assert set(recipe["float64_errors"]) == {"ours", "vmap"}
            assert max(recipe["float64_errors"].values()) < 1e-9
        else:
            for way, row in recipe["by_way"].items():
                assert row["error"] < 1e-5, (recipe["name"], way)


def test_the_limit_is_that_of_the_best_kernel(results: dict[str, Any]) -> None:
    for measured in results["measurements"]:
        limit = measured["limit"]
        assert limit["gflops"] == limit["kernels"][limit["kernel"]] == max(limit["kernels"].values())
        for recipe in measured["recipes"]:
            assert recipe["limit_ms"] == pytest.approx(1000 * recipe["gflop"] / limit["gflops"])


def test_the_operations_are_counted(results: dict[str, Any]) -> None:
    """The sinusoid's count by hand: one product of 10 points with a layer takes 2 · 10 · inputs · outputs operations.

    The forward pass has one product for each layer. The backward pass has two, for weight and input; the first layer
    has one. The derivative of the backward pass has two for each of its products; the first layer has one. The support
    set needs a forward and a backward pass and the derivative of both; the queries need a forward and a backward pass.
    """
    first, others = (2 * 10 * products for products in (1 * 40, 40 * 40 + 40 * 1))
    support = (1 + 1) * first + (1 + 2) * others
    derivative = (1 + 1) * first + (4 + 2) * others
    query = (1 + 1) * first + (1 + 2) * others
    for recipe in recipes(results):
        if recipe["kind"] == "sinusoid":
            assert recipe["gflop"] * 1e9 == pytest.approx(recipe["tasks"] * (support + derivative + query))


def test_strategies_are_run(results: dict[str, Any]) -> None:
    assert results["processes"]["experiment"] == "maml_glyphs"
    rows = {(row["strategy"], row["workers"], row["at_once"]): row for row in results["processes"]["rows"]}
    assert set(rows) == {("local, two independent at once", 1, 2), ("rpc", 2, 1)}
    assert all(0 < speed < math.inf for row in rows.values() for speed in row["tasks_per_second"])


def test_the_chart_is_a_picture(folder: Path) -> None:
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    done = bench("--only", "5w2s", data=tmp_path)
    assert done.returncode == 2
    assert "'5w2s'" in done.stderr
    for name in ("5w1s", "20w1s-5steps-15queries", "sinusoid", "resnet12", "processes"):
        assert f"'{name}'" in done.stderr


def test_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = bench("--device", "cuda", data=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "type --device cpu" in done.stderr
