"""Trains a meta-learner as its config says: `python train.py --help`."""

import sys
from pathlib import Path

from metalearn.cli import run

if __name__ == "__main__":
    sys.exit(run("metalearn.cli.train", sys.argv[1:], Path(__file__)))
