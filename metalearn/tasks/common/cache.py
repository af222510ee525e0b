"""A decoded array in one cache file. It is made once, whole or not at all, and every process of a host maps it."""

import fcntl
import functools
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np

from metalearn.errors import DataError
from metalearn.files import cache_folder
from metalearn.tasks.common.episodes import Images

log = logging.getLogger(__name__)


def cached_array(
    name: str, shape: tuple[int, ...], make: Callable[[], Images], *, title: str, unread: str | None = None
) -> Images:
    """The uint8 array `name`, mapped read-only from the cache; `make` makes it if it is not there yet.

    If several processes start together, one makes the array and the others wait. The file appears complete or not at
    all. If the file is there already, a message names it.

    Args:
        title: what the message calls the data.
        unread: the `dataset.root`, if `name` does not depend on it: the message says that it is not read. If there is
            no such folder, the message is a warning.

    Raises:
        DataError: the cache folder cannot be written.
    """
    path = cache_folder() / f"{name}.npy"
    array = _mapped(path, shape)
    if array is not None:
        _log_read(title, path, unread)
        return array
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            array = _mapped(path, shape)
            if array is None:
                _write(path, make())
                array = _mapped(path, shape)
    except OSError as error:
        raise DataError(
            f"the cache {path} cannot be written ({error}); name another folder: METALEARN_CACHE=/path/to/cache"
        ) from error
    assert array is not None
    return array


def _mapped(path: Path, shape: tuple[int, ...]) -> Images | None:
    """The array in `path`; None if there is no such file, or its array has another shape or type."""
    try:
        # As a plain array: every access to a memmap takes a microsecond longer.
        array: Images = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        return None
    except (ValueError, OSError, EOFError) as error:
        log.warning("%s is damaged (%s): it is made again", path, error)
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None


@functools.cache  # one line, although omniglot_pretraining maps its file twice
def _log_read(title: str, path: Path, unread: str | None) -> None:
    message = f"{title}: decoded before, read from {path}"
    if unread is not None:
        message += f"; dataset.root={unread} is not read"
    if unread is None or Path(unread).is_dir():
        log.info("%s", message)
    else:
        log.warning("%s, and there is no such folder", message)


def _write(path: Path, array: Images) -> None:
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
