"""The programs in examples/ run from any folder, and do what they say."""

import re
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, Program

pytestmark = pytest.mark.thorough


def said(name: str, argument: str, folder: Path, *, ranks: int = 0) -> list[float]:
    """Runs an example; the numbers in its output."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *start, str(ROOT / "examples" / name), argument]
    outcome = Program(command, folder, {"PYTHONPATH": str(ROOT)}).wait()
    assert outcome.code == 0, outcome.text
    return [float(number) for number in re.findall(r"-?\d+\.\d+", outcome.text)]


def test_sine_waves_adapts_to_a_wave(tmp_path: Path) -> None:
    before, after, *wave = said("sine_waves.py", "20", tmp_path)
    assert before > 0 and after > 0 and wave[::2] == [1.514, -1.683, 1.819]
    assert max(abs(value) for value in wave[1::2]) < 2  # not wild


@pytest.mark.parametrize("name", ["own_network.py", "own_algorithm.py"])
def test_own_parts_learn_characters(name: str, tmp_path: Path) -> None:
    accuracy, half, chance = said(name, "15", tmp_path)
    assert accuracy - half > chance == 20.0


def test_map_reduce_computes_pi_on_two_workers(tmp_path: Path) -> None:
    (pi,) = said("map_reduce.py", "10", tmp_path, ranks=2)
    assert abs(pi - 3.1416) < 0.01  # six standard deviations
