"""Adapts what a run has learned to pictures of yours: `python scripts/adapt.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.cli import run

if __name__ == "__main__":
    sys.exit(run("metalearn.cli.adapt", sys.argv[1:]))
