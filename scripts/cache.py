"""Shows what the cache holds, and removes what is no longer wanted: `python scripts/cache.py --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.cli.cache import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
