"""The cache: a folder of files that can be made again, such as compiled kernels and decoded pictures.

A file is used only if no other user can have written it or its folder, root excepted, and if it is still what was
written: beside `NAME.so` or `NAME.npy` lies `NAME.json`, the record with its SHA-256. What is not right is made again.
Folder and file are opened, checked and used by the same descriptors, so nothing can be put in their place in between.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from metalearn.storage import locks

SMALL = 64 * 2**20
"""Bytes. A file up to this size is read whole at every start, to check its digest. A larger one is read whole only if
its inode or its times of change are not those of the last check."""

LEFTOVER = re.compile(r"\.[\w-]+-[0-9a-f]{16}\.tmp|kernels-(float|double)-[0-9a-f]{16}\.\d+")
"""The names of files that a killed process has not finished."""

STALE_SECONDS = 24 * 3600.0
"""A leftover that is older than this belongs to no process at work."""

ADVICE = "name another folder: METALEARN_CACHE=/path/to/cache"

ROOTS_FOLDER = "METALEARN_ROOTS_CACHE"
"""Environment variable for the processes that this one starts: device and inode of a cache folder that is root's. In
the user namespace of an isolated run, root's files look like those of any other user."""

_UNMAPPED = 65534  # how Linux shows the users that a namespace does not know
_ABSENT = "is not there"
_RECORD_BYTES = 4096

log = logging.getLogger("metalearn")

Parts = Sequence[bytes | memoryview]


class CacheError(Exception):
    """A cache that cannot be used; the message names the folder or file, and says what to type."""


class _FolderError(CacheError):
    """This folder cannot serve, but another one may."""


class Cached(NamedTuple):
    """A file of the cache, open for reading; and whether it has been made just now."""

    file: BufferedReader
    path: Path
    made: bool


class Folder(NamedTuple):
    """An open folder, by its descriptor; `root` is the user to whom root's files belong here."""

    path: Path
    fd: int
    root: int = 0


def cache_folders() -> list[Path]:
    """Where files are kept: `METALEARN_CACHE`, and one in the user's cache folder for what cannot be kept there."""
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
    refusals: list[str] = []
    for path in cache_folders():
        if refusals:
            locks.warn_once(f"{refusals[-1]}. {path} is used instead")
        try:
            with _opened(path) as folder:
                return _get(folder, name, make, head)
        except _FolderError as error:
            refusals.append(str(error))
    raise CacheError(f"{'; '.join(refusals) or 'there is no home folder for the cache'}; {ADVICE}")


def _get(folder: Folder, name: str, make: Callable[[], Parts], head: bytes) -> Cached:
    path = folder.path / name
    found = _look(folder, name, head)
    if not isinstance(found, str):
        return Cached(found, path, made=False)
    with contextlib.ExitStack() as holding:
        alone = _hold(holding, folder, name, found)
        found = _look(folder, name, head)
        if not isinstance(found, str):
            return Cached(found, path, made=False)
        if found != _ABSENT:
            log.warning("%s %s: it is made again", path, found)
        parts = make()
        try:
            _write(folder, name, parts)
        except OSError as error:
            raise CacheError(f"{path} cannot be written ({error}); {ADVICE}") from error
        _remove_leftovers(folder, name, alone)
        found = _look(folder, name, head)
        if isinstance(found, str):
            raise CacheError(f"{path} was written and then {found}; {ADVICE}")
        return Cached(found, path, made=True)


def _hold(holding: contextlib.ExitStack, folder: Folder, name: str, why: str) -> bool:
    """Holds the lock of a file, about which `why` says what is wrong; returns whether other processes are kept out."""
    path = folder.path / name
    try:
        return holding.enter_context(locks.held(folder.path / _lock_name(name), folder.fd, f"{path} is being made"))
    except TimeoutError as error:
        raise CacheError(f"{error}, or {ADVICE}") from error
    except OSError as error:
        raise _unusable(f"{path} {why}, and {_lock_name(name)} cannot be opened ({error.strerror})", error) from error


# What may be used


def foreign(status: os.stat_result, root: int = 0) -> str:
    """Why another user can have written a file or folder; empty if only this user and root can."""
    if status.st_uid not in (os.geteuid(), root):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Folder]:
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(f"the cache {path} cannot be used ({error})", error) from error
    try:
        status = os.fstat(fd)
        root = _root_of(status)
        why = foreign(status, root)
        if why:
            advice = f": type chmod go-w {path}" if status.st_uid == os.geteuid() else ""
            raise _FolderError(f"the cache {path} is not used, since it {why}{advice}")
        yield Folder(path, fd, root)
    finally:
        os.close(fd)


def _root_of(status: os.stat_result) -> int:
    """The user to whom root's files belong in this folder: 0, or what stands for it in a user namespace."""
    identity = f"{status.st_dev}:{status.st_ino}"
    if status.st_uid == 0:
        os.environ[ROOTS_FOLDER] = identity
        return 0
    return _UNMAPPED if os.environ.get(ROOTS_FOLDER) == identity else 0


def _unusable(message: str, error: OSError) -> CacheError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _FolderError(message)
    return CacheError(f"{message}; {ADVICE}")


def _look(folder: Folder, name: str, head: bytes) -> BufferedReader | str:
    """The file, open, if it is fit for use; else what is wrong with it."""
    file = _open(folder, name)
    if isinstance(file, str):
        return file
    with contextlib.ExitStack() as closing:
        closing.enter_context(file)
        wrong = _damage(folder, name, file)
        file.seek(0)
        if wrong or file.read(len(head)) != head:
            return wrong or "holds something else"
        with contextlib.suppress(OSError):  # root's, or on a file system that may only be read
            os.utime(record_name(name), dir_fd=folder.fd, follow_symlinks=False)  # the time of the last use
        file.seek(0)
        closing.pop_all()
    return file


def _open(folder: Folder, name: str) -> BufferedReader | str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder.fd)
    except FileNotFoundError:
        return _ABSENT
    except OSError as error:
        return f"cannot be opened ({error.strerror})"
    status = os.fstat(fd)
    why = foreign(status, folder.root) if stat.S_ISREG(status.st_mode) else "is not a file"
    if why:
        os.close(fd)
        return why
    return os.fdopen(fd, "rb")


def _damage(folder: Folder, name: str, file: BufferedReader) -> str:
    """What in a file does not agree with its record; empty if all does."""
    record, status = read_record(folder, name), os.fstat(file.fileno())
    if not record:
        return "has no record of its digest"
    if record["size"] != status.st_size:
        return f"is damaged ({status.st_size} bytes of {record['size']})"
    checked = record["stamp"] == _stamp(status)
    if checked and status.st_size > SMALL:
        return ""
    if status.st_size > SMALL:
        log.info("%s may have changed since its digest was checked: it is checked again", folder.path / name)
    if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
        return "is damaged (another SHA-256)"
    if not checked and status.st_size > SMALL:
        with contextlib.suppress(OSError):
            _write_record(folder, name, record["sha256"], status)
    return ""


def record_name(name: str) -> str:
    """The name of the record of the file `name`."""
    return f"{Path(name).stem}.json"


def _lock_name(name: str) -> str:
    return f"{Path(name).stem}.lock"


def read_record(folder: Folder, name: str) -> dict[str, Any]:
    """The record of the file `name`; empty if there is no valid one."""
    file = _open(folder, record_name(name))
    if isinstance(file, str):
        return {}
    with file, contextlib.suppress(ValueError, RecursionError):
        record = json.loads(file.read(_RECORD_BYTES))
        if isinstance(record, dict) and record.keys() == {"sha256", "size", "stamp"}:
            return record
    return {}


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


# Writing and removing


def _write(folder: Folder, name: str, parts: Parts) -> None:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    _replace(folder, name, parts)
    _write_record(folder, name, digest.hexdigest(), os.stat(name, dir_fd=folder.fd))
    os.fsync(folder.fd)


def _write_record(folder: Folder, name: str, sha256: str, status: os.stat_result) -> None:
    record = {"sha256": sha256, "size": status.st_size, "stamp": _stamp(status)}
    _replace(folder, record_name(name), [json.dumps(record).encode()])


def _replace(folder: Folder, name: str, parts: Parts) -> None:
    temporary = f".{Path(name).stem}-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o644, dir_fd=folder.fd), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.fd)
        raise


def remove(folder: Folder, name: str) -> bool:
    """Removes the file `name`, its record and its lock; False if a process is making it. Who has mapped it keeps it."""
    with locks.open_lock(_lock_name(name), mode=0o600, folder=folder.fd) as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            if not locks.try_to_hold(lock):
                return False
        for entry in (name, record_name(name), _lock_name(name)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry, dir_fd=folder.fd)
    return True


def _remove_leftovers(folder: Folder, name: str, alone: bool) -> None:
    """Removes what killed processes have left: old files, and those of `name` if this process is `alone` at it."""
    of_name = re.compile(rf"\.{re.escape(Path(name).stem)}-[0-9a-f]{{16}}\.tmp")
    for entry in os.listdir(folder.fd):  # noqa: PTH208 (by its descriptor)
        if not LEFTOVER.fullmatch(entry):
            continue
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(entry, dir_fd=folder.fd, follow_symlinks=False).st_mtime
            if age > STALE_SECONDS or (alone and of_name.fullmatch(entry)):
                os.unlink(entry, dir_fd=folder.fd)
