"""Remote calls as map-reduce: a partitioner deals a call out, workers compute, a reducer gathers.

One message goes to each worker; the worker runs its items in turn. So the number of items never
exceeds the number of threads that serve them, and no number of items can block a worker. How calls may
be nested: see `session`.
"""

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.futures import Future
from torch.utils import _pytree as pytree

from distributed import autograd
from distributed.engine import worker
from distributed.engine.info import check_timeout
from distributed.engine.message import Packed, pack, send
from distributed.engine.session import MAX_DEPTH, Session, current
from distributed.engine.traffic import note_received, note_sent
from distributed.engine.worker import Answer, Failure, Item, Order, Outcome, Source
from distributed.partition import Args, KwArgs, Partitioner, Whole, batch_partitioner
from distributed.reduce import Reducer
from distributed.world import get_worker_id

T = TypeVar("T")

UNSET_TIMEOUT = -1
"""What torch means by "the default"; None means the same here."""


class _Call:
    """A call that has been dealt out and sent."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: Args | None,
        kwargs: KwArgs | None,
        partitioner: Partitioner | None,
        timeout: float | None,
        *,
        own_part_here: bool,
    ) -> None:
        session = current()
        self._names = session.workers
        self.timeout = session.timeout if timeout in (None, UNSET_TIMEOUT) else timeout
        check_timeout(self.timeout)
        self._depth = worker.depth() + 1
        if self._depth > MAX_DEPTH:
            raise RecursionError(f"this remote call would be nested {self._depth} deep; at most {MAX_DEPTH} are served")
        self._ctx = autograd.current_context()
        self._me = session.rank
        items, free, shared = _dealt_out(partitioner, args or (), kwargs or {})
        self._expected = len(free) + sum(map(len, items.values()))
        takers = self._takers(len(free))
        orders = {rank: Order(func, own, []) for rank, own in items.items()}
        orders |= {rank: Order(func, items.get(rank, []), shared) for rank in takers}
        packed = {rank: self._pack(order, rank) for rank, order in orders.items()}
        self._queue = worker.open_queue([self._pack_item(item, shared) for item in free]) if free else None
        self._source = None if self._queue is None else Source(session.name, self._queue)
        self._own = packed.pop(self._me, None) if own_part_here else None
        self._sent: dict[int, tuple[Future[Answer], threading.Semaphore]] = {}
        try:
            for rank, order in packed.items():
                self._send(session, rank, order, takes=rank in takers)
        except BaseException:
            self._abandon()
            raise

    def _takers(self, free: int) -> list[int]:
        """Who takes the items for whoever is free: the caller first."""
        if not free:
            return []
        return [self._me, *(rank for rank in range(len(self._names)) if rank != self._me)][:free]

    @property
    def futures(self) -> list[Future[Answer]]:
        return [future for future, _ in self._sent.values()]

    def _pack(self, order: Order, rank: int) -> Packed:
        """Raises TypeError or ValueError naming what cannot be sent."""
        name = self._names[rank]
        packed = functools.partial(pack, graphs=self._ctx is not None, carries=functools.partial(worker.carries, name))
        try:
            return packed((order.func, [tuple(item) for item in order.items], order.shared))
        except (TypeError, ValueError):
            for what, value in _parts_named(order):
                try:
                    packed(value)
                except (TypeError, ValueError) as error:
                    raise type(error)(f"{what}: cannot be sent to {name}: {error}") from error
            raise

    def _pack_item(self, item: Item, shared: list[Whole]) -> Packed:
        """An item for whoever is free, so without a device of its own."""
        graphs = self._ctx is not None
        try:
            return pack(tuple(item), graphs=graphs, carries=lambda device: device.type == "cpu", shared=shared)
        except (TypeError, ValueError) as error:
            raise type(error)(f"item {item.number}: cannot be sent: {error}") from error

    def _send(self, session: Session, rank: int, order: Packed, *, takes: bool) -> None:
        slot = session.slots[rank, self._depth]
        if not slot.acquire(timeout=self.timeout):
            raise TimeoutError(f"{self._names[rank]} has been busy with other calls for {self.timeout:g} s")
        head = (self._depth, session.name, self._queue if takes else None, self._ctx)
        try:
            future: Future[Answer] = send(session.infos[rank], worker.serve, head, order, self.timeout)
        except RuntimeError as error:
            slot.release()
            raise worker_error(self._names[rank], error, self.timeout) from error
        note_sent(order.size())
        self._sent[rank] = future, slot
        if takes:
            future.add_done_callback(self._stop_dealing_if_failed)

    def _stop_dealing_if_failed(self, done: Future[Answer]) -> None:
        """The others need not go on."""
        try:
            (numbers, *_) = done.value()
        except RuntimeError:
            numbers = None
        if numbers is None and self._queue is not None:
            worker.close_queue(self._queue)

    def results(self) -> list[Any]:
        """Waits for all and puts the results in order of the items."""
        ordered: dict[int, Any] = {}
        failures = []
        for outcome in self._outcomes():
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                ordered.update(outcome)
        if failures:
            worker.raise_failure(min(failures, key=lambda failure: -1 if failure.number is None else failure.number))
        assert len(ordered) == self._expected
        return [ordered[number] for number in sorted(ordered)]

    def _outcomes(self) -> list[Outcome]:
        outcomes = []
        try:
            if self._own is not None:
                outcomes.append(self._read(worker.compute_here(self._own, self._depth, self._source, self._ctx)))
            while self._sent:
                outcomes.append(self._outcome(*self._sent.popitem()))
        finally:
            self._abandon()
        return outcomes

    def _abandon(self) -> None:
        """Nothing more is dealt out; the slots of what is still under way are free once it has ended."""
        if self._queue is not None:
            worker.close_queue(self._queue)
        for future, slot in self._sent.values():
            future.add_done_callback(functools.partial(_release, slot))

    def _outcome(self, rank: int, sent: tuple[Future[Answer], threading.Semaphore]) -> Outcome:
        future, slot = sent
        try:
            answer = future.wait()
        except RuntimeError as error:
            raise worker_error(self._names[rank], error, self.timeout) from error
        finally:
            slot.release()
        note_received(Packed(answer[1], answer[2]).size(), rank)
        return self._read(answer)

    def _read(self, answer: Answer) -> Outcome:
        (numbers, _, _, anchor) = answer
        if numbers is None and self._queue is not None:
            worker.close_queue(self._queue)
        if self._ctx is not None and anchor is not None:
            worker.keep_anchor(self._ctx, anchor)
        return worker.read_answer(answer)


def _parts_named(order: Order) -> Iterator[tuple[str, Any]]:
    """The values of an order, with what an error calls them."""
    hint = "; workers find a function by its module and name, so define it with def at the top of a module"
    yield f"func={order.func!r}{hint}", order.func
    for item in order.items:
        for place, value in [*enumerate(item.args), *item.kwargs.items()]:
            yield f"argument {place!r} of item {item.number}", value
    for value in order.shared:
        yield "an argument sent whole", value


def _release(slot: threading.Semaphore, _: Future[Answer]) -> None:
    slot.release()


def worker_error(name: str, error: RuntimeError, timeout: float) -> Exception:
    """What torch's error of a call to a worker means."""
    first = str(error).splitlines()[0]
    if "timeout" in first.lower() or "timed out" in first.lower():
        return TimeoutError(f"{name} did not answer within {timeout:g} s: {first}")
    if any(sign in first.lower() for sign in ("eof", "pipe", "connection", "connect", "closed", "shutting down")):
        return ConnectionError(f"{name} does not answer: {first}")
    return RuntimeError(f"{name}: {first}")


def _dealt_out(
    partitioner: Partitioner | None, args: Args, kwargs: KwArgs
) -> tuple[dict[int, list[Item]], list[Item], list[Whole]]:
    """Each worker's items; those for whoever is free; and the values that these share."""
    if isinstance(partitioner, int | str):
        return {get_worker_id(partitioner): [Item(0, args, kwargs)]}, [], []
    items: defaultdict[int, list[Item]] = defaultdict(list)
    free: list[Item] = []
    for number, (name, part_args, part_kwargs) in enumerate(parts_of(partitioner, args, kwargs)):
        item = Item(number, part_args or (), part_kwargs or {})
        (free if name is None else items[get_worker_id(name)]).append(item)
    leaves = (leaf for item in free for leaf in pytree.tree_leaves((item.args, item.kwargs)))
    return items, free, list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Whole)}.values())


def parts_of(partitioner: Partitioner | None, args: Args, kwargs: KwArgs) -> Sequence[Any]:
    """What a partitioner makes of a call: parts (worker, args, kwargs).

    Raises:
        TypeError, ValueError: no partitioner, or one that returns something else.
    """
    if partitioner is None:
        partitioner = batch_partitioner
    if isinstance(partitioner, int | str):
        return [(partitioner, args, kwargs)]
    if not callable(partitioner):
        raise TypeError(f"partitioner={partitioner!r}: must be a worker's rank or name, or a function")
    parts = partitioner(*args, **kwargs)
    if not parts:
        raise ValueError(f"partitioner={partitioner!r} returned no part; every call needs at least one")
    for part in parts:
        if not isinstance(part, tuple) or len(part) != 3:
            raise ValueError(f"partitioner={partitioner!r} returned {part!r}; a part is (worker, args, kwargs)")
        _, part_args, part_kwargs = part
        if not isinstance(part_args, tuple | list | None) or not isinstance(part_kwargs, dict | None):
            raise TypeError(
                f"partitioner={partitioner!r} returned {part!r}; args is a tuple or None, kwargs a dict or None"
            )
    return parts


def remote_sync_call(
    func: Callable[..., T],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
) -> Any:
    """Calls `func` on the workers and waits. The caller computes its own part meanwhile.

    Every worker, the caller too, computes on copies of the arguments. Under `autograd.context()` parameters
    and modules keep their graph, and so do the results; without one, results come back without a graph.

    Args:
        func: a function that the workers can import.
        args, kwargs: what it is called with.
        partitioner: a worker's rank or name; or a function that is called with the arguments and returns
            parts `(worker, args or None, kwargs or None)`, with the worker None for whoever is free first;
            None: `batch_partitioner`.
        reducer: from the list of results, in order of the parts, to the value returned; None: the list.
        timeout: seconds a worker may take; None: the session's.

    Raises:
        ConnectionError: a worker is gone (its name is in the message).
        TimeoutError: a worker did not answer in time.
        RecursionError: the call is nested deeper than `session.MAX_DEPTH`.
        TypeError, ValueError: an argument that cannot be sent, a worker that does not exist.
        Exception: what `func` raised, of the same type where it can be rebuilt.
    """
    call = _Call(func, args, kwargs, partitioner, timeout, own_part_here=True)
    results = call.results()
    return results if reducer is None else reducer(results)


def remote_async_call(
    func: Callable[..., T],
    *,
    args: Args | None = None,
    kwargs: KwArgs | None = None,
    partitioner: Partitioner | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
) -> Future[Any]:
    """As `remote_sync_call`, but returns a future of the value as soon as the messages are sent: at once, unless
    `session.MAX_WINDOW` calls to the same worker are under way already."""
    call = _Call(func, args, kwargs, partitioner, timeout, own_part_here=False)
    value: Future[Any] = Future()

    def finish(_: Any) -> None:
        try:
            results = call.results()
            value.set_result(results if reducer is None else reducer(results))
        except Exception as error:
            value.set_exception(error)

    torch.futures.collect_all(call.futures).add_done_callback(finish)
    return value
