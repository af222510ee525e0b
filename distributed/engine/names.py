"""Finds functions and classes by their names."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


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
