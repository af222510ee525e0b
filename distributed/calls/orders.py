"""What a caller asks of a worker, and what that answers.

An order is a function and the worker's items; the message that brings it has a `Head` besides. `call.Call` packs an
order for each worker (`pack_order`). `worker.serve` unpacks it, computes its items and packs the outcome
(`pack_outcome`): the results of the items, or the first failure. The caller unpacks it (`read_answer`), and raises a
failure as its own error (`raise_failure`). An answer also brings the anchor that `distributed.autograd` needs.
"""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.calls.message import Carries, Packed, pack, unpack
from distributed.calls.session import current
from distributed.errors import describe, message_of
from distributed.partition import Args, KwArgs


class Failure(NamedTuple):
    """An exception in a form that can always be sent. `error` is the packed exception itself, if it can be packed."""

    worker: str
    number: int | None
    type_name: str
    message: str
    traceback: str
    error: Packed | None


Outcome = dict[int, Any] | Failure
"""The items' results by number, or the first failure."""

Answer = tuple[tuple[int, ...] | None, bytes, list[Any], Tensor | None]
"""(numbers, payload, carried, anchor): the items' numbers and their packed results, or None and a packed `Failure`;
and the anchor that `distributed.autograd` needs. The result of a single item is packed alone, without a list."""

_FIRST = 2**62
"""A number above those that torch gives to nodes, and below those of its accumulators."""


def current_name() -> str:
    return current().name


def carries(worker: str, device: torch.device, *, any_device: bool = False) -> bool:
    """Whether tensors on `device` can be sent to `worker`. `any_device`, for answers: on any GPU if one is mapped."""
    mapped = current().device_maps.get(worker, set())
    # torch sends an answer by the caller's device map, which this process does not know.
    return device.type == "cpu" or device in mapped or (any_device and bool(mapped) and device.type == "cuda")


def pack_outcome(outcome: Outcome, me: str, ctx: int | None, carries: Carries) -> tuple[tuple[int, ...] | None, Packed]:
    """The numbers of the items and their packed results; or None and a packed failure."""
    if isinstance(outcome, Failure):
        return None, pack(outcome, graphs=False, carries=carries)
    try:
        return tuple(outcome), pack_results(outcome, ctx, carries)
    except (TypeError, ValueError) as error:
        number = _first_that_fails(outcome, carries)
        return None, pack(failure(error, me, number), graphs=False, carries=carries)


def pack_results(results: dict[int, Any], ctx: int | None, carries: Carries) -> Packed:
    """The results as a message. Outside a context, tensors go without their graphs.

    Raises:
        TypeError, ValueError: a result cannot be sent; the message names its item.
    """
    values = list(results.values())
    # A single result goes without the list: a plain tensor then needs no pickle, which small calls would feel.
    try:
        packed = pack(values[0] if len(results) == 1 else values, graphs=ctx is not None, carries=carries)
    except (TypeError, ValueError) as error:
        number = _first_that_fails(results, carries)
        raise type(error)(f"the result of {_item(number)} cannot be sent: {error}") from error
    if ctx is not None:
        return packed
    plain = [v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v for v in packed.carried]
    return Packed(packed.payload, plain)


def read_answer(answer: Answer, sender: str) -> Outcome:
    """Unpacks what `compute` has returned on worker `sender`."""
    numbers, payload, carried, anchor = answer
    if sender != current_name():
        # The backward pass begins with the tensors that came in one message. torch takes the node with the highest
        # number first, and gives received tensors low ones. This worker would compute its own part before it sends
        # others their gradients; now both sides compute at the same time.
        tensors = (value for value in [*carried, anchor] if isinstance(value, Tensor))
        node = next((tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None), None)
        if node is not None:
            node._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
    try:
        values = unpack(Packed(payload, carried))
    except Exception as error:  # a class does not exist here, or may raise anything
        refused = TypeError(f"a result from {sender} cannot be rebuilt: {describe(error)}")
        refused.__cause__ = error
        return failure(refused, current_name(), None)
    if numbers is None:
        assert isinstance(values, Failure)
        return values
    return {numbers[0]: values} if len(numbers) == 1 else dict(zip(numbers, values, strict=True))


def _first_that_fails(results: dict[int, Any], carries: Carries) -> int | None:
    for number, value in results.items():
        try:
            pack(value, graphs=False, carries=carries)
        except (TypeError, ValueError):
            return number
    return None


def _item(number: int | None) -> str:
    return "the call" if number is None else f"item {number}"


def anchor_of(received: list[Tensor], nested: list[Tensor], returned: list[Tensor]) -> Tensor | None:
    """An empty sum over one tensor of each message that must take part in the backward pass."""
    request = next((t for t in received if t.requires_grad), None)
    ties = [*([] if request is None else [request]), *nested]
    if not ties:  # the answer is then the only message that must take part
        ties = [t for t in returned if t.requires_grad][:1]
    return sum((tie.reshape(-1)[:0].sum().cpu() for tie in ties), start=torch.zeros(())) if ties else None


# Failures


def failure(error: BaseException, worker: str, number: int | None) -> Failure:
    """The failure of an item. It holds the exception with its attributes, else without them; else only its text."""
    sent = None
    for packable in (lambda: error, lambda: _Plain(type(error), error.args)):
        try:
            packed = pack(packable(), graphs=False, carries=lambda device: device.type == "cpu")
        except (TypeError, ValueError):  # an attribute may hold a lock, or a tensor that cannot be sent
            continue
        sent = Packed(packed.payload, [v.detach() if isinstance(v, Tensor) else v for v in packed.carried])
        break
    trace = "".join(traceback.format_exception(error))
    return Failure(worker, number, type(error).__qualname__, message_of(error), trace, sent)


class _Plain(NamedTuple):
    """An exception without its attributes."""

    kind: type[BaseException]
    args: tuple[Any, ...]


def raise_failure(failed: Failure) -> None:
    """Raises the worker's exception, of the same type if that can be rebuilt, with a note on its origin."""
    error: Any = None
    if failed.error is not None:
        try:
            error = unpack(failed.error)
            if isinstance(error, _Plain):
                error = error.kind(*error.args)
            if isinstance(error, Exception) and message_of(error) != failed.message:  # its class made a text of a text
                error.args = (failed.message,)
        except Exception:  # its class may not exist here, take other arguments than it keeps, or raise anything
            error = None
    if not isinstance(error, Exception) or isinstance(error, StopIteration):  # which would only end the caller's loop
        error = RuntimeError(f"{failed.type_name}: {failed.message}")
    error.add_note(f"raised on {failed.worker} by {_item(failed.number)} of the call:\n{failed.traceback}")
    raise error


# Orders


class Item(NamedTuple):
    """One call of the function: its number among all items, and its arguments."""

    number: int
    args: Args
    kwargs: KwArgs


class Head(NamedTuple):
    """The fields of a message besides its order: how deep the call is nested, the caller's name, the autograd context,
    and the seconds that the caller waits for the answer."""

    depth: int
    caller: str
    ctx: int | None
    timeout: float


def pack_order(func: Callable[..., Any], items: Sequence[Item], to: str, *, graphs: bool) -> Packed:
    """A function and one worker's items as a message to worker `to`. `graphs`: see `pack`.

    Raises:
        TypeError, ValueError: a value cannot be sent; the message names it.
    """
    packed = functools.partial(pack, graphs=graphs, carries=functools.partial(carries, to))
    try:
        return packed((func, [tuple(item) for item in items]))
    except (TypeError, ValueError):  # only now is each value packed alone, to name the one that fails
        hint = "workers find a function by its module and name, so define it with def at the top of a module"
        labelled = [(f"func={func!r}; {hint}", func)]
        for item in items:
            for argument, value in [*enumerate(item.args), *item.kwargs.items()]:
                labelled.append((f"argument {argument!r} of item {item.number}", value))
        for what, value in labelled:
            try:
                packed(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{what}: cannot be sent to {to}: {error}") from error
        raise
