"""Lets a worker of a run go. The others compute its chunks from then on, and the result keeps its bits.

    metalearn leave outputs/maml_omniglot/seed0 worker2

SIGTERM to a worker's process does the same. worker0 leads the run and cannot leave: SIGTERM to it stops the run. Exit
codes: 0 it leaves; 1 rank zero does not answer; 2 there is no such worker, or no run under way.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from metalearn.app import world_file
from metalearn.app.outcome import BAD_CONFIG
from metalearn.cli.arguments import command_parser
from metalearn.errors import RunError, printable


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = command_parser("leave", __doc__)
    parser.add_argument("folder", type=Path, help="the folder of the run")
    parser.add_argument("worker", help="the worker's name, such as worker2")
    options = parser.parse_args(arguments)

    def refuse(reason: object) -> None:
        print(f"error: {printable(str(reason))}", file=sys.stderr)

    def say(text: str) -> None:
        print(printable(text))

    try:
        found = world_file.read(options.folder)
    except RunError as error:
        refuse(error)
        return BAD_CONFIG
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch is imported
    from distributed.cluster.joining import UnreachableError, WorldAddress, WorldConnection

    try:
        return WorldConnection(WorldAddress(**found.place)).let_go(options.worker, say, refuse)
    except UnreachableError as error:
        refuse(f"{options.folder}: {error}")
        return BAD_CONFIG
