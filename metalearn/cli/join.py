"""Adds workers to a run under way, from another terminal or another host.

    metalearn join outputs/maml_omniglot/seed0                   one worker more
    metalearn join outputs/maml_omniglot/seed0 --workers 4       four more

They join between two steps, and the result keeps its bits. SIGTERM or Ctrl-C lets them go after what they compute, and
so does metalearn leave. The run must have begun with two or more workers under strategy=rpc. Another host must see
the run folder, and reach the address that the run was started with (launch.interface, launch.master_addr). Exit codes:
0 the workers have left, or the run has ended well; 1 one of them has failed; 2 there is nothing to join.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from distributed.cluster.joining import UnreachableError, WorldConnection
from metalearn.app import world_file
from metalearn.app.job import Program, installed
from metalearn.cli.arguments import command_name, whole
from metalearn.errors import RunError, printable


def main(arguments: Sequence[str], train: Program | None = None) -> int:
    """Runs the command line; returns the exit code. The workers run `train`, by default the installed program."""
    parser = argparse.ArgumentParser(
        command_name("join"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the run")
    parser.add_argument("--workers", type=whole(1), default=1, help="how many to add")
    options = parser.parse_args(arguments)
    try:
        found = world_file.read(options.folder)
        return join(train or installed(), found, options.workers, WorldConnection(found.place))
    except (RunError, UnreachableError) as error:
        place = f"{options.folder}: " if isinstance(error, UnreachableError) else ""
        print(printable(f"error: {place}{error}"), file=sys.stderr)
        return 2


def join(train: Program, found: world_file.World, workers: int, way: WorldConnection) -> int:
    """Starts the workers, waits for them, and returns the exit code."""
    command = [sys.executable, *train.arguments, *found.arguments]
    folder = found.folder if found.place.is_here else None
    typed = shlex.join([*train.arguments, *found.arguments])
    print(printable(f"{workers} more of: {typed}"), file=sys.stderr, flush=True)
    started = [way.start(command, number, workers, folder) for number in range(workers)]
    way.close()

    def let_go(number: int, frame: FrameType | None) -> None:
        for worker in started:
            worker.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, let_go)
    codes = [worker.wait() for worker in started]
    return int(any(codes))
