"""Trains a meta-learner as its config says: `python train.py --help`."""

import sys
from pathlib import Path

from metalearn.program.commands.train import main
from metalearn.program.job import script

PROGRAM = script(Path(__file__))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], PROGRAM))
