"""scripts/bench.py in its short mode: it measures everything and computes the same gradients; times do not matter."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import ROOT

pytestmark = pytest.mark.slow


def bench(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    """The program on its built-in characters: the folder `data` has no Omniglot, and its cache has none either."""
    own = os.environ | {"METALEARN_DATA": str(data), "METALEARN_CACHE": str(data / "cache")}
    command = [sys.executable, str(ROOT / "scripts/bench.py"), *arguments]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a short run has measured."""
    output = tmp_path_factory.mktemp("bench")
    done = bench("--short", "--threads", "1", "--output", str(output), data=output)
    assert done.returncode == 0, done.stderr
    assert (output / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    values: dict[str, Any] = json.loads((output / "bench.json").read_text())
    return values


def test_every_recipe_and_strategy_is_measured_in_every_way(results: dict[str, Any]) -> None:
    assert (results["characters"], results["short"], results["gpu"]) == ("glyphs", True, None)
    (measured,) = results["measurements"]
    limit, names = measured["limit"], {recipe["name"] for recipe in measured["recipes"]}
    assert names == {"5w1s", "5w1s-5steps", "5w1s-15queries", "sinusoid", "resnet12"}
    assert limit["gflops"] == limit["kernels"][limit["kernel"]] == max(limit["kernels"].values())
    for recipe in measured["recipes"]:
        assert recipe["limit_ms"] == pytest.approx(1000 * recipe["gflop"] / limit["gflops"])
        assert {"ours", "loop", "vmap"} <= set(recipe["by_way"]) and recipe["by_way"]["loop"]["ratio"] == 1
        for row in recipe["by_way"].values():
            low, high = row["quartiles_ms"]
            assert len(row["ms"]) == results["rounds"] == 2 and 0 < low <= row["median_ms"] <= high < math.inf
    rows = {(row["strategy"], row["workers"], row["at_once"]): row for row in results["processes"]["rows"]}
    assert set(rows) == {("local, two independent at once", 1, 2), ("rpc", 2, 1)}
    assert all(0 < speed < math.inf for row in rows.values() for speed in row["tasks_per_second"])


def test_all_ways_compute_the_same_gradient(results: dict[str, Any]) -> None:
    """ResNet-12 has max pooling: at its kinks, two correct float32 programs may differ. The others are smooth here."""
    for recipe in results["measurements"][0]["recipes"]:
        if recipe["kind"] == "resnet12":
            assert set(recipe["float64_errors"]) == {"ours", "vmap"}
            assert max(recipe["float64_errors"].values()) < 1e-9
        else:
            for way, row in recipe["by_way"].items():
                assert row["error"] < 1e-5, (recipe["name"], way)


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
    (recipe,) = (recipe for recipe in results["measurements"][0]["recipes"] if recipe["kind"] == "sinusoid")
    assert recipe["gflop"] * 1e9 == pytest.approx(recipe["tasks"] * (support + derivative + query))


GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--only", "5w2s", ["'5w2s'", "'5w1s'", "'sinusoid'", "'processes'"]),
        pytest.param("--device", "cuda", ["type --device cpu"], marks=GPU),
    ],
)
def test_wrong_options_are_refused(option: str, value: str, named: list[str], tmp_path: Path) -> None:
    done = bench(option, value, data=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and all(part in done.stderr for part in named)
