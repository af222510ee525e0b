"""What a sweep leaves behind: tables after every trial, plots at the end, and the command of the best configuration."""

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra_async_sweeper import report
from hydra_async_sweeper.islands import fold
from hydra_async_sweeper.ranking import best_trials
from hydra_async_sweeper.settings import PBT, SweeperSettings
from hydra_async_sweeper.space import as_overrides
from hydra_async_sweeper.study import Study

if TYPE_CHECKING:
    from hydra_async_sweeper.plan import SweepPlan, TaskTraits

log = logging.getLogger("hydra_async_sweeper")


class SweepRecords:
    """Writes the records of a sweep into its folder."""

    def __init__(
        self,
        study: Study,
        plan: "SweepPlan",
        chosen: SweeperSettings,
        task: "TaskTraits",
        folder: Path,
        objectives: Sequence[str],
        folder_of: Callable[[int], str],
        hydra_overrides: Sequence[str],
    ) -> None:
        self._study, self._plan, self._chosen, self._folder = study, plan, chosen, folder
        self._program, self._groups_of_sweeps, self._objectives = task.program, task.groups_of_sweeps, objectives
        self._folder_of, self._hydra_overrides = folder_of, hydra_overrides

    def write(self) -> None:
        """trials.csv and optimization_results.yaml."""
        report.write_tables(
            self._folder, self._study.finished(), self._objectives, self._study.directions,
            total=self._study.count(), command=self.command(), lanes=self._chosen.lanes,
            name=PBT if self._chosen.population else "async",
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
            exchanges=exchanges, lanes=self._chosen.lanes,
            importances=report.importances(self._study),
        )  # fmt: skip

    def command(self) -> str | None:
        """The command that trains the best configuration; of several, the first. Of a population: that trains the
        winner's lineage alone, if this is not such a command."""
        best = best_trials(self._study.finished(), self._study.directions, self._chosen.lanes)
        if not best:
            return None
        if self._chosen.population is not None:
            return self._replay() if self._chosen.population.schedule is None else None
        own = tuple(f"{group}=" for group in self._groups_of_sweeps)
        fixed = [text for text, searched in self._plan.template if not searched and not (own and text.startswith(own))]
        return " ".join(
            ["python", self._program, *map(shlex.quote, (*fixed, *as_overrides(best[0].params))), "run=best"]
        )

    def _replay(self) -> str:
        own = tuple(f"hydra.{key}=" for key in ("mode", "sweep.dir", "sweeper.replay", "sweeper.study_name"))
        kept = [text for text in self._hydra_overrides if not text.startswith(own)]
        new = [f"hydra.sweeper.replay={self._folder}", f"hydra.sweeper.study_name={self._chosen.study_name}_replay"]
        return " ".join(["python", self._program, "-m", *map(shlex.quote, (*self._plan.arguments, *kept, *new))])

    def announce(self) -> None:
        """Logs where the results are, and what to type next."""
        log.info("tables and plots: %s", self._folder)
        command = self.command()
        if command is not None:
            what = "the winner's lineage alone" if self._chosen.population else "the best configuration"
            log.info("%s: %s", what, command)
