"""References to values of other workers, and how a worker gives them back.

torch tells the owner of an RRef when the last reference to it on another worker is gone. While it does, it holds a lock
of its own, and may have to wait for Python's. A second thread that gives up a reference at the same time has Python's
lock and waits for torch's: neither goes on, nor does any other thread that needs Python. torch gives up the arguments
of a call in this way, when the call is done, so a worker that computes several calls with references stands still, if
rarely. So they are taken out of the arguments, and given up here, one at a time.
"""

import threading
from typing import Any

from torch.distributed import rpc

_one_at_a_time = threading.Lock()


def fetched(references: "list[rpc.RRef[Any]]", timeout: float) -> Any:
    """The value of the only reference in a list that came with a call. The list is empty afterwards.

    Raises:
        RuntimeError: the value did not come within `timeout` seconds, or could not be computed.
    """
    try:
        return references[0].to_here(timeout=timeout)
    finally:
        give_up(references)


def give_up(carried: list[Any]) -> None:
    """Empties a list that came with a call, if there are references in it."""
    if any(isinstance(value, rpc.PyRRef) for value in carried):
        with _one_at_a_time:
            carried.clear()
