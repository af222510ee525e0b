"""How this process uses memory."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1
_LARGEST_ALLOWED = 32 * 2**20


def keep_freed_memory() -> None:
    """Has glibc keep freed memory instead of giving it back to the kernel.

    An inner loop frees and takes the same tensors a thousand times a second; given back, every page is
    zeroed by the kernel again each time. One arena for all threads, since each thread would keep its own.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent in other C libraries
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ALLOWED)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
