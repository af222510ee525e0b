"""Objects on other workers: those that live on one worker, and whose methods others call; and copies of modules, which
can be sent to other workers and keep their graph."""

import copy
import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distributed.api import remote_async_call, remote_sync_call
from distributed.calls import rpc
from distributed.calls.session import current, get_worker_id

M = TypeVar("M")
Reference: TypeAlias = "rpc.RRef[Any]"


class RemoteObject:
    """A handle of an object on one worker; made by `remote_object`.

    `handle.method(…)` runs the method there and waits; `handle.rpc_async().method(…)` gives a future. Both are remote
    calls as any other: with the session's time limit, exceptions of the same type, and graphs under
    `autograd.context()`. The methods run in threads of the worker, several at the same time if there are several calls.
    The class then needs a lock of its own. Names that begin with an underscore are not called remotely.

    A handle can be sent to other workers. The object ends with the last handle.
    """

    def __init__(
        self, holder: Reference, call: Callable[..., Any] = remote_sync_call, timeout: float | None = None
    ) -> None:
        self._holder, self._how = holder, (call, timeout)
        self._call = functools.partial(call, partitioner=holder.owner_name(), reducer=itemgetter(0), timeout=timeout)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(f"{name}: only names without a leading underscore are called remotely")
        return lambda *args, **kwargs: self._call(_run_method, args=(self._holder, name, args, kwargs))

    def rpc_sync(self, timeout: float | None = None) -> "RemoteObject":
        """This handle, whose methods have a time limit in seconds; None: the session's."""
        return RemoteObject(self._holder, remote_sync_call, timeout)

    def rpc_async(self, timeout: float | None = None) -> "RemoteObject":
        """This handle, whose methods return futures."""
        return RemoteObject(self._holder, remote_async_call, timeout)

    def __reduce__(self) -> tuple[type["RemoteObject"], tuple[Any, ...]]:
        return RemoteObject, (self._holder, *self._how)

    def __repr__(self) -> str:
        return f"<remote object on {self._holder.owner_name()}>"


def remote_object(
    cls: Callable[..., Any], /, *args: Any, on: int | str, timeout: float | None = None, **kwargs: Any
) -> RemoteObject:
    """Builds `cls(*args, **kwargs)` on a worker, and waits for that. Raises as `remote_sync_call`; an exception of
    `cls` has the same type here.

        counter = remote_object(Counter, 5, on="worker1")
        counter.add(2)

    Args:
        cls: a class, or a function that makes the object, which the worker can import. If it has an argument `on` or
            `timeout` of its own, give that by `functools.partial`.
        args, kwargs: its arguments.
        on: the worker's rank or name.
        timeout: seconds to wait; None: the session's limit.
    """
    holder: Reference = rpc.remote(current().workers[get_worker_id(on)], _Holder)
    remote_sync_call(_build, args=(holder, cls, args, kwargs), partitioner=on, timeout=timeout)
    return RemoteObject(holder)


class _Holder:
    """The object's place on its worker."""

    # The caller owns a reference to it before the object is built. If the answer of `_build` held the only one, and
    # came too late, the object would never end.

    value: Any = None


def _build(holder: Reference, cls: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    holder.local_value().value = cls(*args, **kwargs)


def _run_method(holder: Reference, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(holder.local_value().value, name)(*args, **kwargs)


def module_clone(
    module: M, *, by: str = "reference", detach_buffers: bool = False, device: torch.device | str | int | None = None
) -> M:
    """A copy of a module, or of any nesting of tensors. Tensors that are shared inside it stay shared. Raises
    ValueError for another `by`, and TypeError if `module` is neither a module nor tensors.

    Args:
        module: what to copy.
        by: `reference` shares the tensors with the original; `clone` (or `copy`) gives plain tensors whose
            graph leads to the originals, and these can be sent by RPC; `deepcopy` gives new parameters without a
            graph.
        detach_buffers: with `reference`: buffers become copies without a graph.
        device: the device of the copy's tensors; default that of the original's.
    """
    mode = {"ref": "reference", "copy": "clone", "deepclone": "deepcopy"}.get(by, by)
    if mode not in ("reference", "clone", "deepcopy"):
        raise ValueError(f"by={by!r}: must be reference, clone (or copy) or deepcopy")

    def place(tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"module={tensor!r}: must be a module, or tensors in any nesting")
        to = tensor.device if device is None else torch.device(device)
        if mode != "deepcopy":
            return (tensor.clone() if mode == "clone" else tensor).to(to)
        copied = tensor.detach().clone().to(to)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    if not isinstance(module, nn.Module):
        tree: M = pytree.tree_map(place, module)
        return tree
    tensors = {id(p): place(p) for p in module.parameters()}
    for buffer in module.buffers():
        placed = place(buffer)
        tensors[id(buffer)] = placed.detach().clone() if mode == "reference" and detach_buffers else placed
    return copy.deepcopy(module, memo=tensors)
