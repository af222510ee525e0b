"""A decoded array in one cache file. It is made once, whole or not at all, and every process of a host maps it."""

import functools
import io
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from metalearn.errors import DataError
from metalearn.storage import cache
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
        DataError: no cache folder can be used.
    """
    head = array_header(shape)

    def content() -> cache.Parts:
        array = make()
        assert array.shape == shape and array.dtype == np.uint8
        return [head, np.ascontiguousarray(array).reshape(-1).data]

    try:
        file, path, made = cache.get(f"{name}.npy", content, head=head)
    except cache.CacheError as error:
        raise DataError(str(error)) from error
    if not made:
        _log_read(title, path, unread)
    with file:  # As a plain array: every access to a memmap takes a microsecond longer.
        return np.asarray(np.memmap(file, np.uint8, "r", len(head), shape))


def array_header(shape: tuple[int, ...]) -> bytes:
    """The first bytes of the file that `np.save` writes for a uint8 array."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


@functools.cache  # one line, although omniglot_pretraining maps its file twice
def _log_read(title: str, path: Path, unread: str | None) -> None:
    message = f"{title}: decoded before, read from {path}"
    if unread is not None:
        message += f"; dataset.root={unread} is not read"
    if unread is None or Path(unread).is_dir():
        log.info("%s", message)
    else:
        log.warning("%s, and there is no such folder", message)
