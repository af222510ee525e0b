"""Several ranks share a step that stays on their devices: real processes over gloo, the CPU in place of the GPU."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.distributed.worlds import run_ranks
from tests.faults.endless import RUN, started
from tests.runs import ROOT, Program, assert_same_bytes

PROGRAM = str(ROOT / "tests/metalearn/training/ranks_program.py")


@pytest.fixture(scope="module")
def alone() -> str:
    """What one process prints."""
    ((code, text),) = run_ranks([PROGRAM], 1)
    assert code == 0, text
    assert text.count("ended") == 4 and "poisoned step 3 " in text
    return text


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_get_the_bits_of_one_process(ranks: int, alone: str) -> None:
    for code, text in run_ranks([PROGRAM], ranks):
        assert code == 0 and text == alone, text


@pytest.mark.thorough
def test_a_killed_rank_changes_no_bit(tmp_path: Path) -> None:
    """All ranks start again from the last checkpoint."""
    command = [
        sys.executable, str(ROOT / "tests/metalearn/training/resident.py"), "experiment=maml_glyphs", "strategy=ddp",
        "device=cpu", "workers=2", "trainer.steps=60", "trainer.val_every=50", "trainer.val_tasks=8",
        "trainer.test_tasks=8", "checkpoint.every=5", "logger.every=2", "logger.plots=false", "logger.report=false",
        f"hydra.run.dir={RUN}",
    ]  # fmt: skip
    alone = tmp_path / "alone"
    alone.mkdir()
    undisturbed = Program([*command, "workers=1", "strategy=local"], alone)
    program = Program(command, tmp_path)
    try:
        os.kill(started(program, tmp_path, 6)[1], signal.SIGKILL)
        outcome = program.wait()
        assert outcome.code == 0 and undisturbed.wait().code == 0, outcome.text
    finally:
        program.kill()
        undisturbed.kill()
    assert "restart 1 of 3" in outcome.text and "going on after step" in outcome.text, outcome.text
    assert "the host reads figures every" in outcome.text
    assert_same_bytes(tmp_path / RUN, alone / RUN)


@pytest.mark.thorough
def test_a_step_that_is_not_finite_ends_all_ranks(tmp_path: Path) -> None:
    """At once, and named, though rank zero alone writes a checkpoint before the figures of the log are read."""
    command = [
        sys.executable, str(ROOT / "tests/metalearn/training/resident.py"), "experiment=maml_glyphs", "strategy=ddp",
        "device=cpu", "workers=2", "optimizer.lr=1e30", "algorithm.inner_lr=1e20", "logger.every=20",
        "checkpoint.every=5", "strategy.timeout=30", f"hydra.run.dir={RUN}",
    ]  # fmt: skip
    program = Program(command, tmp_path)
    try:
        outcome = program.wait()
    finally:
        program.kill()
    assert outcome.code == 3 and "step 1: task" in outcome.text and "did not answer" not in outcome.text, outcome.text
