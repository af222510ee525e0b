"""`python -m metalearn`: the command `metalearn`."""

import sys

from metalearn.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]

if __name__ == "__main__":
    sys.exit(main())
