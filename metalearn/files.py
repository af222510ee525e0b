"""Files that are written whole or not at all, JSON, and locks."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, TextIO


def write_atomically(path: Path, text: str) -> None:
    """Writes or replaces a file. Readers find the old text or the new one, never a part, even after a kill."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a kill, or a link to somebody's file
    with temporary.open("x") as file:
        file.write(text)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file, or it holds no JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content


def open_lock(path: str | Path, *, mode: int = 0o666, folder: int | None = None) -> TextIO:
    """Opens a lock file, and makes it if it is not there. What it holds stays.

    Args:
        mode: of a new file, less the umask.
        folder: the descriptor of the folder that `path` starts from.

    Raises:
        OSError: it cannot be opened, or is a link: a link is not followed.
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
