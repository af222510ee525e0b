"""The message that a caller sends to one worker: an `Order` (a function and the worker's items) and its `Head`.

`call.Call` packs an order for each worker (`pack_order`), and every item of its queue by itself (`pack_item`).
`worker.serve` unpacks the order, computes its items, and then takes items from the queue that the head names.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from distributed.calls.answers import carries
from distributed.calls.message import Packed, pack
from distributed.partition import Args, KwArgs, Whole


class Item(NamedTuple):
    """One call of the function: its number among all items, and its arguments."""

    number: int
    args: Args
    kwargs: KwArgs


class Order(NamedTuple):
    """A function with the items of one worker. All items of the caller's queue share the values in `shared`."""

    func: Callable[..., Any]
    items: list[Item]
    shared: list[Any]


class Head(NamedTuple):
    """The fields of a message besides its order.

    Attributes:
        depth: how deep the call is nested.
        caller, number: the caller's name, and its number for the call.
        queue: the number of the caller's queue from which this worker takes items; None: it takes none.
        ctx: the autograd context.
        timeout: seconds that the caller waits for the answer.
        streams: whether each result is delivered as soon as it is there, and the answer holds none.
        opens: whether the function returns futures.
    """

    depth: int
    caller: str
    number: int
    queue: int | None
    ctx: int | None
    timeout: float
    streams: bool
    opens: bool


def pack_order(order: Order, to: str, *, graphs: bool) -> Packed:
    """An order as a message to worker `to`. `graphs`: see `pack`.

    Raises:
        TypeError, ValueError: a value cannot be sent; the message names it.
    """
    packed = functools.partial(pack, graphs=graphs, carries=functools.partial(carries, to))
    try:
        return packed((order.func, [tuple(item) for item in order.items], order.shared))
    except (TypeError, ValueError):  # only now is each value packed alone, to name the one that fails
        hint = "workers find a function by its module and name, so define it with def at the top of a module"
        labelled = [(f"func={order.func!r}; {hint}", order.func)]
        for item in order.items:
            for argument, value in [*enumerate(item.args), *item.kwargs.items()]:
                labelled.append((f"argument {argument!r} of item {item.number}", value))
        for what, value in [*labelled, *(("an argument sent whole", value) for value in order.shared)]:
            try:
                packed(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{what}: cannot be sent to {to}: {error}") from error
        raise


def pack_item(item: Item, shared: Sequence[Whole], *, graphs: bool) -> Packed:
    """An item for any free worker, as a message. Its tensors must be on the CPU.

    Raises:
        TypeError, ValueError: a value cannot be sent; the message names the item.
    """
    try:  # the worker is not known yet, so no device map is
        return pack(tuple(item), graphs=graphs, carries=lambda device: device.type == "cpu", shared=shared)
    except (TypeError, ValueError) as error:
        raise type(error)(f"item {item.number}: cannot be sent: {error}") from error
