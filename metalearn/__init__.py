"""Learns: tasks, models, algorithms and the loop that trains them. Knows nothing of processes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metalearn.api.export import push_to_hub
    from metalearn.api.learner import from_pretrained, load, load_task
    from metalearn.api.train import train
    from metalearn.app.prior_check import prior
    from metalearn.classifier.classifier import PictureClassifier
    from metalearn.config.options import named
    from metalearn.tables.estimators import PFNClassifier, PFNRegressor
    from metalearn.tasks.table import arrays

__all__ = [
    "PFNClassifier", "PFNRegressor", "PictureClassifier", "arrays", "from_pretrained", "load", "load_task", "named",
    "prior", "push_to_hub", "train",
]  # fmt: skip

_HOMES = {
    "PFNClassifier": "metalearn.tables.estimators",
    "PFNRegressor": "metalearn.tables.estimators",
    "PictureClassifier": "metalearn.classifier.classifier",
    "arrays": "metalearn.tasks.table",
    "from_pretrained": "metalearn.api.learner",
    "load": "metalearn.api.learner",
    "load_task": "metalearn.api.learner",
    "named": "metalearn.config.options",
    "prior": "metalearn.app.prior_check",
    "push_to_hub": "metalearn.api.export",
    "train": "metalearn.api.train",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, since it imports torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
