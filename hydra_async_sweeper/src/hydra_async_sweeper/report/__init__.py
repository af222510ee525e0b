"""What a sweep shows: its tables, its plots, and the view of a person while it runs."""

from hydra_async_sweeper.report.importance import importances, importances_of
from hydra_async_sweeper.report.plots import draw
from hydra_async_sweeper.report.tables import best_command, write_tables
from hydra_async_sweeper.report.view import SweepView, seconds_left

__all__ = [
    "SweepView",
    "best_command",
    "draw",
    "importances",
    "importances_of",
    "seconds_left",
    "write_tables",
]
