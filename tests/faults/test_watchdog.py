"""A test that hangs fails at its time limit, and leaves no process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.endless import ENDLESS
from tests.runs import ROOT, alive, slow, until

pytestmark = pytest.mark.thorough

HANGING = f"""
import signal, time
from pathlib import Path
from tests.conftest import own_cache, start
from tests.faults.endless import started

def test_hangs(start, tmp_path):
    program = start(*{ENDLESS!r}, "workers=2")
    pids = [program.process.pid, *started(program, tmp_path)]
    Path("pids").write_text(" ".join(map(str, pids)))
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # the limit, which pyproject.toml sets, comes early
    while True:
        time.sleep(60)
"""


@slow
def test_a_test_that_hangs_fails_and_its_processes_end(tmp_path: Path) -> None:
    """Without a time limit there would be no handler, and the alarm would kill pytest."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    pytest_here = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "test_hanging.py"]
    done = subprocess.run(pytest_here, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "Timeout (>300.0s) from pytest-timeout" in done.stdout, done.stdout + done.stderr
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    until(lambda: not any(map(alive, pids)), "the end of all processes", seconds=10)
