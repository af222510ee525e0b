"""What a network gets beside the parameters that learn: inputs, the parameters that do not learn, seeds, constants.

No algorithm knows of these. The code that computes a chunk sets the parameters and seeds, and the model reads them.

The inputs of a sample may be several tensors [t, n, …], or whole numbers. They travel through the program as one tensor
of real numbers [t, n, f], each flattened, one after the other. The network gets them back in their shapes, and whole
numbers where it needs such.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn


@dataclass
class PassSeeds:
    """The seeds of what a network draws in training, such as the masks of dropout.

    A seed follows from the seed of the run, the meta-step, the number of the task, and how many forward passes came
    before in the chunk. So it does not depend on the worker, on the other tasks of the chunk, or on a pause. A
    micro-batch of samples counts as one task.
    """

    run: int
    step: int
    tasks: Sequence[int]
    passes: int = 0

    def of_pass(self, tasks: int) -> list[int]:
        """The seed of each task in the next forward pass. Raises ValueError if the pass has another number of tasks
        than the chunk."""
        if tasks != len(self.tasks):
            raise ValueError(
                f"model.dropout=true: its random numbers follow from the number of a task, and this algorithm computes "
                f"{tasks} at once in a chunk of {len(self.tasks)} tasks; type model.dropout=false"
            )
        self.passes += 1
        keys = [f"{self.run} {self.step} {task} {self.passes}" for task in self.tasks]
        return [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) for key in keys]

    def of_task(self, place: int) -> "PassSeeds":
        """Those of one task of the chunk, from the first pass on."""
        return PassSeeds(self.run, self.step, self.tasks[place : place + 1])

    def copy(self) -> "PassSeeds":
        return replace(self)


class Surroundings(NamedTuple):
    """`fixed` are the parameters that do not learn, by name. Without `seeds`, a network is not in training. `ways` is
    the number of classes of every task, where it is known without a look at the labels, which may lie on a GPU. Of the
    outputs for classes, the first `present` are those of a task with fewer classes than others; None: all."""

    fixed: dict[str, Tensor]
    seeds: PassSeeds | None
    ways: int | None
    present: int | None = None


_NOTHING = Surroundings({}, None, None)
_here: ContextVar[Surroundings] = ContextVar("surroundings", default=_NOTHING)


def surroundings() -> Surroundings:
    return _here.get()


@contextmanager
def surrounded(**changes: Any) -> Iterator[None]:
    """Within it, the surroundings have these fields."""
    token = _here.set(_here.get()._replace(**changes))
    try:
        yield
    finally:
        _here.reset(token)


@contextmanager
def with_gradients() -> Iterator[None]:
    """Within it, tensors can have gradients, whatever mode the caller is in. It decorates functions, too."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def constant(value: Tensor) -> Callable[[torch.device, torch.dtype], Tensor]:
    """A function that gives `value` on a device, in a type. Several threads may call it."""
    # Copies are kept, since a step that is recorded as a CUDA graph may bring nothing to its GPU.
    copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def placed(device: torch.device, dtype: torch.dtype) -> Tensor:
        copy = copies.get((device, dtype))
        if copy is None:
            with torch.inference_mode(False):  # a copy made in this mode could be in no later graph of autograd
                copy = value.to(device, dtype)
            if type(copy) is Tensor:  # not one of torch.export's, which are only traced
                copies[device, dtype] = copy
        return copy

    return placed


def now_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For a computation that a backward pass repeats, in any thread: it has the same surroundings again."""
    return nullcontext(), _Again(_here.get())


class _Again(AbstractContextManager[None]):
    """It can be entered many times: a graph that is kept may have several backward passes."""

    def __init__(self, first: Surroundings) -> None:
        self._first = self._copied(first)
        self._tokens: list[Token[Surroundings]] = []

    def __enter__(self) -> None:
        self._tokens.append(_here.set(self._copied(self._first)))

    def __exit__(self, *_: object) -> None:
        _here.reset(self._tokens.pop())

    @staticmethod
    def _copied(values: Surroundings) -> Surroundings:
        return values if values.seeds is None else values._replace(seeds=values.seeds.copy())


# The precision of products: that of float32, unless the config asks for less.
#
# `tf32` keeps ten bits of float32's mantissa in the products of an NVIDIA GPU; `bf16` keeps seven, on any device. Sums,
# norms, losses and parameters stay float32.
#
# `bf16` rounds the operands of products to nearest even. Triton does so as it reads float32; torch's operations
# round the results too. The kernels in C round nothing, so that a CPU computes products in bf16 by torch's, layer by
# layer: it shows about what a run on a GPU would learn.

_rounds = False
_convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch has no type for it


def compute_with(precision: str) -> None:
    """Sets the precision of this process: `float32`, `float64`, `tf32` or `bf16`."""
    global _rounds
    _rounds, products = precision == "bf16", "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = _convolutions.fp32_precision = products


@contextmanager
def computing_with(precision: str) -> Iterator[None]:
    """As `compute_with`, for a block of code. After it, the precision is the one before."""
    global _rounds
    before = _rounds, torch.backends.cuda.matmul.fp32_precision, _convolutions.fp32_precision
    compute_with(precision)
    try:
        yield
    finally:
        _rounds, torch.backends.cuda.matmul.fp32_precision, _convolutions.fp32_precision = before


def type_of(precision: str) -> torch.dtype:
    """The type of parameters, inputs, and everything but products."""
    return torch.float64 if precision == "float64" else torch.float32


def rounds_products() -> bool:
    """Whether the operands of products are rounded to bfloat16."""
    return _rounds


Kind = Literal["real", "whole", "bool"]
EXACT = 2**24  # whole numbers up to this have an exact float32


class Part(NamedTuple):
    """One tensor of a sample: its name, its shape, and what it holds. The place in a tuple is a name, as `0`. An only
    tensor has no name."""

    name: str
    shape: tuple[int, ...]
    kind: Kind


Inputs: TypeAlias = tuple[Part, ...]  # what a sample is: the parts are in the order of their names, or of their places


def of_reals(shape: Sequence[int]) -> Inputs:
    """One tensor of real numbers."""
    return (Part("", tuple(shape), "real"),)


def shape_of(inputs: Inputs) -> tuple[int, ...]:
    """The shape of a sample as it travels."""
    return inputs[0].shape if not inputs[0].name else (sum(math.prod(part.shape) for part in inputs),)


def inputs_of(x: Any) -> Inputs:
    """What `x` has for a sample: a tensor [t, n, …], or a dictionary or tuple of such. Raises ValueError if it is
    something else."""
    parts = []
    for name, value in _named(x):
        kind: Kind = "bool" if value.dtype == torch.bool else "real" if value.is_floating_point() else "whole"
        parts.append(Part(name, tuple(value.shape[2:]), kind))
    return tuple(parts)


def packed(x: Any) -> Tensor:
    """Inputs as one tensor: `x` itself, or for several tensors [t, n, f] in float64, in which each number is exact.
    Raises ValueError if they are no such tensors, do not fit together, or hold a whole number with no exact float32."""
    named = _named(x)
    for name, value in named:
        if value.dtype in (torch.int32, torch.int64) and value.numel() and int(value.abs().max()) > EXACT:
            raise ValueError(
                f"{name and f'[{name}] '}holds {int(value.abs().max())}; whole numbers travel as float32, which are "
                f"exact up to {EXACT}; give smaller numbers, or real ones"
            )
    if not named[0][0]:
        return named[0][1]
    sizes = {value.shape[:2] for _, value in named}
    if len(sizes) > 1:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in named)
        raise ValueError(f"has the shapes {shapes}; all begin with [tasks, samples]")
    return torch.cat([value.double().reshape(*value.shape[:2], -1) for _, value in named], dim=2)


def _named(x: Any) -> list[tuple[str, Tensor]]:
    """Tensors by name or place. One number for each sample is a part by its place, so that a sample has a dimension."""
    if isinstance(x, Tensor):
        return [("" if x.dim() > 2 else "0", x)]
    parts = sorted(x.items()) if isinstance(x, Mapping) else list(enumerate(x)) if isinstance(x, tuple) else []
    named = [(str(name), value) for name, value in parts]
    if not named or not all(isinstance(value, Tensor) and value.dim() >= 2 and name for name, value in named):
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in named)
        raise ValueError(
            f"is a {type(x).__name__}{kinds and f' of {kinds}'}; give a tensor [tasks, samples, …], or a dictionary or "
            "tuple of such"
        )
    return named


def as_reals(inputs: Inputs) -> Inputs:
    """The same, with real numbers in place of whole ones."""
    return tuple(part._replace(kind="real" if part.kind == "whole" else part.kind) for part in inputs)


def filled(inputs: Inputs, values: Tensor) -> Tensor:
    """Inputs to try a network with: `values` [n, *shape_of(inputs)], with 1 in place of whole numbers, as of ids and
    lengths; every other one of what is true or false is true, so that a mask hides something and not all. `values` is
    changed."""
    for part, view in zip(inputs, _split(inputs, values), strict=True):
        if part.kind != "real":
            view.fill_(1)
        if part.kind == "bool":
            view.flatten(1)[:, 1::2] = 0
    return values


def _split(inputs: Inputs, x: Tensor) -> Sequence[Tensor]:
    if not inputs[0].name:
        return [x]
    views: Sequence[Tensor] = x.split([math.prod(part.shape) for part in inputs], dim=1)
    return views


def opened(network: nn.Module, inputs: Inputs, *, joins: bool = True) -> nn.Module:
    """The network, changed in place so that it takes and gives one tensor. It takes samples as they travel, and its
    `forward` gets the tensors that they were made of: by keywords or as one dictionary, as arguments or as one tuple,
    whichever it takes. If it `joins`, outputs that are several tensors [n, …], or one of other dimensions, become one,
    [n, d]."""
    opening: Any = network
    names = [part.name for part in inputs]
    opening.opened_inputs, opening.opened_joins = inputs, joins
    opening.opened_by_name = not names[0].isdecimal()
    # Whether `forward` takes tensors of these names, or as many, each by itself.
    opening.opened_apart = bool(names[0])
    if names[0]:
        takes = inspect.signature(network.forward)
        try:
            takes.bind(*names) if names[0].isdecimal() else takes.bind(**dict.fromkeys(names))
        except TypeError:
            opening.opened_apart = False
    opening.__class__ = type(type(network).__name__, (Opened, type(network)), {})
    return network


class Opened(nn.Module):
    opened_inputs: Inputs
    opened_by_name: bool
    opened_apart: bool
    opened_joins: bool

    def forward(self, x: Tensor) -> Any:
        named: dict[str, Tensor] = {}
        for part, value in zip(self.opened_inputs, _split(self.opened_inputs, x), strict=True):
            value = value.reshape(len(x), *part.shape) if part.name else value
            named[part.name] = value if part.kind == "real" else value != 0 if part.kind == "bool" else value.long()
        if self.opened_apart:
            outputs = super().forward(**named) if self.opened_by_name else super().forward(*named.values())
        elif self.opened_by_name:
            outputs = super().forward(named.get("", named))
        else:
            outputs = super().forward(tuple(named.values()))
        return joined(outputs, len(x)) if self.opened_joins else outputs


def joined(outputs: Any, samples: int) -> Any:
    """Outputs as [n, d], those of several tensors one after the other. Others stay as they are."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    several = list(values) if isinstance(outputs, Mapping | tuple | list) else [outputs]
    if not all(isinstance(value, Tensor) and value.dim() and len(value) == samples for value in several):
        return outputs
    # A tensor [n, d] stays the very tensor that a layer gave, by which that layer is known as the head.
    flat = [value if value.dim() == 2 else value.reshape(samples, -1) for value in several]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1) if flat else outputs


def described(inputs: Inputs) -> str:
    """The inputs as a message has them: `[n, 16]`, or `ids [n, 16], mask [n, 16]`."""
    return ", ".join(f"{part.name} [{', '.join(map(str, ('n', *part.shape)))}]".strip() for part in inputs)


def said_of(inputs: Inputs, x: Tensor) -> str:
    """What the whole numbers among inputs [n, …] are, for a message."""
    pairs = zip(inputs, _split(inputs, x), strict=True)
    return "; ".join(
        f"its whole numbers {f'{part.name} ' * bool(part.name)}run from {int(value.min())} to {int(value.max())}"
        for part, value in pairs
        if part.kind == "whole"
    )
