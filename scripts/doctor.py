"""Checks the world that it is started in: `python scripts/doctor.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.app.job import script
from metalearn.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], script(Path(__file__))))
