"""Checks a GPU machine: `python scripts/gpu_check.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
