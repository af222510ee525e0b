"""Evaluates a checkpoint on test tasks: `python scripts/evaluate.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.cli import run

if __name__ == "__main__":
    sys.exit(run("metalearn.cli.evaluate", sys.argv[1:], Path(__file__)))
