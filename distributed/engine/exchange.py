"""What workers do at the caller while its call is under way: take items for free workers, and deliver results."""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed import rpc

from distributed.engine import contexts
from distributed.engine.answers import current_name
from distributed.engine.message import Packed, own_copy
from distributed.engine.session import default_timeout
from distributed.engine.traffic import note_sent

# Queues of items for free workers


class _Queue:
    """Items that are not taken yet, and who has taken the others, by position."""

    def __init__(self, items: Sequence[Packed]) -> None:
        self._waiting = deque(enumerate(items))
        self._taken: defaultdict[str, list[int]] = defaultdict(list)
        self._lost: set[str] = set()
        self._lock = threading.Lock()

    def take(self, taker: str) -> Packed | None:
        with self._lock:
            if not self._waiting or taker in self._lost:
                return None
            position, item = self._waiting.popleft()
            self._taken[taker].append(position)
            return item

    def withdraw(self, taker: str) -> list[int]:
        with self._lock:
            self._lost.add(taker)
            return self._taken.pop(taker, [])

    def clear(self) -> list[int]:
        with self._lock:
            positions = [position for position, _ in self._waiting]
            self._waiting.clear()
            return positions


_queues: dict[int, _Queue] = {}
_numbers = itertools.count(1)


def open_queue(items: Sequence[Packed]) -> int:
    """Opens a queue of items for free workers; returns its number."""
    number = next(_numbers)
    _queues[number] = _Queue(items)
    return number


def close_queue(queue: int) -> None:
    """Closes a queue: no more items are given out."""
    _queues.pop(queue, None)


def take_item(queue: int, taker: str) -> Packed | None:
    """The next item of a queue of this process, for worker `taker`; None if the queue is empty or closed."""
    opened = _queues.get(queue)
    packed = None if opened is None else opened.take(taker)
    if packed is not None and taker != current_name():
        note_sent(packed.size())
    return packed


def withdraw(queue: int, taker: str) -> list[int]:
    """The positions of the items that a lost worker has taken. It gets no more."""
    opened = _queues.get(queue)
    return [] if opened is None else opened.withdraw(taker)


def clear(queue: int) -> list[int]:
    """Empties a queue; returns the positions of the items that nobody has taken."""
    opened = _queues.get(queue)
    return [] if opened is None else opened.clear()


def pull(caller: str, queue: int, ctx: int | None) -> Packed | None:
    """Runs on a worker: the next item of the caller's queue; None if there is none left."""
    me = current_name()
    if caller == me:
        taken = take_item(queue, me)
        return None if taken is None else own_copy(taken, graphs=ctx is not None)
    try:
        pulled: Packed | None = rpc.rpc_sync(caller, take_item, (queue, me), timeout=default_timeout())
    except RuntimeError as error:
        if ctx is not None:
            contexts.spoil(ctx, f"{caller} gave no item: {str(error).splitlines()[0]}")
        raise
    return pulled


# Results that come one by one


class Part(NamedTuple):
    """The result of one item, packed, and the worker that has sent it."""

    sender: str
    number: int
    packed: Packed


_receivers: dict[int, Callable[[Part], None]] = {}


def open_stream(call: int, receive: Callable[[Part], None]) -> None:
    """From now on `receive` is called with each part of a call's results, in a thread of torch's."""
    _receivers[call] = receive


def close_stream(call: int) -> None:
    _receivers.pop(call, None)


def deliver(call: int, sender: str, number: int, payload: bytes, carried: list[Any]) -> bool:
    """Runs on the caller: a worker sends the result of an item. Returns whether the caller wants more."""
    receive = _receivers.get(call)
    if receive is None:
        return False
    receive(Part(sender, number, Packed(payload, carried)))
    return True
