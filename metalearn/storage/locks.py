"""Locks on files, which end with the process that holds them. Waits are told and limited; links are not followed."""

import contextlib
import fcntl
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

SILENT_SECONDS = 60.0
"""How long a process waits for another one that holds the lock but gives no sign of life."""

_SIGN_SECONDS = 2.0

log = logging.getLogger("metalearn")


def open_lock(path: str | Path, *, mode: int = 0o666, folder: int | None = None) -> TextIO:
    """Opens a lock file, and makes it if it is not there. What it holds stays.

    Args:
        mode: of a new file, less the umask.
        folder: the descriptor of the folder that `path` starts from.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "r+", errors="replace", opener=lambda name, _: os.open(name, flags, mode, dir_fd=folder))


def try_to_hold(lock: TextIO) -> bool:
    """Holds a lock until its file is closed or the process ends; False if another process holds it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def held(path: Path, folder: int, what: str) -> Iterator[bool]:
    """Holds the lock file `path`, which only this user may open, and gives signs of life to the processes that wait.

    Args:
        folder: the descriptor of the folder of `path`.
        what: what the process that holds it does, for the message to who waits, such as "x is being made".

    Yields:
        Whether other processes are kept out: not on a file system without locks, of which a message warns.

    Raises:
        OSError: it cannot be opened, or is a link.
        TimeoutError: another process holds it, and gives no sign of life.
    """
    lock, alone = _acquire(path, folder, what)
    ended = threading.Event()
    signs = threading.Thread(target=_show_life, args=(lock, ended), daemon=True)
    with lock:
        signs.start()
        try:
            yield alone
        finally:
            ended.set()
            signs.join()


def _acquire(path: Path, folder: int, what: str) -> tuple[TextIO, bool]:
    seen, since, told = -1, 0.0, False
    while True:
        lock = open_lock(path.name, mode=0o600, folder=folder)
        try:
            is_held = try_to_hold(lock)
        except OSError as error:
            warn_once(f"{path}: its file system has no locks ({error.strerror}); processes that meet do the same work")
            return lock, False
        status = os.fstat(lock.fileno())
        if is_held and _is_there(path.name, folder, status):
            _sign(lock)
            return lock, True
        holder = lock.read(256).strip() or "another process"
        lock.close()
        if is_held:
            continue
        if not told:
            log.warning("%s by %s: waiting", what, holder)
            told = True
        if status.st_mtime_ns != seen:
            seen, since = status.st_mtime_ns, time.monotonic()
        if time.monotonic() - since > SILENT_SECONDS:
            raise TimeoutError(
                f"{path} is held by {holder}, which has given no sign of life for {SILENT_SECONDS:g} s: "
                "end that process"
            )
        time.sleep(0.1)


def _is_there(name: str, folder: int, status: os.stat_result) -> bool:
    """Whether the lock file has not been removed since it was opened."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == status.st_ino
    except FileNotFoundError:
        return False


def _sign(lock: TextIO) -> None:
    with contextlib.suppress(OSError):
        os.fchmod(lock.fileno(), 0o600)  # who may open it may hold it
        os.ftruncate(lock.fileno(), 0)
        os.pwrite(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)


def _show_life(lock: TextIO, ended: threading.Event) -> None:
    while not ended.wait(_SIGN_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(lock.fileno())


@functools.cache
def warn_once(message: str) -> None:
    log.warning("%s", message)
