"""Evaluates a checkpoint on test tasks: `python scripts/evaluate.py --help`."""

import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve()
sys.path.insert(0, str(PROGRAM.parent.parent))

from metalearn.app.job import script  # noqa: E402
from metalearn.cli.evaluate import main  # noqa: E402 (the path comes first)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], script(PROGRAM)))
