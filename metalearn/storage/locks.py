"""A lock on a file, which ends with the process that holds it. Waits are told and limited; links are not followed."""

import contextlib
import errno
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

SILENT_SECONDS = 60.0
"""How long a process waits for another one that holds the lock but gives no sign of life."""

_SIGN_SECONDS = 2.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

log = logging.getLogger("metalearn")


@contextlib.contextmanager
def held(path: Path, what: str, *, patience: float | None = None) -> Iterator[bool]:
    """Holds the lock file `path`, and gives signs of life to the processes that wait for it.

    Args:
        what: what the process that holds it does, for the message to one that waits, such as "x is being made".
        patience: seconds to wait without a sign of life, by default `SILENT_SECONDS`. With 0 nothing is waited for.

    Yields:
        Whether other processes are kept out: not on a file system without locks, of which a message warns.

    Raises:
        OSError: it cannot be opened, or is a link.
        TimeoutError: another process holds it, and gives no sign of life.
    """
    descriptors: list[int] = []
    # In place of a missing flock, filelock would make a file that a killed process leaves held.
    lock = FileLock(path, mode=0o600, fallback_to_soft=False, on_acquired=descriptors.append)
    alone = _acquire(lock, path, what, SILENT_SECONDS if patience is None else patience)
    ended = threading.Event()
    signs = threading.Thread(target=_show_life, args=(descriptors, ended), daemon=True)
    signs.start()
    try:
        yield alone
    finally:
        ended.set()
        signs.join()
        lock.release()


def _acquire(lock: FileLock, path: Path, what: str, patience: float) -> bool:
    seen, since = None, 0.0
    while True:
        try:
            lock.acquire(blocking=False)
            return True
        except Timeout:
            sign = _sign_in(path)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warn_once(f"{path}: its file system has no locks ({error.strerror}); processes that meet do the same work")
            return False
        holder, now = sign[0], time.monotonic()
        if seen is None and patience:
            log.warning("%s by %s, which holds %s: waiting", what, holder, path)
        if sign != seen:
            seen, since = sign, now
        if now - since >= patience:
            raise TimeoutError(
                f"{path} is held by {holder}, which has given no sign of life for {patience:g} s: end that process"
            )
        time.sleep(0.1)


def _sign_in(path: Path) -> tuple[str, int]:
    """The process that holds a lock file, and the time of its latest sign of life."""
    try:
        return holder_of(path), path.stat().st_mtime_ns
    except OSError:
        return "another process", 0


def holder_of(path: Path) -> str:
    """The process that holds the lock on a file: as the kernel of this host knows it, else as the file says."""
    try:
        inode = f":{path.stat().st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].endswith(inode):
                return f"process {fields[4]} of {Path('/proc', fields[4]).owner()}"
    except (OSError, ValueError, IndexError, KeyError):  # another system, or a process that cannot be seen from here
        pass
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def _show_life(descriptors: list[int], ended: threading.Event) -> None:
    name = f"process {os.getpid()} on {socket.gethostname()}".encode()
    for descriptor in descriptors:  # none without locks
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(descriptor, os.pwrite(descriptor, name, 0))
        while not ended.wait(_SIGN_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(descriptor)


@functools.cache
def warn_once(message: str) -> None:
    log.warning("%s", message)
