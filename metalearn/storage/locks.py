"""A lock on a file, which ends with the process that holds it."""

import contextlib
import errno
import functools
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer."""

log = logging.getLogger("metalearn")


@contextlib.contextmanager
def held(path: Path, what: str, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock file `path`. On a file system without locks a message warns that nobody is kept out.

    Args:
        what: what the process that holds it does, for the message to one that waits, such as "x is being made".
        wait: wait for another process that holds it, without a time limit.

    Raises:
        OSError: it cannot be opened.
        TimeoutError: another process holds it, and is not waited for.
    """
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
        with contextlib.suppress(OSError):  # a full disk
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
    try:
        return path.read_text(encoding="utf-8") or "another process"
    except (OSError, ValueError):
        return "another process"


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, unless this process has logged it already."""
    log.warning("%s", message)
