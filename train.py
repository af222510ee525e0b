"""Trains a meta-learner as its config says: `python train.py --help`."""

import sys
from pathlib import Path

from metalearn.app.job import script
from metalearn.cli.train import main

PROGRAM = script(Path(__file__))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PROGRAM))
