"""The number of files and sockets that this process may have open."""

import logging
import resource

_SOCKETS_A_WORKER = 7
_OTHERS = 256
"""Files that have nothing to do with the number of workers: libraries, data, logs."""

log = logging.getLogger(__name__)


def allow_sockets(workers: int) -> None:
    """Raises the soft limit of open files as far as this many workers need it, and the hard limit allows it."""
    needed = _SOCKETS_A_WORKER * workers + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning("%d workers need about %d open files, and the limit is %d; see `ulimit -Hn`", workers, needed, hard)
