"""Files: JSON that is read, files and folders that are written whole or not at all, locks, and disks that are full."""

import ctypes
import errno
import functools
import glob
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from metalearn.errors import ConfigError, DiskError, RunError

log = logging.getLogger("metalearn")

StrPath = str | os.PathLike[str]
STANDS = "what was saved before stands, and the same command resumes the run"

# What a disk that is full or fails answers, or one that is not mounted any more; and file systems without locks.
_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError if it cannot be read, ValueError if it holds no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: holds no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """As `read_object`; empty if there is no such file, or it holds no JSON object, as one that a power cut has left.
    Raises ConfigError if the file is there, and may not be read."""
    try:
        return read_object(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; make it readable, or move it away") from error


def is_folder(path: Path) -> bool:
    """Whether this is a folder. A name that the system refuses, such as one that is too long, is none."""
    return os.path.isdir(path)  # noqa: PTH112 (Path's may raise)


@contextmanager
def creating(key: str, path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, the output folder or file that `key` names, a ConfigError."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise ConfigError(
            f"{key}={path}: cannot be written: {getattr(error, 'strerror', None) or error}; type another {key}, where "
            "you may write"
        ) from error


def refuse_used(key: str, folder: Path) -> None:
    """Raises ConfigError if the output folder that `key` names is there already, and is not an empty folder."""
    with creating(key, folder):
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise ConfigError(f"{key}={folder}: is there already, and not an empty folder; type another name")


@contextmanager
def whole_folder(key: str, folder: Path) -> Iterator[Path]:
    """Gives a folder to fill, which becomes the output folder `folder` that `key` names, if nothing fails. Raises
    ConfigError if `folder` is there already and not empty, has no name, or cannot be written."""
    refuse_nameless(key, folder)
    refuse_used(key, folder)
    temporary = beside(folder)
    try:
        with creating(key, folder):
            temporary.mkdir(parents=True)
            yield temporary
            temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def beside(folder: Path) -> Path:
    """Where a process fills what becomes `folder`. What killed ones have left there an hour ago is removed."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdecimal() and time.time() - path.stat().st_mtime > 3600:  # on another host, numbers say nothing
            try:
                os.kill(int(number), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
            except (OverflowError, PermissionError):  # no process's number; another user's process
                continue
    return folder.with_name(f".{folder.name}.{os.getpid()}.tmp")


def exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step, so that neither name is ever missing; False where the system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux; not on every file system
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: paths are from the current folder
    return exchange is not None and exchange(here, os.fsencode(one), here, os.fsencode(other), flag) == 0


def refuse_nameless(key: str, folder: Path) -> None:
    """Raises ConfigError for a path such as `.` or `..`, as which nothing can be renamed when it is complete."""
    if folder.name in ("", ".."):
        raise ConfigError(f"{key}={folder}: must end in the name of a folder; type {key}=best, for example")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, or a file below it, a RunError that names the file."""
    try:
        yield
    except OSError as error:
        raise unwritten(Path(os.fsdecode(error.filename or path)), error) from error


def is_disk_fault(error: BaseException | None) -> bool:
    """True for disk errors (full, I/O, read-only)."""
    return isinstance(error, DiskError) or (isinstance(error, OSError) and error.errno in _FAULTS)


def comes_from_disk(error: BaseException | None) -> bool:
    """True if a cause in the chain is a disk error."""
    while error is not None and not is_disk_fault(error):
        error = error.__cause__
    return error is not None


def unwritten(path: Path, error: OSError, verb: str = "written") -> RunError:
    """The error for a file of a run that could not be written. Where a disk is to blame, it says how much is free."""
    reason = f"{path}: cannot be {verb}: {error.strerror or error}"
    if is_disk_fault(error) or error.errno == errno.ENOENT:  # its folder is gone
        advice = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.ENOENT: "bring its folder back"}
        todo = advice.get(error.errno or 0, "mend the disk")
        return DiskError(f"{reason} ({room_at(path)}); {todo}; {STANDS}")
    return RunError(f"{reason}; {STANDS}")


def room_at(path: Path) -> str:
    """The free space of the disk where a file is, or would be."""
    try:
        place = next(folder for folder in path.absolute().parents if is_folder(folder))
        return f"{shutil.disk_usage(place).free // 1024:,} KiB are free in {place}"
    except OSError as error:
        return f"how much is free is not known: {error.strerror}"


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes or replaces a file. Readers find the old text or the new one, never a part, even after a power loss. Its
    permissions are `mode`, less the process's umask. Raises RunError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.unlink(missing_ok=True)  # a kill may have left it, and `mode` is for a new file
        with open(
            temporary, "w", encoding="utf-8", errors="surrogateescape",  # the names of files may not be UTF-8
            opener=lambda name, flags: os.open(name, flags, mode),
        ) as file:  # fmt: skip
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def held(path: Path, what: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock file `path`. On a file system without locks a message warns that others are not kept out. Raises
    TimeoutError if another process holds it, and it is not to `wait` for that, without a time limit. `what` says what
    the process that holds it does, for the message to one that waits, such as "x is being made"."""
    # In place of a missing flock, filelock would make a file that a killed process leaves held.
    lock = FileLock(path, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if not wait:
                raise
            log.warning("%s by %s, which holds %s: waiting", what, holder_of(path), path)
            lock.acquire()
        with suppress(OSError):  # a full disk
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warn_once(f"{path}: its file system has no locks ({error.strerror}); let no other process work there")
    try:
        yield
    finally:
        lock.release()


def holder_of(path: Path) -> str:
    """The process that holds a lock, as it has noted itself."""
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8") or "another process"
    return "another process"


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, unless this process has logged it already."""
    log.warning("%s", message)
