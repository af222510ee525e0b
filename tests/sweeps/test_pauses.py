"""Pauses of trials with several workers: by a file in the run folder, and by a pruner."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, Program, metrics, slow, until
from tests.sweeps.programs import FIXED, completed, rows

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("strategy", ["rpc", "ddp"])
def test_a_file_pauses_all_ranks_after_a_saved_step(tmp_path: Path, strategy: str) -> None:
    def run(name: str) -> Program:
        own = ("trainer.steps=80", "workers=2", f"strategy={strategy}", "logger.every=1", "trainer.val_every=40")
        return Program(
            [sys.executable, str(ROOT / "train.py"), *FIXED, *own, "trainer.task_chunk=4", f"hydra.run.dir={name}"],
            tmp_path,
        )

    paused = tmp_path / "paused"
    program = run("paused")
    until(lambda: len(metrics(paused)) > 3, "the first steps")
    (paused / "stop").touch()
    outcome = program.wait()
    assert outcome.code == 0 and "SIGTERM" not in outcome.text, outcome.text  # the agent would wait 30 s for the rank
    result: dict[str, Any] = json.loads((paused / "result.json").read_text())
    assert result["status"] == "pruned" and 3 < result["steps"] < 80
    assert (paused / "checkpoints/last").resolve().name == f"step_{result['steps']:06d}"
    again = run("paused").wait()
    assert again.code == 0 and "paused: remove" in again.text
    (paused / "stop").unlink()
    for name in ("paused", "whole"):
        outcome = run(name).wait()
        assert outcome.code == 0, outcome.text
    files = [(tmp_path / name / "checkpoints/last/params.safetensors").read_bytes() for name in ("paused", "whole")]
    assert files[0] == files[1]


@slow
@pytest.mark.parametrize("strategy", ["rpc", "ddp"])
def test_a_pruner_pauses_trials_of_two_workers(tmp_path: Path, strategy: str) -> None:
    """Rates of 1e-9 learn nothing, so the median of the good ones is ahead of them."""
    search = ("hydra/sweeper=async", "hydra.sweeper.pruner=median")  # which waits for five completed trials
    rates = "optimizer.lr=" + ",".join(["0.01", "0.011", "0.012", "0.013", "0.014", "1e-9"])
    own = ("trainer.steps=250", "trainer.val_every=50", "workers=2", f"strategy={strategy}", "trainer.task_chunk=4")
    completed(tmp_path / "sweep", rates, *own, *search)
    table = {row["optimizer.lr"]: row for row in rows(tmp_path / "sweep")}
    assert table["1e-09"]["outcome"] == "pruned", table
    assert json.loads((tmp_path / "sweep/trial_0005/result.json").read_text())["steps"] < 250
    assert sum(row["outcome"] == "completed" for row in table.values()) >= 4
