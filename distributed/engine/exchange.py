"""What workers ask of the caller while its call is under way: items for free workers."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed import rpc

from distributed.engine import contexts
from distributed.engine.answers import current_name
from distributed.engine.message import Packed, own_copy
from distributed.engine.session import default_timeout
from distributed.engine.traffic import note_sent


class QueueAddress(NamedTuple):
    """Where a free worker gets its next item: the caller's name, and the number of a queue there."""

    caller: str
    queue: int


_queues: dict[int, deque[Packed]] = {}
_last_queue = 0
_queues_lock = threading.Lock()


def open_queue(items: Sequence[Packed]) -> int:
    """Opens a queue of items for free workers; returns its number."""
    global _last_queue
    with _queues_lock:
        _last_queue += 1
        _queues[_last_queue] = deque(items)
        return _last_queue


def close_queue(queue: int) -> None:
    """Closes a queue: no more items are given out."""
    _queues.pop(queue, None)


def take_item(queue: int, *, is_sent: bool = True) -> Packed | None:
    """The next item of a queue of this process; None if the queue is empty or closed."""
    try:
        packed = _queues[queue].popleft()
    except (KeyError, IndexError):
        return None
    if is_sent:
        note_sent(packed.size())
    return packed


def pull(source: QueueAddress, ctx: int | None) -> Packed | None:
    """The next item of the caller's queue; None if there is none left."""
    if source.caller == current_name():
        taken = take_item(source.queue, is_sent=False)
        return None if taken is None else own_copy(taken, graphs=ctx is not None)
    try:
        pulled: Packed | None = rpc.rpc_sync(source.caller, take_item, (source.queue,), timeout=default_timeout())
    except RuntimeError as error:
        if ctx is not None:
            contexts.spoil(ctx, f"{source.caller} gave no item: {str(error).splitlines()[0]}")
        raise
    return pulled
