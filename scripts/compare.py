"""Draws the validations of several runs in one plot: `python scripts/compare.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.cli.compare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
