"""Calls dataset factories with flat arguments, which are named as the keys of the config."""

import inspect
from collections.abc import Callable
from typing import Any

from metalearn.tasks.common.episodes import EpisodeSpec, Seeds
from metalearn.tasks.common.stored import DataPlace
from metalearn.types import TaskSource

Make = Callable[..., TaskSource]

BUNDLES = {"place": DataPlace, "episode": EpisodeSpec, "seeds": Seeds}


def source_of(factory: Make, **values: Any) -> TaskSource:
    """Calls `factory` with its `place`, `episode` and `seeds` made of their fields among `values`."""
    for name, bundle in BUNDLES.items():
        if name in inspect.signature(factory).parameters:
            fields = {field: values.pop(field) for field in bundle._fields if field in values}
            values[name] = bundle(**fields)
    return factory(**values)
