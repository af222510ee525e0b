"""Adds workers to a run under way, from another terminal or another host.

    metalearn join outputs/maml_omniglot/seed0                   one worker more
    metalearn join outputs/maml_omniglot/seed0 --workers 4       four more

They join between two steps, and the result keeps its bits. SIGTERM or Ctrl-C lets them go after what they compute, and
so does metalearn leave. The run must have begun with two or more workers under strategy=rpc. Another host must see
the run folder, and reach the address that the run was started with (launch.interface, launch.master_addr). Exit codes:
0 the workers have left, or the run has ended well; 1 one of them has failed; 2 there is nothing to join, or the workers
would be of another version, or compute otherwise, and are refused.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from metalearn.app import world_file
from metalearn.app.job import Program, installed
from metalearn.app.outcome import BAD_CONFIG
from metalearn.cli.arguments import command_parser, whole
from metalearn.errors import RunError, printable

if TYPE_CHECKING:
    from distributed.cluster.joining import WorldConnection


def main(arguments: Sequence[str], train: Program | None = None) -> int:
    """Runs the command line; returns the exit code. The workers run `train`, by default the installed program."""
    parser = command_parser("join", __doc__)
    parser.add_argument("folder", type=Path, help="the folder of the run")
    parser.add_argument("--workers", type=whole(1), default=1, help="how many to add")
    options = parser.parse_args(arguments)
    try:
        found = world_file.read(options.folder)
    except RunError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return BAD_CONFIG
    from distributed.cluster.joining import WorldAddress, WorldConnection  # imports torch

    try:
        return join(train or installed(), found, options.workers, WorldConnection(WorldAddress(**found.place)))
    except (OSError, subprocess.SubprocessError) as error:  # no world there, or no program can be started
        print(f"error: {options.folder}: {printable(str(error))}", file=sys.stderr)
        return BAD_CONFIG


def join(train: Program, found: world_file.World, workers: int, way: "WorldConnection") -> int:
    """Starts the workers, waits for them, and returns the exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # they say themselves that rank zero does not answer
    command = [sys.executable, *train.arguments, *found.arguments]
    text = printable(shlex.join([*train.arguments, *found.arguments]))
    print(f"{workers} more of: {text}", file=sys.stderr, flush=True)
    started = [way.start(command, number, workers, found.folder) for number in range(workers)]
    way.close()

    def let_go(number: int, frame: FrameType | None) -> None:
        for worker in started:
            worker.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, let_go)
    first, *others = started
    refused = first.wait() == BAD_CONFIG  # the others would be too, and say it once more
    if refused:
        for worker in others:
            worker.kill()
    codes = [worker.wait() for worker in started]
    return BAD_CONFIG if refused else int(any(codes))
