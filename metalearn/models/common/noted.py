"""How a config notes what a network takes for a sample (`metalearn.nn.inputs`)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from metalearn.checks import Invalid, one_of, whole_number
from metalearn.nn.inputs import Inputs, Kind, Part, shape_of

MOST_NUMBERS = 2**24
"""The most numbers in an input of a network of one's own."""


def to_note(inputs: Inputs) -> list[Any]:
    """As lists of names, shapes and kinds."""
    return [[part.name, list(part.shape), part.kind] for part in inputs]


def from_note(note: Any) -> Inputs:
    """What `to_note` has written, or somebody else.

    Raises:
        ValueError: it is something else, or an input is too large.
    """
    example = "type KEY=[[ids,[16],whole],[mask,[16],bool]], for example"
    if not is_note(note) or not note or not all(_is_part(part) for part in note):
        raise Invalid("inputs", note, "must be lists of a name, a shape and what it holds", example)
    for _, shape, kind in note:
        one_of("inputs", kind, get_args(Kind))
        read_shape(shape)
    names = [name for name, _, _ in note]
    if len(set(names)) < len(names) or (len(names) > 1 and "" in names):
        raise Invalid("inputs", note, "must have another name for each input, or one input without", example)
    inputs = tuple(Part(name, tuple(shape), kind) for name, shape, kind in note)
    read_shape(shape_of(inputs))
    return inputs


def noted_inputs(config: Mapping[str, Any]) -> Inputs | None:
    """The inputs that a config notes of its network or its tasks; None if they are one tensor of real numbers.

    Raises:
        ValueError: as `from_note`.
    """
    notes = [note for group in ("model", "dataset") if is_note(note := config[group].get("inputs"))]
    return from_note(notes[0]) if notes else None


def is_note(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_part(part: Any) -> bool:
    return (
        is_note(part) and len(part) == 3 and isinstance(part[0], str) and is_note(part[1]) and isinstance(part[2], str)
    )  # fmt: skip


def read_shape(saved: Sequence[Any]) -> tuple[int, ...]:
    """A shape in a config.

    Raises:
        ValueError: it is none, or too large.
    """
    for size in saved:
        whole_number("shape", size, at_least=1)
    whole_number("shape", math.prod(saved), at_least=1, at_most=MOST_NUMBERS)
    return tuple(saved)
