"""How the program ends: exit codes, errors that need no traceback, and output that is read to its end or not."""

import errno
import logging
import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from metalearn.errors import ConfigError, DataError, DiskError, RunError, printable
from metalearn.reporting.provenance import own_version, version_of
from metalearn.runs.signals import INTERRUPTED
from metalearn.storage.files import comes_from_disk, is_disk_fault, unwritten

OK, FAILED, BAD_CONFIG, DIVERGED = 0, 1, 2, 3
"""Exit codes. A run that has diverged does so again: launchers do not repeat it."""

DISK = os.EX_IOERR
"""The exit code of a rank, or of a trial, whose disk has failed. The program itself ends with `FAILED`."""

_OWN_RANK_SECONDS = 10.0
_NO_MEMORY = ("can't allocate memory", "out of memory", "failed to map segment")
"""How torch, and the loader of shared libraries, say it."""

log = logging.getLogger("metalearn")


class Ending(NamedTuple):
    """An exit code, and the error behind it where there is one."""

    code: int
    error: str = ""


def exit_code_of(run: Callable[[], int]) -> int:
    """What `run` returns. If it raises an error that needs no traceback: reports it and gives its exit code."""
    return ending_of(run).code


def exit_code_of_process(run: Callable[[], int]) -> int:
    """As `exit_code_of`, for all that a process does: it may be interrupted at any moment."""
    try:
        code = exit_code_of(run)
        if code != DISK:
            return code
        from metalearn.config.check import started_by_launcher  # imports Hydra, which not every command needs

        return DISK if started_by_launcher() else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def ending_of(run: Callable[[], int]) -> Ending:
    """As `exit_code_of`, with the error's message."""
    try:
        return Ending(run())
    except (ConfigError, DataError) as error:
        return Ending(report_error(error, DISK if comes_from_disk(error) else BAD_CONFIG), str(error))
    except RunError as error:
        return Ending(report_error(error, DISK if isinstance(error, DiskError) else FAILED), str(error))
    except OSError as error:
        if not is_disk_fault(error):
            raise
        told = unwritten(Path(os.fsdecode(error.filename or "a file")), error, "used")
        return Ending(report_error(told, DISK), str(told))


def report_error(error: BaseException, code: int) -> int:
    """Prints what is wrong, once for all ranks of a host; returns `code`."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    if not local_rank.isdecimal() or int(local_rank) == 0:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        with suppress(OSError):  # stderr may be a file on the same full disk
            print(f"error: {printable(f'{error}{notes}')}", file=sys.stderr)
        log.debug("ended by %s: %s%s", type(error).__name__, error, notes)  # for train.log
    elif code == BAD_CONFIG:
        # torchrun ends all ranks when the first one fails: give rank zero of the host the time to report.
        time.sleep(_OWN_RANK_SECONDS)
        number = os.environ.get("RANK", "?").zfill(len(os.environ.get("WORLD_SIZE", "")))
        print(f"error: worker{number}: {printable(str(error))}", file=sys.stderr)
    return code


def without_memory(error: Exception) -> str | None:
    """What to report of an error that is a lack of memory; None for another one."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    lacks = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if not lacks and not any(sign in line for sign in _NO_MEMORY):
        return None
    return f"the memory is not enough: {line}; type a smaller trainer.task_chunk, or fewer workers"


def reader_has_left() -> bool:
    """Whether stdout is a pipe that nobody reads any more: `head` has had enough. What is left of the output is dropped
    then, or Python would complain at its end."""
    pipe = select.poll()
    pipe.register(1, 0)
    left = any(event & select.POLLERR for _, event in pipe.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return left


def print_all(text: str) -> int:
    """Prints what a command was asked for; returns the exit code. That nobody reads it any more is no failure, and
    changes no other code of the command."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        if not reader_has_left():
            raise
    return OK


def versions() -> str:
    """This program's version, and those of torch and hydra-core if they are installed."""
    found = [f"metalearn {own_version() or '(a checkout that is not installed)'}"]
    for name in ("torch", "hydra-core"):
        version = version_of(name)
        found.append(f"{name} {version}" if version else f"no {name}")
    return ", ".join(found)
