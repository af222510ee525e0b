"""What a sweep shows: its tables, its plots, and the view of a person while it runs."""

from sweeps.report.importance import importances, importances_of
from sweeps.report.plots import draw
from sweeps.report.tables import best_command, write_tables
from sweeps.report.view import View, seconds_left

__all__ = [
    "View",
    "best_command",
    "draw",
    "importances",
    "importances_of",
    "seconds_left",
    "write_tables",
]
