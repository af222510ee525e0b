"""Shows what the cache holds, and removes what is no longer wanted.

    metalearn cache                                        every file: kind, size, age, last use
    metalearn cache --clean --older-than 30                shows what has not been used for 30 days
    metalearn cache --clean --older-than 30 --yes          removes it

The folder is METALEARN_CACHE, else metalearn in the user's cache folder. Every --clean takes what killed processes have
left unfinished a day ago or longer. Only files that this program has made are removed; processes that use them go on,
and the next start makes them again. Exit codes: 0; 1 a file could not be removed; 2 wrong arguments.
"""

import argparse
import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from metalearn.cli.arguments import command_parser
from metalearn.errors import printable
from metalearn.storage import cache
from metalearn.storage.files import read_json

OK, FAILED = 0, 1
LEFTOVER = "leftover"
DAY, MEGABYTE = 24 * 3600.0, 1e6


class CacheEntry(NamedTuple):
    """A file of the cache. `age` and `unused` are the seconds since it was made and since its last use."""

    path: Path
    kind: str
    size: int
    age: float
    unused: float


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("cache", __doc__)
    arg = parser.add_argument
    arg("--clean", action="store_true", help="choose files to remove; --yes removes them")
    arg("--older-than", type=amount, default=math.inf, metavar="DAYS", help="those that were not used for this time")
    arg("--yes", action="store_true", help="remove; without it, only show what --clean would remove")
    options = parser.parse_args(arguments)
    if not options.clean and (options.yes or options.older_than < math.inf):
        parser.error("--older-than and --yes: choose what --clean removes; type --clean too")
    folder = cache.cache_folder()
    try:
        files = sorted(entries(folder), key=lambda entry: -entry.unused)
    except OSError as error:
        print(f"{folder}: {error.strerror}")
        return OK
    print(f"{folder}:")
    if options.clean:
        # A leftover that is a day old belongs to no process at work.
        days = {LEFTOVER: 1.0}
        files = [entry for entry in files if entry.unused > DAY * days.get(entry.kind, options.older_than)]
    code = OK
    for entry in files:
        done = ""
        if options.clean and options.yes:
            try:
                if entry.kind == LEFTOVER:
                    entry.path.unlink()
                    done = "removed"
                else:
                    done = "removed" if cache.remove(entry.path) else "is being made: stays"
            except OSError as error:
                done, code = f"cannot be removed: {error.strerror}", FAILED
        age = f"{entry.age / DAY:6.1f} days old, used {entry.unused / DAY:6.1f} days ago"
        line = f"  {entry.kind:14} {entry.size / MEGABYTE:10.1f} MB  {age}  {entry.path.name}  {done}"
        print(printable(line).rstrip())
    total = f"{len(files)} files, {sum(entry.size for entry in files) / MEGABYTE:.1f} MB"
    print(f"  {total}{'; nothing is removed without --yes' if options.clean and not options.yes else ''}")
    return code


def amount(text: str) -> float:
    """A number that is not negative."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number that is not negative; type 30")
    return float(text)


def entries(folder: Path) -> Iterator[CacheEntry]:
    """What this program has made in a folder, without records and locks."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            if not path.is_file():
                continue
            status = path.stat()
            age = time.time() - status.st_mtime
            if cache.LEFTOVER.fullmatch(path.name):
                yield CacheEntry(path, LEFTOVER, status.st_size, age, age)
            elif path.suffix in (".so", ".npy") and read_json(cache.record_of(path)):
                unused = time.time() - cache.record_of(path).stat().st_mtime
                yield CacheEntry(path, path.stem.partition("-")[0], status.st_size, age, unused)
