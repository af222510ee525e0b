"""One decoded array in one file that every process of a host maps; made once, whole or not at all."""

import fcntl
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


def cached_array(name: str, shape: tuple[int, ...], make: Callable[[], Images]) -> Images:
    """The uint8 array `name`, mapped read-only from the cache; made by `make` where it is not there yet.

    Processes that start together wait for the one that makes it. The file appears complete or not at all.

    Raises:
        DataError: a cache folder that cannot be written.
    """
    path = cache_folder() / f"{name}.npy"
    array = _mapped(path, shape)
    if array is not None:
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
            f"the cache {path} cannot be written ({error}); name a folder that can: METALEARN_CACHE=/path/to/cache"
        ) from error
    assert array is not None
    return array


def _mapped(path: Path, shape: tuple[int, ...]) -> Images | None:
    """The array in `path`, or None where there is none or it is not what it should be."""
    try:
        # As a plain array: a memmap takes a microsecond longer for every look into it.
        array: Images = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        return None
    except (ValueError, OSError, EOFError) as error:
        log.warning("%s is damaged (%s): it is made again", path, error)
        return None
    return array if array.shape == shape and array.dtype == np.uint8 else None


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
