"""The way of a run through the product's files."""

import subprocess
import sys

from tests.runs import ROOT, slow


@slow
def test_a_step_opens_some_of_the_files_of_a_run() -> None:
    command = [sys.executable, "-m", "benchmarks.way", "experiment=maml_sinusoid"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    local, rpc = ([int(cell) for cell in cells] for _, *cells in rows)
    for functions, files, of_step, in_step, with_log, depth, changes in (local, rpc):
        assert 0 < in_step <= with_log < files < functions and 1 < depth < of_step and changes > in_step
    assert local[3] < rpc[3]
