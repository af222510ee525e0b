"""What a sweep shows: its tables, its plots, and the view of a person while it runs."""

from hydra_async_sweeper.report.tables import best_command, write_tables
from hydra_async_sweeper.report.view import SweepView

__all__ = ["SweepView", "best_command", "write_tables"]
