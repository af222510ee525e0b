"""Functions and classes by their names."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def named(module: str, name: str) -> Any:
    """What `module` calls `name`, imported if need be."""
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found


def find_function(argument: str, name: str) -> Callable[..., Any]:
    """The function that a dotted name stands for.

    Raises:
        ValueError: there is none; the message names `argument`.
    """
    module, _, attribute = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument}={name}: {error}; must be MODULE.FUNCTION, importable from here") from error
    if not callable(found):
        raise ValueError(f"{argument}={name}: is not a function")
    return found  # type: ignore[no-any-return]
