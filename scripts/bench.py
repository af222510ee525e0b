"""Measures how fast meta-gradients are: `python scripts/bench.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
