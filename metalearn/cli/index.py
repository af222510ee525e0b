"""Writes index.html into a folder: all runs below it in a table of what was typed and what came out.

Each links to its report. A click on the head of a column sorts by it. It may be the folder of a multirun,
and runs may be under way.

  metalearn index outputs
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from metalearn.cli.arguments import command_parser
from metalearn.errors import RunError, printable
from metalearn.reporting.report import INDEX, write_index

OK, FAILED, BAD_USAGE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("index", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that holds the folders of runs")
    folder: Path = parser.parse_args(arguments).folder
    try:
        runs = write_index(folder)
    except (FileNotFoundError, RunError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return BAD_USAGE if isinstance(error, FileNotFoundError) else FAILED
    print(printable(f"{runs} runs: {folder / INDEX}"))
    return OK
