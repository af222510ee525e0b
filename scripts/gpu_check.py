"""Checks a GPU machine: `python scripts/gpu_check.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.cli import run

if __name__ == "__main__":
    sys.exit(run("benchmarks.gpu_check.check", sys.argv[1:]))
