"""Adds workers to a run under way: `python scripts/join.py --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from metalearn.cli import run  # noqa: E402 (the path comes first)

if __name__ == "__main__":
    sys.exit(run("metalearn.cli.join", sys.argv[1:], ROOT / "train.py"))
