"""How items and results move while a call is under way. `call.Call` opens and closes both:

- An `ItemQueue` holds items for free workers. A worker that has computed its own items takes them (`pull`).
- `receivers` get results one by one. A worker sends each as soon as it is there (`deliver`).
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed import rpc

from distributed.calls import autograd_contexts
from distributed.calls.answers import current_name
from distributed.calls.message import Packed, own_copy
from distributed.calls.session import default_timeout
from distributed.traffic import note_sent

# Queues of items for free workers


_queues: dict[int, "ItemQueue"] = {}
_numbers = itertools.count(1)


class ItemQueue:
    """Items that wait for a free worker. Workers name the queue by its number, until it is closed."""

    def __init__(self, items: Sequence[Packed]) -> None:
        self.number = next(_numbers)
        self._waiting = deque(items)
        _queues[self.number] = self

    def take(self) -> Packed | None:
        try:
            return self._waiting.popleft()  # atomic
        except IndexError:
            return None

    def close(self) -> None:
        """No more items are given out."""
        _queues.pop(self.number, None)
        self._waiting.clear()


def take_item(queue: int, taker: str) -> Packed | None:
    """The next item of a queue of this process, for worker `taker`; None if the queue is empty or closed."""
    opened = _queues.get(queue)
    packed = None if opened is None else opened.take()
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
