"""Measures how fast meta-gradients are: `python scripts/bench.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.cli import run

if __name__ == "__main__":
    sys.exit(run("benchmarks.bench", sys.argv[1:]))
