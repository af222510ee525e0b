"""A sweep from Hydra's command line to its last trial, and what it leaves behind."""

import errno
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf

from hydra_async_sweeper import report
from hydra_async_sweeper.settings import JOURNAL, SweeperSettings, settings_of
from hydra_async_sweeper.slots import (
    DISK_FAULT,
    DISK_FAULTS,
    NurseryGoneError,
    PausedError,
    TrialSlots,
    fault_at,
    fault_in,
    line_of,
    write_atomically,
)
from hydra_async_sweeper.space import SpaceError, SweepPlan, as_overrides, combinations, plan_of, size, to_plain
from hydra_async_sweeper.trial import gpus_of, import_path, job_return, run_trial, trial_folders
from hydra_async_sweeper.trials import FAILED, FinishedTrials, StartedTrial, StudyError

if TYPE_CHECKING:
    from hydra_async_sweeper.study import Study

log = logging.getLogger("hydra_async_sweeper")


class TrialsFailedError(RuntimeError):
    """More trials have failed than are allowed."""


class TaskTraits(NamedTuple):
    """What a task function says of itself, by attributes of these names; all may be absent.

    `objective` is the field of the returned mapping that is searched for by default; `maximized` the names of fields of
    which more is better, beside accuracies; `preload` the modules that its trials need; `free_keys` the keys that may
    differ when a sweep resumes; `program` the command that runs it; `groups_of_sweeps` the config groups that say
    nothing about a single run; and `best_run` the overrides that the command of the best configuration has, too.
    `segment(round, rounds, parent, keys)` gives the overrides of a trial that trains one of several rounds: from the
    checkpoint in the folder `parent`, if it is not None, with other values of `keys`.
    """

    objective: str | None = None
    maximized: Sequence[str] = ()
    preload: Sequence[str] = ()
    free_keys: Sequence[str] = ()
    program: str = sys.argv[0]
    groups_of_sweeps: Sequence[str] = ()
    best_run: Sequence[str] = ()
    segment: Callable[[int, int, Path | None, Sequence[str]], list[str]] | None = None

    @classmethod
    def of(cls, function: TaskFunction | None) -> "TaskTraits":
        return cls(**{name: getattr(function, name) for name in cls._fields if hasattr(function, name)})


def sweep(
    settings: Mapping[str, Any],
    arguments: Sequence[str],
    config: DictConfig,
    launcher: Launcher,
    loader: ConfigLoader,
    task_function: TaskFunction | None,
) -> list[list[JobReturn]]:
    """Runs a sweep as Hydra's sweeper `async` or `pbt`.

    Returns:
        What the trials of this call have returned, in groups of `n_jobs`, in the order of their numbers.

    Raises:
        SystemExit: 1 if the nursery was killed, a disk has failed, or more trials have failed than `max_failure_rate`
            allows; 2 if the sweep cannot be started; 130 or 143 if it was stopped.
    """
    task, folder = TaskTraits.of(task_function), Path(str(config.hydra.sweep.dir))
    try:
        plan = plan_of(arguments, settings["params"], lambda group: loader.get_group_options(group, ObjectType.CONFIG))
        chosen = settings_of(settings, plan.space, task.objective, task.maximized)
        if chosen.objective or (chosen.n_trials or size(plan.space) or 1) > 1:
            _check_subdir(config)
        # Nothing must be imported before the fork that starts threads, as optuna's dependencies may.
        with _creating("hydra.sweep.dir", folder):
            slots = TrialSlots(
                partial(run_trial, launcher), folder / "logs",
                preload=[*task.preload, *chosen.preload] if chosen.warm else (), gpus=gpus_of(config),
            )  # fmt: skip
        with closing(slots):
            return SweepRun(plan, chosen, task, config, folder).run(slots)
    except (SpaceError, StudyError) as error:
        message, code = f"error: {error}", 2
    except (NurseryGoneError, TrialsFailedError) as error:
        message, code = f"error: {error}", 1
    except PausedError as error:
        message, code = f"paused: {error}", 1
    except OSError as error:  # of the journal, or of another file of the sweep
        message, code = f"paused: {line_of(fault_in(error) or fault_at(folder) or error, folder)}", 1
    print(message, file=sys.stderr)
    raise SystemExit(code)


class SweepRun:
    """A sweep whose trials can be started: its study, its trials' overrides, and its records."""

    def __init__(
        self, plan: SweepPlan, chosen: SweeperSettings, task: TaskTraits, config: DictConfig, folder: Path
    ) -> None:
        self._plan, self._task, self._config, self._folder = plan, task, config, folder
        self._folder_of = trial_folders(config, folder)
        if chosen.population and task.segment is None:
            raise SpaceError("hydra/sweeper=pbt: this program cannot resume from another run's checkpoint; type "
                             "hydra/sweeper=async")  # fmt: skip
        if chosen.population and self._folder_of is None:
            raise SpaceError("hydra.sweep.subdir: must follow from the trial's number alone; type "
                             "'hydra.sweep.subdir=${hydra:job.num}'")  # fmt: skip
        if chosen.pruner != "none" and (self._folder_of is None or not chosen.objective):
            raise SpaceError(
                f"hydra.sweeper.pruner={chosen.pruner}: reads a field of metrics.jsonl in the folder of each trial, so "
                "it needs a hydra.sweeper.objective, and a hydra.sweep.subdir that follows from the trial's number "
                "alone; type them, or hydra.sweeper.pruner=none"
            )
        self._study = self._open_study(chosen)
        # The law of exchanges must not change when the sweep resumes with other slots.
        island_size = self._study.keep("island_size", chosen.islands.island_size)
        self._chosen = chosen._replace(islands=chosen.islands._replace(island_size=island_size))

    def run(self, slots: TrialSlots) -> list[list[JobReturn]]:
        """Runs the trials, and writes the records."""
        from hydra_async_sweeper.controller import PruningWatch, SweepController
        from hydra_async_sweeper.study import PRUNERS, search_of

        study, chosen, folder_of = self._study, self._chosen, self._folder_of
        with closing(study):
            ended = self._ended()
            view = report.SweepView(study.count(), chosen.n_jobs, ended)
            watch = None
            if folder_of is not None and chosen.objective:
                metric = chosen.objective[0].rpartition(".")[2]
                watch = PruningWatch(study, PRUNERS[chosen.pruner](), folder_of, metric, view.progress)
            controller = SweepController(
                study, slots, chosen, overrides_of=self.overrides_of, search=search_of(study, chosen), watch=watch,
                view=view, record=self._record,
            )  # fmt: skip
            try:
                stopped = controller.run()
            finally:
                view.close()
            self._record()
            if stopped:
                raise SystemExit(128 + stopped)
            if chosen.plots:
                self._draw()
            log.info("tables and plots: %s", self._folder)
            if (command := self._command()) is not None:
                what = "the winner's lineage alone" if chosen.population else "the best configuration"
                log.info("%s: %s", what, command)
            self._check_failures()
        returned = [job_return(controller.returned[number]) for number in sorted(controller.returned)]
        return [returned[i : i + chosen.n_jobs] for i in range(0, len(returned), chosen.n_jobs)]

    def _open_study(self, chosen: SweeperSettings) -> "Study":
        """The study with all its trials, new or as it was left; and Hydra's multirun.yaml beside it."""
        from hydra_async_sweeper.study import Study

        plan, key = self._plan, "hydra.sweeper.storage" if chosen.storage else "hydra.sweep.dir"
        journal = Path(chosen.storage) if chosen.storage else self._folder / JOURNAL
        with _creating(key, journal):
            study = Study(journal, chosen.study_name, plan.space, chosen.directions, self._identity(chosen))
        write_atomically(self._folder / "multirun.yaml", OmegaConf.to_yaml(self._config))
        grid = combinations(plan.space)[: chosen.n_trials] if chosen.sampler == "grid" else []
        study.enqueue(len(grid) or chosen.n_trials or 0, grid)
        if chosen.n_trials is not None and study.count() > chosen.n_trials:
            log.warning(
                "hydra.sweeper.n_trials=%d: %d trials have begun already, and all of them count; type another "
                "hydra.sweeper.study_name=NAME for fewer", chosen.n_trials, study.count(),
            )  # fmt: skip
        return study

    def _identity(self, chosen: SweeperSettings) -> dict[str, Any]:
        """What makes this sweep another one if it changes."""
        base = OmegaConf.masked_copy(self._config, [str(key) for key in self._config if key != "hydra"])
        islands = chosen.islands._asdict() if chosen.sampler == "islands" else {}
        islands.pop("island_size", None)  # it stays as it was when the study was made
        return {
            "space": to_plain(self._plan.space),
            "config": _without(OmegaConf.to_container(base), self._task.free_keys), "objective": chosen.objective,
            "directions": chosen.directions, "sampler": chosen.sampler, "seed": chosen.seed, "islands": islands,
            **({"population": chosen.population._asdict()} if chosen.population else {}),
        }  # fmt: skip

    def overrides_of(self, trial: StartedTrial) -> list[str]:
        """The overrides of a trial."""
        overrides, population = self._plan.overrides(trial.params), self._chosen.population
        if population is None:
            return overrides
        assert self._task.segment is not None and self._folder_of is not None
        parent = None if trial.parent is None else self._folder_of(trial.parent).resolve()
        if parent is not None and not parent.is_dir():
            reason = f"is not there any more, and trial {trial.number} goes on from its checkpoint"
            raise FileNotFoundError(errno.ENOENT, reason, str(parent))
        round_ = trial.number // population.members
        return [*overrides, *self._task.segment(round_, population.rounds, parent, list(self._plan.space))]

    # What it leaves behind: tables after every trial, plots at the end, and the command of the best configuration

    def _ended(self) -> FinishedTrials:
        study, chosen = self._study, self._chosen
        return FinishedTrials(study.finished(), chosen.objective or ["value"], study.directions, chosen.lanes)

    def _record(self) -> None:
        folder_of = self._folder_of
        report.write_tables(
            self._folder, self._ended(), total=self._study.count(), command=self._command(),
            folder_of=lambda number: folder_of(number).name if folder_of else str(number),
        )  # fmt: skip

    def _draw(self) -> None:
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

    def _command(self) -> str | None:
        """The command that trains the best configuration; of several, the first. Of a population: that trains the
        winner's lineage alone, if this is not such a command."""
        best, chosen, task = self._ended().best(), self._chosen, self._task
        if not best or (chosen.population and chosen.population.schedule):
            return None
        if chosen.population:
            old = tuple(f"hydra.{key}=" for key in ("mode", "sweep.dir", "sweeper.replay", "sweeper.study_name"))
            hydra: Any = OmegaConf.to_container(self._config.hydra.overrides.hydra, resolve=False)
            kept = [text for text in hydra if not text.startswith(old)]
            new = [f"hydra.sweeper.replay={self._folder}", f"hydra.sweeper.study_name={chosen.study_name}_replay"]
            words = ["-m", *self._plan.arguments, *kept, *new]
        else:
            groups = tuple(f"{group}=" for group in task.groups_of_sweeps)
            fixed = [text for text, searched in self._plan.template if not searched and not text.startswith(groups)]
            words = [*fixed, *as_overrides(best[0].params), *task.best_run]
        return f"python {task.program} {shlex.join(words)}".rstrip()

    def _check_failures(self) -> None:
        """Raises TrialsFailedError if trials could not be started, or a larger share has failed than is allowed."""
        study, allowed = self._study, self._chosen.max_failure_rate
        if study.waiting():
            raise TrialsFailedError("no member of the latest round has a value, so none can go on")
        failed = [trial for trial in study.finished() if trial.outcome == FAILED]
        if len(failed) > allowed * study.count():
            reasons = "\n".join(f"  trial {trial.number}: {trial.failure}" for trial in failed[:5])
            raise TrialsFailedError(
                f"{len(failed)} of {study.count()} trials have failed, and "
                f"hydra.sweeper.max_failure_rate={allowed:g}:\n{reasons}"
            )


@contextmanager
def _creating(key: str, path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, which `key` names, a SpaceError, unless it is a fault of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FAULTS:
            raise
        reason = error.strerror or error
        raise SpaceError(f"{key}={path}: cannot be written: {reason}; type {key}=PATH, where you may write") from error


def _check_subdir(config: DictConfig) -> None:
    """Raises SpaceError if all trials would have one folder."""
    plain: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if "${" not in str(plain["subdir"]):
        raise SpaceError(
            f"hydra.sweep.subdir={plain['subdir']}: all trials would share this folder; leave it out, or type "
            "'hydra.sweep.subdir=${hydra:job.num}'"
        )


def _without(node: Any, keys: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """The nested mapping without the keys with these dotted names."""
    return {
        str(name): _without(value, keys, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in node.items()
        if f"{prefix}{name}" not in keys
    }
