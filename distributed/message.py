"""What a call sends: bytes, and beside them what only torch can carry, tensors and remote references.

Packing is ours, so that a parameter keeps its graph wherever it hides in a message, a value that cannot travel is
named before anything is sent, and bytes can be counted.
"""

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import rpc


class Packed(NamedTuple):
    """A value on its way."""

    payload: bytes
    carried: list[Any]

    def size(self) -> int:
        """Bytes that it takes, tensors included."""
        return len(self.payload) + sum(t.numel() * t.element_size() for t in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [value for value in self.carried if isinstance(value, Tensor)]


Carries = Callable[[torch.device], bool]
"""Whether the transport takes tensors from a device."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, *, graphs: bool, carries: Carries) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.carried: list[Any] = []
        self._graphs = graphs
        self._carries = carries
        self._places: dict[int, int] = {}
        self._seen: list[Any] = []  # kept alive, so that no id is used twice

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is Tensor or (self._graphs and isinstance(obj, nn.Parameter) and obj.requires_grad):
            if id(obj) not in self._places:
                self._keep(obj, self._sendable(obj))
            return self._places[id(obj)]
        if isinstance(obj, rpc.PyRRef):
            if id(obj) not in self._places:
                self._keep(obj, obj)
            return self._places[id(obj)]
        return None

    def _keep(self, original: Any, value: Any) -> None:
        self._places[id(original)] = len(self.carried)
        self._seen.append(original)
        self.carried.append(value)

    def _sendable(self, tensor: Tensor) -> Tensor:
        """A plain tensor with a storage of its own size, and with its graph where graphs travel."""
        if not self._carries(tensor.device):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be carried to that worker; "
                "send tensor.cpu(), or map the device by device_maps in rpc_backend_options"
            )
        plain = tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor
        if plain.layout is torch.strided and plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
            return plain.clone(memory_format=torch.contiguous_format)
        return plain


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.payload))
        self._carried = packed.carried

    def persistent_load(self, pid: Any) -> Any:
        return self._carried[pid]


def pack(value: Any, *, graphs: bool, carries: Carries) -> Packed:
    """`value` as a message.

    Args:
        value: functions and classes in it are sent by name.
        graphs: whether parameters go as tensors with their graph, as under a distributed autograd context.
        carries: which devices the transport takes tensors from.

    Raises:
        ValueError: a tensor on a device that the transport cannot carry.
        TypeError: something that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, graphs=graphs, carries=carries)
    try:
        pickler.dump(value)
    except ValueError:
        raise
    except Exception as error:  # a class may refuse in any way
        raise TypeError(str(error)) from error
    return Packed(file.getvalue(), pickler.carried)


def unpack(packed: Packed) -> Any:
    """The value that was packed, with functions and classes found by name here.

    Raises:
        Exception: what cannot be found, or refuses to be made.
    """
    return _Unpickler(packed).load()


def own_copy(packed: Packed, *, graphs: bool) -> Packed:
    """As if it had been sent to this very worker: what is done to its tensors does not reach the originals."""
    return Packed(packed.payload, [_copied(v, graphs) if isinstance(v, Tensor) else v for v in packed.carried])


def _copied(tensor: Tensor, graphs: bool) -> Tensor:
    if graphs:
        return tensor.clone()
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
