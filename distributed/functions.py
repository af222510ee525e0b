"""Declarations about functions that remote calls run, and the search for a function by its name."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_PURE = "__pure__"


def pure(func: F) -> F:
    """Declares that the function only computes its result, and changes nothing in place: a worker's items then share
    their arguments."""
    setattr(func, _PURE, True)
    return func


def is_pure(func: Callable[..., Any]) -> bool:
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, _PURE, False) is True


# Names


def import_name(module: str, name: str) -> Any:
    """The object with the dotted name `name` in `module`, which is imported if it is not yet."""
    value: Any = sys.modules.get(module) or importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


def find_function(argument: str, name: str) -> Callable[..., Any]:
    """The function with a dotted name such as `my_module.my_function`.

    Raises:
        ValueError: there is no such function; the message names `argument`.
    """
    module, _, attribute = str(name).rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument}={name}: {error}; must be MODULE.FUNCTION, importable from here") from error
    if not callable(function):
        raise ValueError(f"{argument}={name}: is not a function")
    return function  # type: ignore[no-any-return]
