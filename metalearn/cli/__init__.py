"""The commands, a file each, or one for near relatives. Here a process becomes one of them, on whatever machine.

This file needs only Python's own library, from 3.7 on, so that it can say what else is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NEEDS = ("torch", "numpy", "hydra", "omegaconf", "rich", "safetensors", "filelock")  # what every command imports
_FAILED, _BAD_USAGE, _INTERRUPTED = 1, 2, 130


def run(command: str, arguments: Sequence[str], started: Path | None = None) -> int:
    """Runs the `command` in the module of this name, for which this process was started, with the `arguments` that were
    typed after it; returns the exit code. A reader of its output that leaves, as `head` does, is no failure. `started`
    is the script in a checkout that the command's processes start with; None: the installed command."""
    try:
        return _run(command, arguments, started)
    except KeyboardInterrupt:  # while there is nothing to save, or to say: it imports, or starts the ranks
        return _INTERRUPTED


def _run(command: str, arguments: Sequence[str], started: Path | None) -> int:
    unfit = _unfit()
    if unfit:
        sys.stderr.write(f"error: {unfit}\n")
        return _BAD_USAGE
    from metalearn.errors import ForeignPackageError

    try:
        from metalearn.app import process
    except ForeignPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        return _BAD_USAGE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale's encoding may lack some signs
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else no process learns how a rank ended
    code = 0
    try:
        if "--version" in arguments:  # of any command
            return process.print_all(process.versions())
        main = importlib.import_module(command).main
        if started is None:
            code = main(arguments)
        else:
            from metalearn.app.job import script  # imports Hydra, which not every command needs

            code = main(arguments, script(started))
        sys.stdout.flush()
    except BrokenPipeError:
        if not process.reader_has_left():
            raise
    except (ImportError, MemoryError, OSError) as error:
        if (why := process.without_memory(error)) is None:
            raise
        sys.stderr.write(f"error: {why}\n")
        code = _FAILED
    return code


def _unfit() -> str:
    """Why no command can run in this process; empty if it can."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one comes as far as here)
        return f"{sys.executable} is Python {version}: type that of Python 3.11 or later, or ./scripts/train.sh"
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
        checkout = os.path.isfile(os.path.join(root, "scripts", "setup.sh"))  # noqa: PTH113, PTH118
        typed = ".venv/bin/python after ./scripts/train.sh made it" if checkout else "pip install /path/to/metalearn"
        return f"{sys.executable} (Python {version}) has no {', '.join(missing)}: type {typed}"
    try:
        os.getcwd()  # noqa: PTH109 (Hydra asks for it too)
    except OSError as error:
        return f"the working folder cannot be used ({error.strerror}): go to another one by cd"
    return ""
