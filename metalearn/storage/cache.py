"""The cache: a folder of files that can be made again, such as compiled kernels and decoded pictures.

A file is used only if it is still what was written: beside `NAME.so` or `NAME.npy` lies `NAME.json`, the record with
its SHA-256. What is damaged is made again.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from metalearn.errors import ConfigError, RunError
from metalearn.storage import locks
from metalearn.storage.files import read_json, write_atomically

SMALL = 64 * 2**20
"""Bytes. A file up to this size is read whole at every start, to check its digest. A larger one is read whole only if
its size or its time of change is not that of the record."""

LEFTOVER = re.compile(r"\.[\w-]+\.(so|npy|json)(\.\w+)?\.tmp")
"""The names of files that a killed process has not finished."""

ADVICE = "name another folder: METALEARN_CACHE=/path/to/cache"

log = logging.getLogger("metalearn")

Parts = Sequence[bytes | memoryview]


class CacheError(Exception):
    """A cache that cannot be used; the message names the folder or file, and says what to type."""


class Cached(NamedTuple):
    """A file of the cache, open for reading; and whether it has been made just now."""

    file: BufferedReader
    path: Path
    made: bool


def cache_folder() -> Path:
    """Where files are kept: `METALEARN_CACHE`, else `metalearn` in the user's cache folder."""
    chosen = os.environ.get("METALEARN_CACHE")
    return Path(chosen).absolute() if chosen else user_cache_path("metalearn")


def get(name: str, make: Callable[[], Parts], *, head: bytes = b"") -> Cached:
    """The file `name` of the cache. If it is not there, or not fit for use, `make` gives its content.

    If several processes start together, one makes the file and the others wait. It appears complete or not at all.

    Args:
        name: with one suffix, such as `.npy`.
        head: how the content begins; a file that begins otherwise is made again.

    Raises:
        CacheError: the cache folder cannot be used.
    """
    path = cache_folder() / name
    with contextlib.ExitStack() as holding:
        with _using(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file, damage = _look(path, head)
            if file is None:
                holding.enter_context(locks.held(path.with_suffix(".lock"), f"{path} is being made"))
                file, damage = _look(path, head)  # another process may have made it
        if file is not None:
            return Cached(file, path, made=False)
        if damage:
            log.warning("%s %s: it is made again", path, damage)
        parts = make()
        with _using(path):
            _write(path, parts)
            return Cached(path.open("rb"), path, made=True)


@contextlib.contextmanager
def _using(path: Path) -> Iterator[None]:
    """Makes a failure of the disk a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(f"the cache {error.filename or path} cannot be used ({error.strerror}); {ADVICE}") from error
    except (ConfigError, RunError) as error:
        raise CacheError(f"{error}; {ADVICE}") from error


def _look(path: Path, head: bytes) -> tuple[BufferedReader | None, str]:
    """The file, open, if it is fit for use; else what is wrong with it, or nothing if it is not there."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None, ""
    record, status = read_record(path), os.fstat(file.fileno())
    if not record:
        damage = "has no record of its digest"
    elif status.st_size > SMALL and record.get("stamp") == _stamp(status):
        damage = ""
    else:
        same = hashlib.file_digest(file, "sha256").hexdigest() == record.get("sha256")
        damage = "" if same else "is damaged (another SHA-256)"
        if same and status.st_size > SMALL:  # a copy, which need not be read whole again
            with contextlib.suppress(RunError):
                _write_record(path, record["sha256"], status)
    file.seek(0)
    if not damage and file.read(len(head)) != head:
        damage = "holds something else"
    if damage:
        file.close()
        return None, damage
    file.seek(0)
    with contextlib.suppress(OSError):
        os.utime(record_of(path))  # the time of the last use
    return file, ""


def record_of(path: Path) -> Path:
    """The record of a file."""
    return path.with_suffix(".json")


def read_record(path: Path) -> dict[str, Any]:
    """The record of a file; empty if there is no valid one."""
    return read_json(record_of(path))


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns]


def _write(path: Path, parts: Parts) -> None:
    digest = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _write_record(path, digest.hexdigest(), path.stat())


def _write_record(path: Path, sha256: str, status: os.stat_result) -> None:
    write_atomically(record_of(path), json.dumps({"sha256": sha256, "stamp": _stamp(status)}))


def remove(path: Path) -> bool:
    """Removes a file, its record and its lock; False if a process is making it. Who has mapped it keeps it."""
    lock = path.with_suffix(".lock")
    try:
        with locks.held(lock, f"{path} is being made", wait=False):
            for entry in (path, record_of(path), lock):
                entry.unlink(missing_ok=True)
    except TimeoutError:
        return False
    return True
