"""Partitioners: split a call's arguments into parts and assign each part to a worker."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distributed.info import get_world_rank, get_world_size

Args = tuple[Any, ...]
KwArgs = dict[str, Any]
Part = tuple[int | str, Args | None, KwArgs | None]  # (worker, args, kwargs): one call of the function
PartitionFunction = Callable[..., Sequence[Part]]  # called with the arguments of the remote call; returns its parts
Partitioner = int | str | PartitionFunction


class Whole:
    """A value that is sent uncut, and once to each worker even if the worker runs many items. It arrives unwrapped."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _unwrapped, (self.value,)


def _unwrapped(value: Any) -> Any:
    return value


def whole(value: Any) -> Any:
    """Keeps partitioners from slicing the tensors in `value`."""
    return Whole(value)


@dataclass(eq=False)
class TensorDimensionPartitioner:
    """Slices every tensor of the arguments along one dimension. Everything else goes to every worker whole.

    `nn.Parameter`s and values wrapped in `whole` are not sliced. If there are no samples to slice, only the caller
    runs the call. Raises ValueError for `keepdim=False` without `exclusive=True`, and for no workers; when called, for
    tensors that differ in size along `dim`, or do not have it.

    Args:
        dim: the dimension.
        exclusive: if true, one call for each sample, dealt out in turn; else one part for each worker, of equal
            size, the last with the remainder.
        keepdim: whether a single sample keeps the dimension (of size 1).
        workers: the workers that take part, by rank or name; default all.
    """

    dim: int
    _: KW_ONLY
    exclusive: bool = False
    keepdim: bool = True
    workers: Sequence[int | str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ValueError(f"dim={self.dim!r}: must be a whole number, such as 0")
        if not self.keepdim and not self.exclusive:
            raise ValueError("keepdim=False: a part of several samples keeps its dimension; type exclusive=True")
        if self.workers is not None and not self.workers:
            raise ValueError("workers=[]: at least one worker must take part")
        self.workers = None if self.workers is None else tuple(self.workers)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Part]:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        sliced = [isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves]
        tensors = [leaf for leaf, cut in zip(leaves, sliced, strict=True) if cut]
        for tensor in tensors:
            if not -tensor.ndim <= self.dim < tensor.ndim:
                shape, advice = tuple(tensor.shape), "send it uncut by distributed.whole(x)"
                raise ValueError(f"dim={self.dim}: a tensor of shape {shape} does not have it; {advice}")
        sizes = {tensor.shape[self.dim] for tensor in tensors}
        if len(sizes) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            advice = "send what is not to be cut by distributed.whole(x)"
            raise ValueError(f"dim={self.dim}: the tensors differ in size there: {shapes}; {advice}")
        samples = max(sizes, default=0)
        if samples == 0:
            return [(get_world_rank(), args, kwargs)]
        workers: Sequence[int] = range(get_world_size())
        if self.workers is not None:
            from distributed.calls.session import get_worker_id  # needs RPC, which `ddp` and its partitioner do without

            workers = [get_worker_id(worker) for worker in self.workers]

        def part(start: int, end: int) -> tuple[Args, KwArgs]:
            def select(x: Tensor) -> Tensor:
                return x.narrow(self.dim, start, end - start) if self.keepdim else x.select(self.dim, start)

            values = [select(leaf) if cut else leaf for leaf, cut in zip(leaves, sliced, strict=True)]
            arguments: tuple[Args, KwArgs] = pytree.tree_unflatten(values, structure)
            return arguments

        if self.exclusive:
            return [(workers[i % len(workers)], *part(i, i + 1)) for i in range(samples)]
        parts = min(samples, len(workers))
        size = samples // parts
        ends = [*range(size, size * parts, size), samples]
        starts = [0, *ends[:-1]]
        return [(worker, *part(start, end)) for worker, start, end in zip(workers, starts, ends, strict=False)]


def dim_partitioner(
    dim: int = 0, *, exclusive: bool = False, keepdim: bool = True, workers: Sequence[int | str] | None = None
) -> PartitionFunction:
    """Makes a `TensorDimensionPartitioner`."""
    return TensorDimensionPartitioner(dim, exclusive=exclusive, keepdim=keepdim, workers=workers)


batch_partitioner = TensorDimensionPartitioner(0)
exclusive_batch_partitioner = TensorDimensionPartitioner(0, exclusive=True)


def find_function(name: str) -> Callable[..., Any]:
    """The function with a dotted name such as `my_module.my_function`. Raises ValueError if there is none."""
    module, _, attribute = str(name).rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"name={name}: {error}; must be MODULE.FUNCTION, importable from here") from error
    if not callable(function):
        raise ValueError(f"name={name}: is not a function")
    return function  # type: ignore[no-any-return]


def function(*, name: str) -> PartitionFunction:
    """The user's own partitioner, by module and name, such as `my_module.my_partitioner`. Raises ValueError if there is
    no such function."""
    return find_function(name)
