"""How the program ends: exit codes, and errors that need no traceback."""

import io
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from metalearn.errors import ConfigError, DataError, RunError
from metalearn.runs.signals import INTERRUPTED

OK, FAILED, BAD_CONFIG, DIVERGED = 0, 1, 2, 3
"""Exit codes. A run that has diverged does so again: launchers do not repeat it."""

_OWN_RANK_SECONDS = 10.0

log = logging.getLogger("metalearn")


class Ending(NamedTuple):
    """An exit code, and the error behind it where there is one."""

    code: int
    error: str = ""


def exit_code_of(run: Callable[[], int]) -> int:
    """What `run` returns. If it raises an error that needs no traceback: reports it and gives its exit code."""
    return ending_of(run).code


def exit_code_of_process(run: Callable[[], int]) -> int:
    """As `exit_code_of`, for all that a process does: it may be interrupted at any moment. Signs that the terminal's
    encoding lacks are written as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return exit_code_of(run)
    except KeyboardInterrupt:
        return INTERRUPTED


def ending_of(run: Callable[[], int]) -> Ending:
    """As `exit_code_of`, with the error's message."""
    try:
        return Ending(run())
    except (ConfigError, DataError) as error:
        return Ending(report_error(error, BAD_CONFIG), str(error))
    except RunError as error:
        return Ending(report_error(error, FAILED), str(error))


def report_error(error: BaseException, code: int) -> int:
    """Prints what is wrong, once for all ranks of a host; returns `code`."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if not local_rank.isdecimal() or int(local_rank) == 0:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"error: {printable(f'{error}{notes}')}", file=sys.stderr)
        log.debug("ended by %s: %s%s", type(error).__name__, error, notes)  # for train.log
    elif code == BAD_CONFIG:
        # torchrun ends all ranks when the first one fails: give rank zero of the host the time to report.
        time.sleep(_OWN_RANK_SECONDS)
        number = os.environ.get("RANK", "?").zfill(len(os.environ.get("WORLD_SIZE", "")))
        print(f"error: worker{number}: {printable(str(error))}", file=sys.stderr)
    return code


def printable(text: str) -> str:
    """The text with its control characters written out: those of a file could change the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)


def print_to_pipe(text: str) -> None:
    """Prints to a reader who may leave early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails once more when it exits


def versions() -> str:
    """This program's version, and those of torch and hydra-core if they are installed."""
    found = []
    for name in ("metalearn-train", "torch", "hydra-core"):
        try:
            found.append(f"{name.removesuffix('-train')} {version(name)}")
        except PackageNotFoundError:
            found.append("metalearn (a checkout that is not installed)" if name == "metalearn-train" else f"no {name}")
    return ", ".join(found)
