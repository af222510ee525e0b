"""The kernels in C (`kernels/`). The compiler of this machine compiles them once, and the cache keeps them."""

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = sorted(Path(__file__).with_name("kernels").glob("*.[ch]"))
REALS = {torch.float32: "float", torch.float64: "double"}
Address = ctypes.c_void_p
Number = ctypes.c_int64
GEOMETRY = Number * 12
"""tasks, samples, height, width, inputs, out height, out width, outputs, kernel height and width, stride, padding."""

MULTIPLE = 16
"""Channels are filled with zeros up to a multiple of this, the widest vector of the kernels. They stay zero: their
gradients are zero."""


def filled(channels: int) -> int:
    """The channels with the zeros behind them."""
    return -(-channels // MULTIPLE) * MULTIPLE


class LayerKind(IntEnum):
    """`enum kind` of kernels/network.h."""

    WINDOWS, CONVOLUTION, NORM, ACTIVATION, POOL, MEAN, SUM = range(7)


ACTIVATIONS = ("leaky_relu", "softplus", "tanh")  # by their numbers in kernels/network.h


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, in the order of the struct."""
    return [(name, kind) for name in names.split()]


class LAYER(ctypes.Structure):
    """`struct layer` of network.h."""

    _fields_ = [
        *_fields(Number, "kind from other height width channels used kernel stride padding weight bias activation"),
        *_fields(ctypes.c_double, "slope epsilon"),
    ]


class CALL(ctypes.Structure):
    """`struct call` of network.h."""

    _fields_ = [
        *_fields(Number, "tasks support_size outputs parameters_step steps"),
        ("rate", ctypes.c_double),
        *_fields(Address, "parameters x labels targets direction loss score gradient kept product result"),
    ]


@dataclass
class NetworkCall:
    """What is computed of a network, and where its results go, as `struct call` of network.h explains. `parameters` are
    rows [t, P], or one row that all tasks share. `y` has classes or numbers. With a `rate`, a step takes the place of
    the gradient."""

    parameters: Tensor
    x: Tensor
    support_size: int
    outputs: int
    y: Tensor | None = None
    rate: float | None = None
    direction: Tensor | None = None
    loss: Tensor | None = None
    score: Tensor | None = None
    gradient: Tensor | None = None
    kept: Tensor | None = None
    product: Tensor | None = None
    result: Tensor | None = None


class ATTENTION(ctypes.Structure):
    """`struct attention` of attention.c."""

    _fields_ = [
        *_fields(Number, "heads queries keys width values masks mask_every mask_step"),
        ("scale", ctypes.c_double),
        *_fields(Address, "q k v mask u a b c o gq gk gv gu"),
    ]


def _norm_type(real: type) -> Any:
    """`struct norm` of norm.h."""
    addresses = (
        "windows kernels g_kernels x scale shift gy v v_scale v_shift scale_gradient shift_gradient mean rstd y gx "
        "g_scale g_shift ggy hx h_scale"
    )
    fields = [*_fields(Number, "tasks rows measured channels scale_step"), *_fields(real, "epsilon slope")]
    fields += [("depth", Number), *_fields(Address, addresses)]
    return type("_Norm", (ctypes.Structure,), {"_fields_": fields})


class Kernels:
    """The functions of one compiled library. Their tensors must be dense, of the library's type, on the CPU."""

    # Each call asks torch for its number of threads, which may have changed since the last one. No bit depends on it.

    widest_head = math.inf  # numbers of a head of attention

    def __init__(self, library: ctypes.CDLL, real: type) -> None:
        for function in (library.product, library.input_gradient):
            function.argtypes = [GEOMETRY, Address, Address, Number, Address, Number]
        library.weight_gradient.argtypes = [GEOMETRY, Address, Address, Address, Number]
        library.lanes.restype = Number
        library.use_parallel_region.argtypes = [Address]
        # The threads of torch's OpenMP: a pool of our own would compete with them for the cores. Without it, one thread
        # computes.
        region = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
        if region is not None:
            library.use_parallel_region(ctypes.cast(region, Address))
        for function in (library.pack_row, library.unpack_row):
            function.argtypes = [Number, Address, Number, Address, Address, Address, Number]
        library.sum_rows.argtypes = [Number, Number, Address, Address, Number]
        library.new_plan.argtypes = [Address, Number, Address, Number, Number]
        library.new_plan.restype = Address
        library.free_plan.argtypes, library.free_plan.restype = [Address], None
        for function in (library.kept_size, library.values_size):
            function.argtypes, function.restype = [Address], Number
        for name in ("loss", "product", "outputs", "outputs_gradient"):
            getattr(library, "network_" + name).argtypes = [Address, Address, Number]
        self._library, self.real, self._norm_type = library, real, _norm_type(real)
        self.lanes = int(library.lanes())

    def convolution(self, by: str, geometry: Any, gy: Tensor, x: Tensor, weight: Tensor, step: int) -> None:
        """The derivative of ⟨gy, x ∗ w⟩ by the one of "gy", "x" and "w" that `by` names, which goes into its tensor.
        `step` is the distance from one task's kernels to the next task's, 0 if they share them."""
        threads, of_gy, of_x, of_w = torch.get_num_threads(), gy.data_ptr(), x.data_ptr(), weight.data_ptr()
        if by == "gy":
            self._library.product(geometry, of_x, of_w, step, of_gy, threads)
        elif by == "x":
            self._library.input_gradient(geometry, of_gy, of_w, step, of_x, threads)
        else:
            self._library.weight_gradient(geometry, of_gy, of_x, of_w, threads)

    def norm(self, name: str, sizes: Sequence[int], epsilon: float, slope: float, **tensors: Tensor) -> None:
        """Calls `norm`, `norm_backward` or `norm_second`; `sizes` are tasks, rows, measured rows, channels and
        scale_step."""
        addresses = {key: tensor.data_ptr() for key, tensor in tensors.items()}
        arguments = self._norm_type(*sizes, epsilon, slope, **addresses)
        getattr(self._library, name)(ctypes.byref(arguments), Number(torch.get_num_threads()))

    def attention(self, name: str, every: int, scale: float, **tensors: Tensor | None) -> None:
        """Calls `attention`, `attention_backward` or `attention_second`. A `mask` [masks, n or 1, m] serves `every`
        heads that follow each other."""
        q, k, v, mask = (tensors[key] for key in ("q", "k", "v", "mask"))
        assert q is not None and k is not None and v is not None
        call = ATTENTION(*q.shape[:2], k.shape[1], q.shape[2], v.shape[2], 1, every, 0, scale)
        if mask is not None:
            call.masks, call.mask_step = len(mask), mask.shape[2] if mask.shape[1] > 1 else 0
        for key, tensor in tensors.items():
            if tensor is not None:
                setattr(call, key, tensor.data_ptr())
        getattr(self._library, name)(ctypes.byref(call), Number(torch.get_num_threads()))

    def pack(self, params: Tensor, tiles: Tensor, places: Tensor) -> Tensor:
        """Parameters [n] as a row [P]; `tiles` [·, 3] (int64) and `places` [P] (int32) are a layout's, not checked."""
        return self._between(self._library.pack_row, params, tiles, len(params), places, len(places))

    def unpack(self, row: Tensor, tiles: Tensor, places: Tensor, count: int) -> Tensor:
        """A row [P] as its `count` parameters."""
        return self._between(self._library.unpack_row, row, tiles, count, places, count)

    def _between(self, function: Any, x: Tensor, tiles: Tensor, count: int, places: Tensor, size: int) -> Tensor:
        y, threads = x.new_empty(size), torch.get_num_threads()
        function(len(tiles), tiles.data_ptr(), count, places.data_ptr(), x.data_ptr(), y.data_ptr(), threads)
        return y

    def sum_rows(self, x: Tensor) -> Tensor:
        """The sum of rows [r, n], in pairs: neighbours first, then pairs of pairs."""
        y = x.new_empty(x.shape[1])
        self._library.sum_rows(*x.shape, x.data_ptr(), y.data_ptr(), torch.get_num_threads())
        return y

    def plan(self, layers: Any, image: Sequence[int], parameters: int, samples: int) -> "CompiledPlan":
        """A network's plan, for an array of `LAYER`, an `image` of channels, height and width, and the numbers of a
        task's `parameters` and inputs. Raises ValueError if there are too many layers, or the inputs are too large."""
        address = self._library.new_plan(layers, len(layers), (Number * 3)(*image), parameters, samples)
        if not address:
            raise ValueError(
                f"{samples} inputs of {list(image)} numbers, {len(layers)} layers: too many for the compiled network; "
                "METALEARN_KERNELS=torch computes the layers one by one"
            )
        return CompiledPlan(self._library, address)

    def network(self, what: str, plan: int, call: NetworkCall) -> None:
        """Computes, of all tasks, losses and gradients (`loss`), Hessian-vector products (`product`), last values
        (`outputs`), or from the gradients of these to those of the parameters (`outputs_gradient`)."""
        rows, y = call.parameters, call.y
        arguments = CALL(len(rows), call.support_size, call.outputs, rows.stride(0))
        if call.rate is not None:
            arguments.steps, arguments.rate = 1, call.rate
        if y is not None:
            setattr(arguments, "targets" if y.is_floating_point() else "labels", y.data_ptr())
        for name in ("parameters", "x", "direction", "loss", "score", "gradient", "kept", "product", "result"):
            if (value := getattr(call, name)) is not None:
                setattr(arguments, name, value.data_ptr())
        getattr(self._library, "network_" + what)(plan, ctypes.byref(arguments), torch.get_num_threads())


class CompiledPlan:
    """Owns a plan of network.h at `address`, which is freed with this object. Of a task, the product needs `kept`
    numbers, the gradient of its outputs `values`."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self.address = address
        self.kept, self.values = int(library.kept_size(address)), int(library.values_size(address))
        # Not at exit: a thread may still compute with the plan, and its memory goes back anyway.
        weakref.finalize(self, library.free_plan, address).atexit = False
