"""How items and results move while a call is under way. `call.Call` opens and closes all three:

- An `ItemQueue` holds items for free workers. A worker that has computed its own items takes them (`pull`).
- `receivers` get results one by one. A worker sends each as soon as it is there (`deliver`).
- `Spares` chooses another worker for an item of a lost one.
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch.distributed import rpc

from distributed.calls import autograd_contexts
from distributed.calls.answers import current_name
from distributed.calls.message import Packed, own_copy
from distributed.calls.session import default_timeout
from distributed.calls.traffic import note_sent

# Queues of items for free workers


_queues: dict[int, "ItemQueue"] = {}
_numbers = itertools.count(1)


class ItemQueue:
    """The items that wait, and the positions of those that each worker has taken. Workers name the queue by its number,
    until it is closed."""

    def __init__(self, items: Sequence[Packed]) -> None:
        self.number = next(_numbers)
        self._waiting = deque(enumerate(items))
        self._taken: defaultdict[str, list[int]] = defaultdict(list)
        self._lost: set[str] = set()
        self._lock = threading.Lock()
        _queues[self.number] = self

    def take(self, taker: str) -> Packed | None:
        with self._lock:
            if not self._waiting or taker in self._lost:  # nobody reads the answer of a worker that was given up
                return None
            position, item = self._waiting.popleft()
            self._taken[taker].append(position)
            return item

    def withdraw(self, taker: str) -> list[int]:
        """The positions of the items that a lost worker has taken. It gets no more."""
        with self._lock:
            self._lost.add(taker)
            return self._taken.pop(taker, [])

    def clear(self) -> list[int]:
        """Empties the queue; returns the positions of the items that were left."""
        with self._lock:
            positions = [position for position, _ in self._waiting]
            self._waiting.clear()
            return positions

    def close(self) -> None:
        """No more items are given out, and none are computed again."""
        _queues.pop(self.number, None)
        with self._lock:
            self._waiting.clear()
            self._taken.clear()


def take_item(queue: int, taker: str) -> Packed | None:
    """The next item of a queue of this process, for worker `taker`; None if the queue is empty or closed."""
    opened = _queues.get(queue)
    packed = None if opened is None else opened.take(taker)
    if packed is not None and taker != current_name():
        note_sent(packed.size())
    return packed


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
            autograd_contexts.spoil(ctx, f"{caller} gave no item: {str(error).splitlines()[0]}")
        raise
    return pulled


# Results that come one by one


class ItemResult(NamedTuple):
    """The result of one item, packed, and the worker that has sent it."""

    sender: str
    number: int
    packed: Packed


receivers: dict[int, Callable[[ItemResult], None]] = {}
"""By the number of a call: called with each of its results, in a thread of torch's."""


def deliver(call: int, sender: str, number: int, payload: bytes, carried: list[Any]) -> bool:
    """Runs on the caller: a worker sends the result of an item. Returns whether the caller wants more."""
    receive = receivers.get(call)
    if receive is None:
        return False
    receive(ItemResult(sender, number, Packed(payload, carried)))
    return True


# Items of lost workers


class Spares:
    """The workers of one call that are not lost.

    Args:
        names: of all workers, by rank.
        used: the ranks that the call is dealt to. They come first.
        retries: how often an item may be sent again.
        lost: the ranks that are lost already. Those that are lost to this call join them, and get no more items.
    """

    def __init__(self, names: Sequence[str], used: Sequence[int], retries: int, lost: Collection[int]) -> None:
        self.retries = retries
        self.lost = set(lost)
        self._names = names
        self._used = used
        self._tried: defaultdict[int, list[str]] = defaultdict(list)

    def next_for(self, number: int, rank: int, cause: Exception) -> int:
        """The rank to compute item `number`, which worker `rank` has lost.

        Raises:
            Exception: of the type of `cause`: there is no such worker, or the item was sent too often.
        """
        tried = self._tried[number]
        tried.append(self._names[rank])
        live = [r for r in self._used if r not in self.lost]
        live = live or [r for r in range(len(self._names)) if r not in self.lost]
        if len(tried) > self.retries or not live:
            raise type(cause)(
                f"{cause}; item {number} was lost by every worker that has tried it: {', '.join(tried)} "
                f"(retries={self.retries})"
            ) from cause
        return live[number % len(live)]  # by number, so that the items of a lost worker spread over the others
