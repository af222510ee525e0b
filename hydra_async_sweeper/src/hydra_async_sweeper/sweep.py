"""A sweep from Hydra's command line to its last trial, and what it leaves behind."""

import errno
import logging
import os
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write

from hydra_async_sweeper import report
from hydra_async_sweeper.settings import JOURNAL, SweeperSettings, settings_of
from hydra_async_sweeper.slots import NurseryGoneError, TrialSlots, write_atomically
from hydra_async_sweeper.space import SpaceError, SweepPlan, combinations, plan_of, size, to_plain
from hydra_async_sweeper.trials import FAILED, PausedError, StartedTrial, StudyError

if TYPE_CHECKING:
    from hydra_async_sweeper.study import Study

log = logging.getLogger("hydra_async_sweeper")

SAME = "the same command"  # how messages name what resumes a sweep


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
    program: str = f"python {sys.argv[0]}"
    groups_of_sweeps: Sequence[str] = ()
    best_run: Sequence[str] = ()
    segment: Callable[[int, int, Path | None, Sequence[str]], list[str]] | None = None


def sweep(
    keys: Mapping[str, Any], arguments: Sequence[str], config: DictConfig, launcher: Launcher, loader: ConfigLoader,
    task_function: TaskFunction | None,
) -> list[list[JobReturn]]:  # fmt: skip
    """Runs a sweep as Hydra's sweeper `async` or `pbt`. Returns what the trials of this call have returned, in groups
    of `n_jobs`, in the order of their numbers. Raises SystemExit: 1 if the nursery was killed, a disk has failed, or
    more trials have failed than `max_failure_rate` allows; 2 if it cannot be started; 130 or 143 if it was stopped."""
    traits = {name: getattr(task_function, name) for name in TaskTraits._fields if hasattr(task_function, name)}
    task, folder, again = TaskTraits(**traits), Path(str(config.hydra.sweep.dir)), SAME
    try:
        plan = plan_of(arguments, keys["params"], lambda group: loader.get_group_options(group, ObjectType.CONFIG))
        settings = settings_of(keys, plan.space, task.objective, task.maximized)
        if settings.objective or (settings.n_trials or size(plan.space) or 1) > 1:
            plain: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
            if "${" not in str(plain["subdir"]):
                raise SpaceError(
                    f"hydra.sweep.subdir={plain['subdir']}: all trials would share this folder; leave it out, or type "
                    "'hydra.sweep.subdir=${hydra:job.num}'"
                )
        if (again := again_in(config, folder)) != SAME:
            log.info("each start makes a new folder; to resume this sweep, type %s", again)
        # Nothing must be imported before the fork that starts threads, as optuna's dependencies may.
        with _creating("hydra.sweep.dir", folder):
            slots = TrialSlots(
                partial(run_trial, launcher), folder / "logs",
                preload=[*task.preload, *settings.preload] if settings.warm else (), gpus=gpus_of(config),
            )  # fmt: skip
        with closing(slots):
            return SweepRun(plan, settings, task, config, folder).run(slots, again)
    except (SpaceError, StudyError) as error:
        message, code = f"error: {error}", 2
    except (NurseryGoneError, TrialsFailedError) as error:
        message, code = f"error: {error}", 1
    except PausedError as error:
        message, code = f"paused: {error}", 1
    except OSError as error:  # of the journal, or of another file of the sweep
        message, code = f"paused: {error}; make room or bring it back, and the same command goes on", 1
    print(message.replace(SAME, again), file=sys.stderr)
    raise SystemExit(code)


def again_in(config: DictConfig, folder: Path) -> str:
    """What to type to resume the sweep in this folder: where its name has the time of the start, as by default, the
    same command alone would begin another sweep."""
    dates = OmegaConf.get_cache(config).get("now", {}).values()  # what `${now:…}` has become
    fixed = any(text.startswith("hydra.sweep.dir=") and "${" not in text for text in config.hydra.overrides.hydra)
    dated = not fixed and any(date in str(folder) for date in dates)
    return f"{SAME} with {shlex.quote(f'hydra.sweep.dir={folder}')}" if dated else SAME


class SweepRun:
    """A sweep whose trials can be started: its study, its trials' overrides, and its records."""

    def __init__(
        self, plan: SweepPlan, settings: SweeperSettings, task: TaskTraits, config: DictConfig, folder: Path
    ) -> None:
        self._plan, self._task, self._config, self._folder = plan, task, config, folder
        self._folder_of = trial_folders(config, folder)
        if settings.population and task.segment is None:
            raise SpaceError("hydra/sweeper=pbt: this program cannot resume from another run's checkpoint; type "
                             "hydra/sweeper=async")  # fmt: skip
        if settings.population and self._folder_of is None:
            raise SpaceError("hydra.sweep.subdir: must follow from the trial's number alone; type "
                             "'hydra.sweep.subdir=${hydra:job.num}'")  # fmt: skip
        if settings.pruner != "none" and (self._folder_of is None or not settings.objective):
            raise SpaceError(
                f"hydra.sweeper.pruner={settings.pruner}: reads a field of metrics.jsonl in the folder of each trial, "
                "so it needs a hydra.sweeper.objective, and a hydra.sweep.subdir that follows from the trial's number "
                "alone; type them, or hydra.sweeper.pruner=none"
            )
        self._study = self._open_study(settings)
        # The law of exchanges must not change when the sweep resumes with other slots.
        island_size = self._study.keep("island_size", settings.islands.island_size)
        self._settings = settings._replace(islands=settings.islands._replace(island_size=island_size))

    def run(self, slots: TrialSlots, again: str) -> list[list[JobReturn]]:
        """Runs the trials, and writes the records; `again` is what to type to resume them. Raises TrialsFailedError if
        trials could not be started, or a larger share has failed than is allowed."""
        from hydra_async_sweeper.controller import PruningWatch, SweepController
        from hydra_async_sweeper.study import PRUNERS, search_of

        study, settings, folder_of = self._study, self._settings, self._folder_of
        with closing(study):
            watch = None
            if settings.pruner != "none":
                assert folder_of is not None and settings.objective
                metric = settings.objective[0].rpartition(".")[2]
                watch = PruningWatch(study, PRUNERS[settings.pruner](), folder_of, metric)
            controller = SweepController(
                study, slots, settings, overrides_of=self.overrides_of, search=search_of(study, settings), watch=watch,
                record=self._record, again=again,
            )  # fmt: skip
            stopped = controller.run()
            self._record()
            if stopped:
                raise SystemExit(128 + stopped)
            if settings.plots:
                self._draw()
            log.info("the trials, the best first:\n%s", report.text_table(study.ended(settings)))
            log.info("tables and plots: %s", self._folder)
            if (command := self._command()) is not None:
                log.info("the best configuration: %s", command)
            if study.waiting():
                raise TrialsFailedError("no member of the latest round has a value, so none can go on")
            failed, allowed = [t for t in study.finished() if t.outcome == FAILED], settings.max_failure_rate
            if len(failed) > allowed * study.count():
                reasons = "\n".join(f"  trial {trial.number}: {trial.failure}" for trial in failed[:5])
                raise TrialsFailedError(
                    f"{len(failed)} of {study.count()} trials have failed, and "
                    f"hydra.sweeper.max_failure_rate={allowed:g}:\n{reasons}"
                )
        returned = [job_return(outcome) for _, outcome in sorted(controller.returned.items())]
        return [returned[i : i + settings.n_jobs] for i in range(0, len(returned), settings.n_jobs)]

    def _open_study(self, settings: SweeperSettings) -> "Study":
        """The study with all its trials, new or as it was left; and Hydra's multirun.yaml beside it."""
        from hydra_async_sweeper.study import Study

        base = OmegaConf.masked_copy(self._config, [str(key) for key in self._config if key != "hydra"])
        islands = settings.islands._asdict() if settings.sampler == "islands" else {}
        islands.pop("island_size", None)  # it stays as it was when the study was made
        identity = {
            "space": to_plain(self._plan.space),
            "config": _without(OmegaConf.to_container(base, enum_to_str=True), self._task.free_keys),
            "objective": settings.objective, "directions": settings.directions, "sampler": settings.sampler,
            "seed": settings.seed, "islands": islands,
            **({"population": settings.population._asdict()} if settings.population else {}),
        }  # fmt: skip
        plan, key = self._plan, "hydra.sweeper.storage" if settings.storage else "hydra.sweep.dir"
        journal = Path(settings.storage) if settings.storage else self._folder / JOURNAL
        with _creating(key, journal):
            study = Study(journal, settings.study_name, plan.space, settings.directions, identity)
        write_atomically(self._folder / "multirun.yaml", OmegaConf.to_yaml(self._config))
        grid = combinations(plan.space)[: settings.n_trials] if settings.sampler == "grid" else []
        study.enqueue(len(grid) or settings.n_trials or 0, grid)
        if settings.n_trials is not None and study.count() > settings.n_trials:
            log.warning(
                "hydra.sweeper.n_trials=%d: %d trials have begun already, and all of them count; type another "
                "hydra.sweeper.study_name=NAME for fewer", settings.n_trials, study.count(),
            )  # fmt: skip
        return study

    def overrides_of(self, trial: StartedTrial) -> list[str]:
        """The overrides of a trial."""
        overrides, population = self._plan.overrides(trial.params), self._settings.population
        if population is None:
            return overrides
        assert self._task.segment is not None and self._folder_of is not None
        parent = None if trial.parent is None else self._folder_of(trial.parent).resolve()
        if parent is not None and not parent.is_dir():
            reason = f"is not there any more, and trial {trial.number} goes on from its checkpoint"
            raise FileNotFoundError(errno.ENOENT, reason, str(parent))
        round_ = trial.number // population.members
        return [*overrides, *self._task.segment(round_, population.rounds, parent, list(self._plan.space))]

    def _record(self) -> None:
        folder_of, ended = self._folder_of, self._study.ended(self._settings)
        report.write_tables(
            self._folder, ended, total=self._study.count(), command=self._command(),
            folder_of=lambda number: folder_of(number).name if folder_of else str(number),
        )  # fmt: skip

    def _draw(self) -> None:
        """The plots of a sweep that has ended, by a process of its own: Optuna draws by pyplot, which has a global
        state and may open windows. No plot is worth a sweep's results."""
        command = [sys.executable, "-P", "-m", "hydra_async_sweeper.report", str(self._folder), "--storage",
                   str(self._study.path), "--study-name", self._settings.study_name]  # fmt: skip
        env = os.environ | {"PYTHONPATH": import_path(), "MPLBACKEND": "Agg"}
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        if run.returncode or run.stderr:
            log.warning("not all plots could be drawn: %s", run.stderr.strip())

    def _command(self) -> str | None:
        """The command that trains the best configuration; of several, the first. None of a population, whose winner has
        several."""
        best, task = self._study.ended(self._settings).best(), self._task
        if not best or self._settings.population:
            return None
        groups = tuple(f"{group}=" for group in task.groups_of_sweeps)
        overrides = self._plan.overrides(best[0].params)  # in the order of the trial: a later one may count
        words = [*(text for text in overrides if not text.startswith(groups)), *task.best_run]
        return f"{task.program} {shlex.join(words)}".rstrip()


@contextmanager
def _creating(key: str, path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, which `key` names, a SpaceError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise SpaceError(f"{key}={path}: cannot be written: {reason}; type {key}=PATH, where you may write") from error


def _without(node: Any, keys: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """The nested mapping without the keys with these dotted names."""
    return {
        str(name): _without(value, keys, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in node.items()
        if f"{prefix}{name}" not in keys
    }


def trial_folders(config: DictConfig, folder: Path) -> Callable[[int], Path] | None:
    """From a trial's number to its folder; None where that depends on more than the number."""

    def folder_of(number: int) -> Path:
        numbered = config.copy()
        with read_write(numbered.hydra):
            numbered.hydra.job.num, numbered.hydra.job.override_dirname = number, ""
        singleton = HydraConfig.instance()
        before: Any = singleton.cfg
        singleton.cfg = numbered  # type: ignore[assignment]  # where `${hydra:…}` looks
        try:
            return folder / str(OmegaConf.select(numbered, "hydra.sweep.subdir", throw_on_missing=True))
        finally:
            singleton.cfg = before

    try:
        return folder_of if folder_of(0) != folder_of(1) else None
    except Exception:  # the interpolations of an application may fail in any way
        return None


def gpus_of(config: DictConfig) -> list[str]:
    """The GPUs that the slots of the basic launcher share out; CUDA is not asked, which would spoil later forks."""
    if not str(config.hydra.launcher._target_).endswith(".BasicLauncher"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def import_path() -> str:
    """The PYTHONPATH by which another Python finds the plugin and the program, too."""
    paths = [str(Path(__file__).resolve().parents[1]), sys.path[0], os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(dict.fromkeys(filter(None, paths)))


def run_trial(launcher: Launcher, number: int, overrides: Sequence[str]) -> dict[str, Any]:
    """In a trial's process: runs it by the launcher; what has become of it, as JSON can hold it."""
    os.environ["PYTHONPATH"] = import_path()  # for a Python that a launcher starts
    try:
        returned = launcher.launch([list(overrides)], initial_job_idx=number)[0]
    except (ConfigCompositionException, HydraException) as error:
        return {"status": "REFUSED", "error": str(error)}
    status, value, failure = returned.status.name, returned._return_value, ""
    if returned.status == JobStatus.FAILED:
        traceback.print_exception(value)  # only its text reaches the controller
        value, failure = None, f"{type(value).__name__}: {value}"
    configs = {
        key: None if config is None else OmegaConf.to_container(config, enum_to_str=True)
        for key, config in (("cfg", returned.cfg), ("hydra_cfg", returned.hydra_cfg))
    }
    return {
        "status": status, "value": value, "error": failure, "overrides": list(returned.overrides or ()), **configs,
        "working_dir": returned.working_dir, "task_name": returned.task_name,
    }  # fmt: skip


def job_return(outcome: Mapping[str, Any]) -> JobReturn:
    """What Hydra expects of a launcher."""
    if "overrides" not in outcome:  # its config was refused
        return JobReturn(status=JobStatus.FAILED)
    returned = JobReturn(
        overrides=outcome["overrides"], cfg=OmegaConf.create(outcome["cfg"]),
        hydra_cfg=OmegaConf.create(outcome["hydra_cfg"]), working_dir=outcome["working_dir"],
        task_name=outcome["task_name"], status=JobStatus[outcome["status"]],
    )  # fmt: skip
    returned.return_value = outcome["value"]
    return returned
