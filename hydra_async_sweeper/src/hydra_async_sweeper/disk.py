"""Faults of the disk, for which a sweep pauses: no trial is to blame, and the same command goes on."""

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

DISK_FAULT = os.EX_IOERR
"""The exit code of a trial's process, or of a task that returns its exit code, which such a fault has ended."""

ADVICE = {
    errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.EROFS: "make it writable", errno.EIO: "check the disk",
    errno.ESTALE: "mount it again", errno.ENOTCONN: "mount it again", errno.ENOENT: "bring it back",
    errno.ELOOP: "nothing is written through links: remove it",
}  # fmt: skip
"""What to do, for each number of an error that says that a disk or a folder is not as it was."""

_ALWAYS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
"""These come from a disk wherever they are met. What else a task meets may be its own fault: a file that it wants and
that is not there, or a place where it may not write."""

_LEAST = 2**20
"""Bytes that there must be room for: with less, a failure without a reason counts as one of the disk."""


class PausedError(RuntimeError):
    """The sweep cannot go on before somebody has mended a disk or a folder; the message says which."""


def fault_in(error: BaseException | None) -> OSError | None:
    """The fault of a disk behind an error, where its number alone says so."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ALWAYS:
            return error
        error = error.__cause__ or error.__context__
    return None


def fault_at(folders: Iterable[Path]) -> OSError | None:
    """What is wrong with the first of the folders that cannot be written: it is gone, or full, or read-only."""
    for folder in folders:
        probe = folder / f".probe.{os.getpid()}"
        try:
            descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _LEAST)
            finally:
                os.close(descriptor)
                probe.unlink()
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # this file system takes no space beforehand
                return OSError(error.errno, error.strerror, str(folder))
    return None


def line_of(fault: OSError, folder: Path) -> str:
    """What is wrong with which file or folder, how much room there is, and what to do.

    Args:
        folder: stands where the fault names no file.
    """
    place = os.fsdecode(fault.filename or folder)
    advice = ADVICE.get(fault.errno or 0, "mend it")
    return f"{place}: {fault.strerror or fault} ({room_at(Path(place))}); {advice}, and the same command goes on"


def room_at(path: Path) -> str:
    """How much room there is where a file or folder is, or would be."""
    with suppress(OSError):
        folders = (path, *path.absolute().parents)
        place = next(folder for folder in folders if os.path.isdir(folder))  # noqa: PTH112 (Path's may raise)
        status = os.statvfs(place)
        if status.f_files and not status.f_favail:
            return f"no inode is free in {place}"
        return f"{shutil.disk_usage(place).free // 1024:,} KiB are free in {place}"
    return "it does not say how much is free"


def refuse_links(paths: Iterable[Path]) -> None:
    """Raises OSError for the first of the paths that is a link: a write through it would go elsewhere."""
    for path in paths:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "is a link", str(path))


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file; readers find the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write it
    try:
        with suppress(FileNotFoundError):
            temporary.unlink()  # it may be a link
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
