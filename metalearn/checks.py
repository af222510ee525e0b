"""Argument checks whose messages name what is allowed. `build` puts the config group before the name."""

import math
from collections.abc import Collection
from typing import Any


def whole_number(name: str, value: object, *, at_least: int, at_most: int = 2**63 - 1) -> None:
    """Raises ValueError unless `value` is an int (bool does not count) in the range."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
        above = "" if at_most == 2**63 - 1 else f" and at most {at_most}"
        over = isinstance(value, int) and value > at_most
        example = f"type {name}={at_most} or less" if over else f"type {name}={max(at_least, 1)} or more"
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {at_least}{above}; {example}")


def whole_numbers(name: str, values: Any, *, example: list[int], count: int | None = None) -> None:
    """Raises ValueError unless `values` is a list of ints of at least 1, and has the wanted length."""
    good = isinstance(values, list | tuple) and all(type(value) is int and value >= 1 for value in values)
    if not good or count not in (None, len(values)):
        many = "" if count is None else f"{count} "
        typed = f"type {name}=[{','.join(map(str, example))}]"
        raise ValueError(f"{name}={values!r}: must be a list of {many}whole numbers of at least 1; {typed}")


def real_number(name: str, value: object, *, above: float | None = None, at_least: float | None = None) -> None:
    """Raises ValueError unless `value` is a finite number within the bound."""
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least is not None else ""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if good and isinstance(value, int | float):
        good = (above is None or value > above) and (at_least is None or value >= at_least)
    if not good:
        raise ValueError(f"{name}={value!r}: must be a finite number{bound}; type {name}=0.001, for example")


def fraction(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a number in [0, 1)."""
    real_number(name, value, at_least=0)
    if isinstance(value, int | float) and value >= 1:
        raise ValueError(f"{name}={value}: must be below 1; type {name}=0.9")


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Raises ValueError unless `value` is among `allowed`."""
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise ValueError(f"{name}={value!r}: must be one of {names}; type {name}={next(iter(allowed))}")


def only(name: str, value: object, right: object, owner: str) -> None:
    """Raises ValueError unless `value` is `right`, the only one that `owner` allows."""
    if value != right:
        raise ValueError(f"{name}={value!r}: must be {right} for {owner}; type {name}={right}")


def true_or_false(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be true or false; type {name}=true")


def enough_classes(name: str, ways: int, split: str, classes: int) -> None:
    """Raises ValueError when an episode asks for more classes than its split has."""
    if ways > classes:
        raise ValueError(f"{name}={ways}: the split '{split}' has {classes} classes; type {name}={classes} or fewer")
