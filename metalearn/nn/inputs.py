"""What a network takes for a sample, if that is not one tensor of real numbers: whole numbers, or several tensors.

Several tensors [t, n, …] travel through the program as one, [t, n, f]: each flattened, one after the other. The network
gets them back in their own shapes. Numbers travel as real ones, and a network that needs whole numbers gets such.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

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
        named = {
            part.name: _typed(value.reshape(len(x), *part.shape) if part.name else value, part.kind)
            for part, value in zip(self.opened_inputs, _split(self.opened_inputs, x), strict=True)
        }
        if self.opened_apart and self.opened_by_name:
            outputs = super().forward(**named)
        elif self.opened_apart:
            outputs = super().forward(*named.values())
        elif self.opened_by_name:
            outputs = super().forward(named.get("", named))
        else:
            outputs = super().forward(tuple(named.values()))
        return joined(outputs, len(x)) if self.opened_joins else outputs


def _typed(value: Tensor, kind: Kind) -> Tensor:
    return value if kind == "real" else value != 0 if kind == "bool" else value.long()


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
