"""The cache: a private folder of files that can be made again, such as compiled kernels and decoded pictures.

A folder or a file is used only if it is this user's and nobody else can write it, and a file only if it is still what
was written: beside `NAME.so` or `NAME.npy` lies `NAME.json`, the record with its SHA-256. What is not right is made
again.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.storage import locks

SMALL = 64 * 2**20
"""Bytes. A file up to this size is read whole at every start, to check its digest. A larger one is read whole only if
its size, its inode or its times of change are not those of the last check."""

LEFTOVER = re.compile(r"\.[\w-]+\.(so|npy|json)\.\w{8}\.tmp")
"""The names of files that a killed process has not finished."""

ADVICE = "name another folder: METALEARN_CACHE=/path/to/cache"

_ABSENT = "is not there"

log = logging.getLogger("metalearn")

Parts = Sequence[bytes | memoryview]


class CacheError(Exception):
    """A cache that cannot be used; the message names the folder or file, and says what to type."""


class Cached(NamedTuple):
    """A file of the cache, open for reading; and whether it has been made just now."""

    file: BufferedReader
    path: Path
    made: bool


def cache_folders() -> list[Path]:
    """Where files are kept: `METALEARN_CACHE`, or, where that is not private, one in the user's cache folder."""
    chosen, base = os.environ.get("METALEARN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folders = [Path(chosen).absolute()] if chosen else []
    with contextlib.suppress(RuntimeError):  # a user without a home folder
        folders.append((Path(base) if base else Path.home() / ".cache").absolute() / "metalearn")
    return list(dict.fromkeys(folders))


def get(name: str, make: Callable[[], Parts], *, head: bytes = b"") -> Cached:
    """The file `name` of the cache. If it is not there, or not fit for use, `make` gives its content.

    If several processes start together, one makes the file and the others wait. It appears complete or not at all.

    Args:
        name: with one suffix, such as `.npy`.
        head: how the content begins; a file that begins otherwise is made again.

    Raises:
        CacheError: no cache folder can be used.
    """
    path = _private_folder() / name
    found = _look(path, head)
    if not isinstance(found, str):
        return Cached(found, path, made=False)
    with contextlib.ExitStack() as holding:
        try:
            alone = holding.enter_context(locks.held(path.with_suffix(".lock"), f"{path} is being made"))
        except TimeoutError as error:
            raise CacheError(f"{error}, or {ADVICE}") from error
        except OSError as error:
            raise CacheError(f"{path.with_suffix('.lock')} cannot be opened ({error.strerror}); {ADVICE}") from error
        found = _look(path, head)
        if not isinstance(found, str):
            return Cached(found, path, made=False)
        if found != _ABSENT:
            log.warning("%s %s: it is made again", path, found)
        parts = make()
        try:
            for leftover in path.parent.glob(f".{path.stem}.*.tmp") if alone else ():
                leftover.unlink(missing_ok=True)
            _write(path, parts)
        except OSError as error:
            raise CacheError(f"{path} cannot be written ({error}); {ADVICE}") from error
        found = _look(path, head)
        if isinstance(found, str):
            raise CacheError(f"{path} was written and then {found}; {ADVICE}")
        return Cached(found, path, made=True)


def _private_folder() -> Path:
    refusals: list[str] = []
    fault: OSError | None = None
    for path in cache_folders():
        if refusals:
            locks.warn_once(f"{refusals[-1]}. {path} is used instead")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.stat()
        except OSError as error:
            fault = error
            refusals.append(f"the cache {path} cannot be used ({error})")
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                continue
            break  # such as a file in its place: a slip in METALEARN_CACHE must not fill the home folder
        why = foreign(status) or ("" if os.access(path, os.W_OK) else "cannot be written")
        if not why:
            return path
        advice = f": type chmod go-w {path}" if status.st_mode & 0o022 and status.st_uid == os.geteuid() else ""
        refusals.append(f"the cache {path} is not used, since it {why}{advice}")
    raise CacheError(f"{'; '.join(refusals) or 'there is no home folder for the cache'}; {ADVICE}") from fault


# What may be used


def foreign(status: os.stat_result) -> str:
    """Why another user can have written a file or folder; empty if only this user can, and root."""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _look(path: Path, head: bytes) -> BufferedReader | str:
    """The file, open, if it is fit for use; else what is wrong with it."""
    file = _open(path)
    if isinstance(file, str):
        return file
    wrong = _damage(path, file)
    file.seek(0)
    if wrong or file.read(len(head)) != head:
        file.close()
        return wrong or "holds something else"
    with contextlib.suppress(OSError):
        os.utime(record_of(path))  # the time of the last use
    file.seek(0)
    return file


def _open(path: Path) -> BufferedReader | str:
    """Checks the very file that is read: whoever can rename the folder may put another in its place at any time."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return _ABSENT
    except OSError as error:
        return f"cannot be opened ({error})"
    why = foreign(os.fstat(file.fileno()))
    if why:
        file.close()
    return why or file


def _damage(path: Path, file: BufferedReader) -> str:
    status, record = os.fstat(file.fileno()), read_record(path)
    if not record:
        return "has no record of its digest"
    large = status.st_size > SMALL
    if large and record["stamp"] == _stamp(status):
        return ""
    if large:
        log.info("%s may have changed since its digest was checked: it is checked again", path)
    if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
        return "is damaged (another SHA-256)"
    if large:
        with contextlib.suppress(OSError):
            _write_record(path, record["sha256"], status)
    return ""


def record_of(path: Path) -> Path:
    """The record of a file."""
    return path.with_suffix(".json")


def read_record(path: Path) -> dict[str, Any]:
    """The record of a file; empty if there is no valid one."""
    file = _open(record_of(path))
    if isinstance(file, str):
        return {}
    with file, contextlib.suppress(ValueError, RecursionError):
        record = json.loads(file.read(4096))
        if isinstance(record, dict) and record.keys() == {"sha256", "stamp"}:
            return record
    return {}


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


# Writing and removing


def _write(path: Path, parts: Parts) -> None:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    _replace(path, parts)
    _write_record(path, digest.hexdigest(), path.stat())


def _write_record(path: Path, sha256: str, status: os.stat_result) -> None:
    _replace(record_of(path), [json.dumps({"sha256": sha256, "stamp": _stamp(status)}).encode()])


def _replace(path: Path, parts: Parts) -> None:
    descriptor, name = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove(path: Path) -> bool:
    """Removes a file, its record and its lock; False if a process is making it. Who has mapped it keeps it."""
    lock = path.with_suffix(".lock")
    try:
        with locks.held(lock, f"{path} is being made", patience=0):
            for entry in (path, record_of(path), lock):
                entry.unlink(missing_ok=True)
    except TimeoutError:
        return False
    return True
