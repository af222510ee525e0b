"""Packs values into messages and sends them: bytes, and besides these tensors and RRefs, which only torch can send.

We pack values ourselves for three reasons: a parameter keeps its graph wherever it is in a message; an error names a
value that cannot be sent before anything is sent; and bytes can be counted.
"""

import io
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._distributed_rpc import _invoke_rpc_python_udf
from torch.distributed import rpc
from torch.distributed.rpc import internal
from torch.futures import Future


class Packed(NamedTuple):
    """A value as a message: its pickle, and the tensors and RRefs in it. A plain tensor has an empty payload."""

    payload: bytes
    carried: list[Any]

    def size(self) -> int:
        """Bytes of the message, tensors included."""
        return len(self.payload) + sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [value for value in self.carried if isinstance(value, Tensor)]


Carries = Callable[[torch.device], bool]  # whether tensors on a device can be sent


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, *, graphs: bool, carries: Carries) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.carried: list[Any] = []
        self._graphs = graphs
        self._carries = carries

    def reducer_override(self, obj: Any) -> Any:
        """The pickler calls this once for every object that is no plain Python value."""
        if _is_plain(obj) or (self._graphs and isinstance(obj, nn.Parameter) and obj.requires_grad):
            self.carried.append(_sendable(obj, self._carries))
        elif isinstance(obj, rpc.PyRRef):
            self.carried.append(obj)
        elif self._graphs and type(obj) is Tensor and obj.requires_grad:
            raise ValueError(f"a tensor of layout {obj.layout} loses its graph on the way; send a dense one")
        elif type(obj) is Tensor and obj.layout in _PARTS:
            parts = (getattr(obj.detach(), part)() for part in _PARTS[obj.layout])
            return _sparse_tensor, (obj.layout, obj.shape, *parts)
        else:
            return NotImplemented
        return _carried_value, (len(self.carried) - 1,)


def _is_plain(value: Any) -> bool:
    """Whether torch can send the value itself. Other tensors go as their parts, as when they are pickled."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


# The methods that give the parts of a sparse tensor, by its layout.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values", "is_coalesced"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _sparse_tensor(layout: torch.layout, shape: torch.Size, *parts: Any) -> Tensor:
    """A sparse tensor from its parts."""
    # torch's own way holds every tensor that it builds until the next `torch.load`, which then warns about them.
    if layout is torch.sparse_coo:
        indices, values, coalesced = parts
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=True)


def _sendable(tensor: Tensor, carries: Carries) -> Tensor:
    """A plain tensor whose storage holds nothing else, with the graph that `tensor` has."""
    if not carries(tensor.device):
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be sent to that worker; "
            "send tensor.cpu(), or map the device by device_maps in rpc_backend_options"
        )
    # A parameter that is pickled loses its graph; a view of it keeps it. A slice would take its whole storage along;
    # an expanded tensor could not be changed in place.
    plain = tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor
    if plain.layout is torch.strided and plain.untyped_storage().nbytes() != plain.nbytes:
        return plain.clone(memory_format=torch.contiguous_format)
    return plain


_reading: ContextVar[Sequence[Any]] = ContextVar("reading")  # carried values of the message that this thread unpacks


def _carried_value(position: int) -> Any:
    return _reading.get()[position]


def pack(value: Any, *, graphs: bool, carries: Carries) -> Packed:
    """`value` as a message; functions and classes in it are sent by name. `graphs`: whether parameters are sent as
    tensors with their graph, as under a distributed autograd context. Raises ValueError for a tensor on a device that
    cannot be sent from, and for a sparse one with a graph; TypeError for a value that cannot be pickled."""
    if _is_plain(value):
        return Packed(b"", [_sendable(value, carries)])
    file = io.BytesIO()
    pickler = _Pickler(file, graphs=graphs, carries=carries)
    try:
        pickler.dump(value)
    except ValueError:
        raise
    except Exception as error:  # a class may raise anything
        raise TypeError(str(error) or type(error).__name__) from error
    return Packed(file.getvalue(), pickler.carried)


def unpack(packed: Packed) -> Any:
    """The value that was packed. Functions and classes are looked up by name in this process. Raises Exception if a
    name does not exist here, or an object cannot be built."""
    if not packed.payload:
        return packed.carried[0]
    outer = _reading.set(packed.carried)
    try:
        return pickle.Unpickler(io.BytesIO(packed.payload)).load()  # noqa: S301 (from a worker of this world)
    finally:
        _reading.reset(outer)


def send(
    to: rpc.WorkerInfo, func: Callable[..., Any], args: tuple[Any, ...], packed: Packed, timeout: float
) -> Future[Any]:
    """Calls `func(*args, *packed)` on a worker; `args` are plain Python values. Faster than `rpc.rpc_async`, since it
    skips torch's checks for TorchScript and its search for tensors."""
    if len(packed.tensors()) == len(packed.carried):
        call = internal.PythonUDF(func, (*args, packed.payload, _CARRIED), {})
        payload, tensors = pickle.dumps(call, pickle.HIGHEST_PROTOCOL), packed.carried
    else:
        payload, tensors = internal.serialize(internal.PythonUDF(func, (*args, *packed), {}))
    future: Future[Any] = _invoke_rpc_python_udf(to, payload, tensors, timeout, False)  # type: ignore[arg-type]
    return future


class _Carried:
    """A placeholder in a message for the list of tensors that came with it."""

    def __reduce__(self) -> tuple[Callable[[], list[Tensor]], tuple[()]]:
        return _carried_tensors, ()


def _carried_tensors() -> list[Tensor]:
    tensors: list[Tensor] = internal._thread_local_tensor_tables.recv_tables
    return tensors


_CARRIED = _Carried()


def own_copy(packed: Packed, *, graphs: bool) -> Packed:
    """The message as this worker would receive it: changes to its tensors do not reach the originals."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.clone() if graphs else value.detach().clone().requires_grad_(value.requires_grad)

    return packed._replace(carried=[copied(value) for value in packed.carried])


class Traffic(NamedTuple):
    """Bytes of all messages since the process started, counted by the caller; `received` is by the sender's rank."""

    sent: int
    received: Counter[int]

    def since(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


_lock = threading.Lock()
_total = Traffic(0, Counter())


def traffic() -> Traffic:
    """The bytes sent and received since the process started."""
    return _total


def note_traffic(sent: int = 0, received: Mapping[int, int] | None = None) -> None:
    """Adds bytes to `traffic`; those received by the sender's rank."""
    global _total
    with _lock:
        _total = Traffic(_total.sent + sent, _total.received + Counter(received))
