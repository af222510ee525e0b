"""train.py, whose steps stay on the CPU as they stay on a GPU elsewhere."""

import sys

from metalearn.app import parts
from metalearn.cli import run
from tests.runs import ROOT

parts.RESIDENT = ("cpu", "cuda")
sys.exit(run("metalearn.cli.train", sys.argv[1:], ROOT / "train.py"))
