"""Runs the cases beside this file: what users have reported, each a program that prints OK or BAD as its last line.

Each kind of fault has its own tests, beside the code that was mended; the cases are those users' commands, unchanged.
`python -m pytest tests/cases -s` prints what they print.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, slow

CASES = sorted(path for path in Path(__file__).parent.iterdir() if path.name[0].isdigit())


@slow
@pytest.mark.parametrize("case", CASES, ids=[case.stem for case in CASES])
def test_a_reported_case_is_mended(case: Path) -> None:
    program = "bash" if case.suffix == ".sh" else sys.executable
    done = subprocess.run(
        [program, str(case)], cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, text=True, capture_output=True,
        timeout=600,
    )  # fmt: skip
    print(done.stdout + done.stderr)
    assert done.stdout.splitlines()[-1] == "OK", done.stdout + done.stderr
