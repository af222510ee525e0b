"""Settings of the C library's memory allocator that hold for the whole process."""

import ctypes
import os
import sys

_M_ARENA_MAX = -8


def share_arena() -> None:
    """Makes all threads take memory from one arena of glibc.

    By default threads have arenas of their own, and each arena keeps the most memory that it ever held. A message is
    computed by any of about a hundred RPC threads, so the peaks of all of them would add up. Threads that run already
    keep their arenas. If MALLOC_ARENA_MAX is set, that stays in force. Nothing happens with other C libraries.
    """
    if not sys.platform.startswith("linux") or "MALLOC_ARENA_MAX" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
