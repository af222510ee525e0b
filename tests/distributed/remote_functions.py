"""The functions that the tests call on workers. The workers import them by name."""

import contextlib
import ctypes
import math
import os
import signal
import tempfile
import threading
import time
import types
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import distributed as todist
from distributed.calls import worker
from distributed.calls.worker import fetched


class OwnError(Exception):
    """An exception that is rebuilt from its arguments."""


class StubbornError(Exception):
    """An exception that cannot be rebuilt: it takes other arguments than it keeps."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class OnlyAtHome:
    """A value that is rebuilt only on the worker where it was made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _at_home, (todist.get_rank(),)


def let_time_pass(*, passes: bool) -> bool:
    """Ends the time of all calls on this worker, or gives it back its clock."""
    worker.time = types.SimpleNamespace(monotonic=lambda: math.inf) if passes else time  # type: ignore[assignment]
    return passes


def _at_home(rank: int) -> OnlyAtHome:
    if rank != todist.get_rank():
        raise LookupError("not at home")
    return OnlyAtHome()


own_gpu = threading.local()


def current_gpu() -> int:
    """The GPU that this thread was given; the test replaces torch.cuda.set_device."""
    return getattr(own_gpu, "number", 0)


def rank() -> int:
    return todist.get_rank()


def size_and_rank(x: Tensor, label: str = "") -> tuple[int, int, str]:
    return x.shape[0] if x.ndim else 0, todist.get_rank(), label


def total(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x.sum() + (0 if y is None else y.sum())


def shape_of(*values: Any) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


def fail(x: Tensor) -> NoReturn:
    raise OwnError(f"no good: {x.tolist()} \\N{{DASH}}")


def fail_stubbornly(x: Tensor) -> NoReturn:
    raise StubbornError(1, 2)


def fail_with_attributes(kind: str) -> NoReturn:
    """Fails with an exception that keeps more than its arguments, or that is hard to send."""
    if kind == "rephrased":
        raise RephrasedError("weather")
    if kind == "path":
        open("/no/such/file")  # noqa: PTH123, SIM115
    if kind == "attributes":
        error = OwnError("of old age")
        error.age, error.add = 99, torch.add  # type: ignore[attr-defined]
        error.add_note("a note of its own")
        raise error
    if kind == "leaf":
        error = OwnError("of its weights")
        error.weights = torch.ones(2, requires_grad=True)  # type: ignore[attr-defined]
        raise error
    error = OwnError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def odd_ones_stay(number: Tensor) -> Any:
    return OnlyAtHome() if int(number) == 3 else int(number)


def fetch(x: Tensor, reference: Any) -> float:
    """Calls back to the worker that holds the reference."""
    return float((reference.to_here(timeout=30) * x).sum())


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def fail_by(fault: str, seconds: float) -> None:
    """Waits, then does what `fault` says."""
    time.sleep(seconds)
    if fault == "raise":
        raise OwnError("failed first")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def threads() -> int:
    return torch.get_num_threads()


def lock() -> Any:
    """A value that cannot be pickled."""
    return threading.Lock()


def _plain(x: Tensor) -> Tensor:
    return x.sum()


renamed = todist.parallelize(reducer=lambda values: sum(values).view(1))(_plain)


@todist.rank_zero_only
@todist.parallelize(reducer=lambda values: sum(values).view(1))
def wrapped(x: Tensor) -> Tensor:
    return x.sum()


@todist.parallelize()
def mean_of_squares(x: Tensor) -> Tensor:
    return x.square().mean()


@todist.parallelize(partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False), reducer=todist.sum_reducer)
def sum_by_task(x: Tensor, factor: float) -> Tensor:
    assert x.ndim == 1
    return factor * x.sum()


@todist.parallelize_async(partitioner=1)
def later(x: Tensor) -> Tensor:
    return x + todist.get_rank()


def nested(depth: int, x: Tensor) -> float:
    """Calls itself on all workers, `depth` deep. There are WORLD ** depth leaves; each gives the sum of x."""
    if depth == 0:
        return float(x.sum())
    workers = range(todist.get_world_size())
    return sum(
        todist.remote_sync_call(
            nested, args=(depth - 1, x), partitioner=lambda *args: [(w, args, None) for w in workers]
        )
    )


def concurrent(calls: int) -> int:
    """Makes `calls` asynchronous calls to the next worker at once; each calls back."""
    other = (todist.get_rank() + 1) % todist.get_world_size()
    futures = [
        todist.remote_async_call(call_back, args=(todist.get_rank(), i), partitioner=other) for i in range(calls)
    ]
    return sum(future.wait()[0] for future in futures)


def call_back(caller: int, value: int) -> int:
    return int(todist.remote_sync_call(same, args=(value,), partitioner=caller)[0])


def same(value: Any) -> Any:
    return value


def part_for(args: tuple[Any, ...], worker: int) -> tuple[int, tuple[Any, ...], None]:
    """A part of a remote call: these arguments for this worker."""
    return worker, args, None


def spoil(x: Tensor, values: list[Tensor]) -> Tensor:
    """Writes to its arguments."""
    for tensor in (x, *values):
        tensor.detach().zero_()
    return x


COUNTED = torch.zeros(())


def count(_: Any) -> tuple[int, Tensor]:
    """The rank; and a tensor of its own, which it changes in place."""
    return todist.get_rank(), COUNTED.add_(1)


def trained(network: nn.Module, x: Tensor) -> list[float]:
    """Changes its argument as a user's inner loop does: steps of an optimiser, and a norm's statistics."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = (network(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def times_three(x: Tensor) -> Tensor:
    return x.mul_(3).square().sum()


def modes() -> tuple[bool, bool, torch.dtype]:
    """What torch computes with in the thread that serves a call."""
    x = torch.ones(2, 2, requires_grad=True)
    return (x @ x).requires_grad, torch.is_inference_mode_enabled(), (x @ x).dtype


class RephrasedError(Exception):
    """An exception that makes its text of what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(f"bad {name}")


def stop(_: Any) -> NoReturn:
    raise StopIteration("no more")


def leave() -> NoReturn:
    raise SystemExit(3)


def with_weights(weights: Tensor, number: Tensor) -> Tensor:
    return weights.sum() + number.sum()


class Counter:
    """Has a method that is called remotely."""

    def __init__(self, start: int) -> None:
        self.start = start

    @todist.parallelize(partitioner=1)
    def plus(self, value: int) -> int:
        return self.start + value + 100 * todist.get_rank()


def product(net: Any, x: Tensor) -> Tensor:
    return net(x).square().sum()


def constant(x: Tensor) -> Tensor:
    return torch.ones(())


class Holder:
    """Hides a parameter: code that walks over containers does not see it."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter


def of_holder(holder: Holder, x: Tensor) -> Tensor:
    return (holder.parameter * x).square().sum()


def product_elsewhere(net: Any, x: Tensor, hops: int) -> Tensor:
    """Passes the module on to the next worker, `hops` times."""
    if hops == 0:
        return product(net, x)
    other = (todist.get_rank() + 1) % todist.get_world_size()
    return todist.remote_sync_call(product_elsewhere, args=(net, x, hops - 1), partitioner=other)[0]


def inner_sgd(net: Any, x: Tensor) -> Tensor:
    """The loss after an inner step that is differentiated through."""
    params = list(net.parameters())
    grads = torch.autograd.grad(product(net, x), params, create_graph=True)
    adapted = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
    return (x @ adapted[0].T + adapted[1]).square().sum()


class _Traced(torch.autograd.Function):
    """Passes its input on, and holds an object for as long as its place in the graph exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = _Token()
        _tokens.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _Token:
    pass


_tokens: weakref.WeakSet[_Token] = weakref.WeakSet()


def graphs_so_far(x: Tensor) -> tuple[Tensor, dict[str, list[Tensor]], int]:
    """Results with a graph, and how many graphs of this function exist on this worker, its own included."""
    y = _Traced.apply(x.clone().requires_grad_())
    return y, {"twice": [2 * y]}, len(_tokens)


def arenas() -> int:
    """How many arenas glibc has made in this process."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return file.read().count(b"<heap nr=")


def late_product(net: Any, x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return product(net, x)


def product_beside_an_unused_call(net: Any, x: Tensor) -> Tensor:
    """Makes an asynchronous call to the next worker, and neither waits for it nor uses its result."""
    other = (todist.get_rank() + 1) % todist.get_world_size()
    todist.remote_async_call(late_product, args=(net, x, 0.2), partitioner=other)
    return product(net, x)


def product_despite_a_late_call(net: Any, x: Tensor) -> Tensor:
    """Makes a call to the next worker that fails by its time limit."""
    other = (todist.get_rank() + 1) % todist.get_world_size()
    with contextlib.suppress(TimeoutError):
        todist.remote_sync_call(late_product, args=(net, x, 1.0), partitioner=other, timeout=0.2)
    return product(net, x)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


class _FailsBackward(_Copy):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OwnError("no gradient today")


def fails_backward(net: Any, x: Tensor) -> Tensor:
    return _FailsBackward.apply(product(net, x))


class _LeavesBackward(_Copy):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        os._exit(9)


def leaves_backward(net: Any, x: Tensor) -> Tensor:
    return _LeavesBackward.apply(product(net, x))


def fetches_in_vain(reference: Any) -> Tensor:
    """Fetches a tensor under the context, and does not use it."""
    reference.to_here(timeout=30)
    return torch.ones(())


class _SlowBackward(torch.autograd.Function):
    times: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        began = time.monotonic()
        time.sleep(0.5)
        _SlowBackward.times = began, time.monotonic()
        return grad


def slow_backward(x: Tensor) -> Tensor:
    """Its backward pass takes half a second."""
    loss: Tensor = _SlowBackward.apply(x)
    return loss


def backward_times() -> tuple[float, float]:
    """When the backward pass of `slow_backward` began and ended on this worker, on the host's clock."""
    return _SlowBackward.times


def fetch_and_look(references: "list[todist.rpc.RRef[Tensor]]") -> tuple[Tensor, bool]:
    """The value, and whether nothing here holds the reference any more."""
    reference = weakref.ref(references[0])
    return fetched(references, 10), reference() is None
