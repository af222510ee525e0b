"""What a sweep leaves behind: tables after every trial, plots at the end, and the command of the best configuration."""

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra_async_sweeper import report
from hydra_async_sweeper.disk import DISK_FAULT, PausedError
from hydra_async_sweeper.ranking import FinishedTrials
from hydra_async_sweeper.settings import PBT, SweeperSettings
from hydra_async_sweeper.space import as_overrides
from hydra_async_sweeper.study import Study
from hydra_async_sweeper.trial import import_path

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
        self._task, self._objectives = task, objectives
        self._folder_of, self._hydra_overrides = folder_of, hydra_overrides

    def _ended(self) -> FinishedTrials:
        study = self._study
        return FinishedTrials(study.finished(), self._objectives, study.directions, self._chosen.lanes)

    def write(self) -> None:
        """trials.csv and optimization_results.yaml."""
        report.write_tables(
            self._folder, self._ended(), total=self._study.count(), command=self.command(),
            name=PBT if self._chosen.population else "async", folder_of=self._folder_of,
        )  # fmt: skip

    def draw(self) -> None:
        """The plots of a sweep that has ended, by a process of its own: Optuna draws by pyplot, which has a global
        state and may open windows. No plot is worth a sweep's results."""
        command = [sys.executable, "-P", "-m", "hydra_async_sweeper.report", str(self._folder), "--only-plots",
                   "--storage", str(self._study.path), "--study-name", self._chosen.study_name]  # fmt: skip
        env = os.environ | {"PYTHONPATH": import_path(), "MPLBACKEND": "Agg"}
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        if run.returncode == DISK_FAULT:
            raise PausedError(run.stderr.strip().rpartition("\n")[2])
        if run.returncode or run.stderr:
            log.warning("not all plots could be drawn: %s", run.stderr.strip())

    def command(self) -> str | None:
        """The command that trains the best configuration; of several, the first. Of a population: that trains the
        winner's lineage alone, if this is not such a command."""
        best = self._ended().best()
        if not best:
            return None
        if self._chosen.population is not None:
            return self._replay() if self._chosen.population.schedule is None else None
        own = tuple(f"{group}=" for group in self._task.groups_of_sweeps)
        fixed = [text for text, searched in self._plan.template if not searched and not (own and text.startswith(own))]
        overrides = (*fixed, *as_overrides(best[0].params), *self._task.best_run)
        return " ".join(["python", self._task.program, *map(shlex.quote, overrides)])

    def _replay(self) -> str:
        own = tuple(f"hydra.{key}=" for key in ("mode", "sweep.dir", "sweeper.replay", "sweeper.study_name"))
        kept = [text for text in self._hydra_overrides if not text.startswith(own)]
        new = [f"hydra.sweeper.replay={self._folder}", f"hydra.sweeper.study_name={self._chosen.study_name}_replay"]
        return " ".join(["python", self._task.program, "-m", *map(shlex.quote, (*self._plan.arguments, *kept, *new))])

    def announce(self) -> None:
        """Logs where the results are, and what to type next."""
        log.info("tables and plots: %s", self._folder)
        command = self.command()
        if command is not None:
            what = "the winner's lineage alone" if self._chosen.population else "the best configuration"
            log.info("%s: %s", what, command)
