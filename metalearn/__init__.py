"""Learns: tasks, models, algorithms and the loop that trains them. Knows nothing of processes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metalearn.config.plain import named
    from metalearn.program.library import train
    from metalearn.use.load import load

__all__ = ["load", "named", "train"]

_HOMES = {
    "load": "metalearn.use.load",
    "named": "metalearn.config.plain",
    "train": "metalearn.program.library",
}


def __getattr__(name: str) -> Any:
    """What users need of the package, imported when it is first used: it takes torch along."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
