"""What a sweep leaves behind: tables after every trial, plots at the end, and the command of the best configuration."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps import report
from sweeps.islands import fold
from sweeps.settings import Settings
from sweeps.space import as_overrides
from sweeps.study import Study

if TYPE_CHECKING:
    from sweeps.sweep import Plan, Task

log = logging.getLogger("sweeps")


class Records:
    """Writes the records of a sweep into its folder."""

    def __init__(
        self,
        study: Study,
        plan: "Plan",
        chosen: Settings,
        task: "Task",
        folder: Path,
        objectives: Sequence[str],
        folder_of: Callable[[int], str],
    ) -> None:
        self._study, self._plan, self._chosen, self._folder = study, plan, chosen, folder
        self._program, self._groups_of_sweeps, self._objectives = task.program, task.groups_of_sweeps, objectives
        self._islands = chosen.islands.num_islands if chosen.sampler == "islands" else 1
        self._folder_of = folder_of

    def write(self) -> None:
        """trials.csv and optimization_results.yaml."""
        report.write_tables(
            self._folder, self._study.finished(), self._objectives, self._study.directions,
            total=self._study.count(), command=self.command(), islands=self._islands, name="async",
            folder_of=self._folder_of,
        )  # fmt: skip

    def draw(self) -> None:
        """The plots of a sweep that has ended."""
        try:
            self._draw()
        except Exception:  # no plot is worth a sweep's results
            log.exception("the plots could not be drawn")

    def _draw(self) -> None:
        searched = self._chosen.sampler == "islands"
        exchanges = fold(self._study.losses(), self._chosen.islands).exchanges if searched else ()
        report.draw(
            self._folder, self._study.finished(), self._objectives, self._study.directions, self._plan.space,
            exchanges=exchanges, islands=self._islands,
            importances=report.importances(self._study),
        )  # fmt: skip

    def command(self) -> str | None:
        """The command that trains the best configuration; of several, the first."""
        best = report.best_trials(self._study.finished(), self._study.directions)
        if not best:
            return None
        own = tuple(f"{group}=" for group in self._groups_of_sweeps)
        fixed = [text for text, searched in self._plan.template if not searched and not (own and text.startswith(own))]
        return " ".join(["python", self._program, *map(_quoted, (*fixed, *as_overrides(best[0].params))), "run=best"])

    def announce(self) -> None:
        """Logs where the results are, and what to type next."""
        log.info("tables and plots: %s", self._folder)
        command = self.command()
        if command is not None:
            log.info("the best configuration: %s", command)


def _quoted(override: str) -> str:
    return f"'{override}'" if any(sign in override for sign in ' ()[]{}*$&|;<>"') else override
