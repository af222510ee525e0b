"""A sweep from Hydra's command line to its last trial."""

import errno
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf

from hydra_async_sweeper.disk import ADVICE, PausedError, fault_at, fault_in, line_of, refuse_links, write_atomically
from hydra_async_sweeper.plan import SweepPlan, TaskTraits, plan_of
from hydra_async_sweeper.settings import JOURNAL, SweeperSettings, settings_of
from hydra_async_sweeper.slots import NurseryGoneError, TrialSlots
from hydra_async_sweeper.space import SpaceError, size, to_plain
from hydra_async_sweeper.terms import FAILED, FinishedTrial, StartedTrial, StudyError, printable
from hydra_async_sweeper.trial import gpus_of, job_return, run_trial, trial_folders

if TYPE_CHECKING:
    from hydra_async_sweeper.study import Study

log = logging.getLogger("hydra_async_sweeper")


class TrialsFailedError(RuntimeError):
    """More trials have failed than are allowed."""


def sweep(
    *,
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
        SystemExit: 1 if the nursery was killed, a disk has failed, the journal cannot be read any more, or more trials
            have failed than `max_failure_rate` allows; 2 if the sweep cannot be started; 130 or 143 if it was stopped.
    """
    task, folder = TaskTraits.of(task_function), Path(str(config.hydra.sweep.dir))
    try:
        plan = plan_of(arguments, settings["params"], partial(_options, loader))
        chosen = settings_of(settings, plan.space, task.objective, task.maximized)
        if chosen.objective or (chosen.n_trials or size(plan.space) or 1) > 1:
            _check_subdir(config)
        refuse_links([folder / "logs", folder / "plots"])
        # Nothing must be imported before the fork that starts threads, as optuna's dependencies may.
        with _creating("hydra.sweep.dir", folder):
            slots = TrialSlots(
                partial(run_trial, launcher), folder / "logs",
                preload=[*task.preload, *chosen.preload] if chosen.warm else (), gpus=gpus_of(config),
            )  # fmt: skip
        with closing(slots):
            return _run(plan, chosen, task, config, folder, slots)
    except SpaceError as error:
        _leave(f"error: {error}", 2, error)
    except (NurseryGoneError, StudyError, TrialsFailedError) as error:
        _leave(f"error: {error}", 1, error)
    except PausedError as error:
        _leave(f"paused: {error}", 1, error)
    except OSError as error:  # of the journal, or of another file of the sweep
        _leave(f"paused: {line_of(fault_in(error) or fault_at([folder]) or error, folder)}", 1, error)


def _leave(message: str, code: int, error: Exception) -> NoReturn:
    print(printable(message), file=sys.stderr)
    raise SystemExit(code) from error


def _run(
    plan: SweepPlan, chosen: SweeperSettings, task: TaskTraits, config: DictConfig, folder: Path, slots: TrialSlots
) -> list[list[JobReturn]]:
    """The sweep, once its trials can be started."""
    from hydra_async_sweeper.controller import SweepController, TrialLimits
    from hydra_async_sweeper.pruning import PruningWatch
    from hydra_async_sweeper.records import SweepRecords
    from hydra_async_sweeper.report import SweepView
    from hydra_async_sweeper.samplers import pruner_of, search_of

    folder_of = trial_folders(config, folder)
    overrides_of = _overrides_of(plan, chosen, task, folder_of)

    if chosen.pruner != "none" and (folder_of is None or not chosen.objective):
        raise SpaceError(
            f"hydra.sweeper.pruner={chosen.pruner}: reads a field of metrics.jsonl in the folder of each trial, so it "
            "needs a hydra.sweeper.objective, and a hydra.sweep.subdir that follows from the trial's number alone; "
            "type them, or hydra.sweeper.pruner=none"
        )

    def start_with(trial: StartedTrial) -> list[str]:
        if folder_of is not None:
            refuse_links(_written_in(folder, folder_of(trial.number)))
        return overrides_of(trial)

    study = _open_study(plan, chosen, task, config, folder)
    with closing(study):
        # The law of exchanges must not change when the sweep resumes with other slots.
        island_size = study.keep("island_size", chosen.islands.island_size)
        chosen = chosen._replace(islands=chosen.islands._replace(island_size=island_size))
        names = chosen.objective or ["value"]
        view = SweepView(study.count(), names, chosen.directions, chosen.n_jobs, study.finished(), lanes=chosen.lanes)
        records = SweepRecords(
            study, plan, chosen, task, folder, names, lambda n: folder_of(n).name if folder_of else str(n),
            _texts(config.hydra.overrides.hydra),
        )  # fmt: skip
        if folder_of is not None:
            _name_missing(study.finished(), folder_of)
        watch = None
        if folder_of is not None and chosen.objective:
            metric = chosen.objective[0].rpartition(".")[2]
            watch = PruningWatch(study, pruner_of(chosen.pruner), folder_of, metric, view.progress)
        controller = SweepController(
            study, slots, overrides_of=start_with, search=search_of(study, chosen), objective=chosen.objective,
            limits=TrialLimits(chosen.n_jobs, chosen.max_retries, chosen.sampler != "grid"), watch=watch, view=view,
            record=records.write,
        )  # fmt: skip
        try:
            stopped = controller.run()
        finally:
            view.close()
        records.write()
        if stopped:
            raise SystemExit(128 + stopped)
        if chosen.plots:
            records.draw()
        records.announce()
        _check_failures(study, chosen.max_failure_rate)
    returned = [job_return(controller.returned[number]) for number in sorted(controller.returned)]
    return [returned[i : i + chosen.n_jobs] for i in range(0, len(returned), chosen.n_jobs)]


def _overrides_of(
    plan: SweepPlan, chosen: SweeperSettings, task: TaskTraits, folder_of: Callable[[int], Path] | None
) -> Callable[[StartedTrial], list[str]]:
    """From a trial to its overrides.

    Raises:
        SpaceError: the search needs checkpoints, and the program has none, or the trials have no folders of their own.
    """
    population = chosen.population
    if population is None:
        return lambda trial: plan.overrides(trial.params)
    segment, keys = task.segment, list(plan.space)
    if segment is None:
        raise SpaceError("hydra/sweeper=pbt: this program cannot resume from another run's checkpoint; type "
                         "hydra/sweeper=async")  # fmt: skip
    if folder_of is None:
        raise SpaceError("hydra.sweep.subdir: must follow from the trial's number alone; type "
                         "'hydra.sweep.subdir=${hydra:job.num}'")  # fmt: skip

    def overrides(trial: StartedTrial) -> list[str]:
        parent = None if trial.parent is None else folder_of(trial.parent).resolve()
        if parent is not None and not parent.is_dir():
            reason = f"is not there any more, and trial {trial.number} goes on from its checkpoint"
            raise FileNotFoundError(errno.ENOENT, reason, str(parent))
        round_ = trial.number // population.members
        return [*plan.overrides(trial.params), *segment(round_, population.rounds, parent, keys)]

    return overrides


def _open_study(
    plan: SweepPlan, chosen: SweeperSettings, task: TaskTraits, config: DictConfig, folder: Path
) -> "Study":
    """The study with all its trials, new or as it was left; and Hydra's multirun.yaml beside it.

    Raises:
        SpaceError: another process holds it, or it belongs to another sweep.
    """
    from hydra_async_sweeper.samplers import combinations
    from hydra_async_sweeper.study import Study

    journal = Path(chosen.storage) if chosen.storage else folder / JOURNAL
    try:
        with _creating("hydra.sweeper.storage" if chosen.storage else "hydra.sweep.dir", journal):
            study = Study(
                journal, chosen.study_name, plan.space, chosen.directions, _identity(plan, chosen, task, config)
            )
    except StudyError as error:
        raise SpaceError(str(error)) from error
    write_atomically(folder / "multirun.yaml", OmegaConf.to_yaml(config))
    if chosen.sampler == "grid":
        study.enqueue_grid(combinations(plan.space)[: chosen.n_trials])
    else:
        study.enqueue(chosen.n_trials or 0)
    if chosen.n_trials is not None and study.count() > chosen.n_trials:
        log.warning(
            "hydra.sweeper.n_trials=%d: %d trials have begun already, and all of them count; type another "
            "hydra.sweeper.study_name=NAME for fewer", chosen.n_trials, study.count(),
        )  # fmt: skip
    return study


@contextmanager
def _creating(key: str, path: Path) -> Iterator[None]:
    """Makes a failure to write `path`, which `key` names, a SpaceError, unless it is a fault of the disk."""
    try:
        yield
    except OSError as error:
        if error.errno in ADVICE:
            raise
        reason = error.strerror or error
        raise SpaceError(f"{key}={path}: cannot be written: {reason}; type {key}=PATH, where you may write") from error


def _written_in(folder: Path, trial: Path) -> list[Path]:
    """The folder of a trial, those above it in the sweep's, and what Hydra writes into it: links may stand there."""
    above = [path for path in trial.parents if folder in path.parents]
    return [*above, trial, *trial.glob(".hydra"), *trial.glob(".hydra/*"), *trial.glob("*.log")]


def _name_missing(finished: Sequence[FinishedTrial], folder_of: Callable[[int], Path]) -> None:
    """Logs which trials have ended with a value and have no folder any more. Their values are in the journal."""
    own = [trial.number for trial in finished if trial.values is not None and trial.same_as is None]
    missing = [number for number in own if not folder_of(number).is_dir()]
    if missing:
        log.warning(
            "%s: %d of the trials that have ended have no folder any more, such as trial %d; their values stand, and "
            "they are not run again", folder_of(missing[0]), len(missing), missing[0],
        )  # fmt: skip


def _check_subdir(config: DictConfig) -> None:
    """Raises SpaceError if all trials would have one folder."""
    plain: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    subdir = str(plain["subdir"])
    if "${" not in subdir:
        raise SpaceError(
            f"hydra.sweep.subdir={subdir}: all trials would share this folder; leave it out, or type "
            "'hydra.sweep.subdir=${hydra:job.num}'"
        )


def _check_failures(study: "Study", allowed: float) -> None:
    """Raises TrialsFailedError if trials could not be started, or a larger share has failed than is allowed."""
    if study.waiting():
        raise TrialsFailedError("no member of the latest round has a value, so none can go on")
    failed = [trial for trial in study.finished() if trial.outcome == FAILED]
    if len(failed) > allowed * study.count():
        reasons = "\n".join(f"  trial {trial.number}: {trial.failure}" for trial in failed[:5])
        raise TrialsFailedError(
            f"{len(failed)} of {study.count()} trials have failed, and hydra.sweeper.max_failure_rate={allowed:g}:\n"
            f"{reasons}"
        )


def _identity(plan: SweepPlan, chosen: SweeperSettings, task: TaskTraits, config: DictConfig) -> dict[str, Any]:
    """What makes this sweep another one if it changes."""
    base: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
    islands = chosen.islands._asdict() if chosen.sampler == "islands" else {}
    islands.pop("island_size", None)  # it stays as it was when the study was made
    population = {} if chosen.population is None else chosen.population._asdict()
    return {
        "space": to_plain(plan.space), "config": _without(base, task.free_keys), "objective": chosen.objective,
        "directions": chosen.directions, "sampler": chosen.sampler, "seed": chosen.seed, "islands": islands,
        **({"population": population} if population else {}),
    }  # fmt: skip


def _texts(node: ListConfig) -> list[str]:
    """The texts of a list, with their interpolations as they are."""
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return [str(text) for text in plain]


def _without(node: Mapping[str, Any], keys: Sequence[str], prefix: str = "") -> dict[str, Any]:
    kept = {}
    for name, value in node.items():
        path = f"{prefix}{name}"
        if path not in keys:
            kept[str(name)] = _without(value, keys, f"{path}.") if isinstance(value, Mapping) else value
    return kept


def _options(loader: ConfigLoader, group: str) -> list[str]:
    return loader.get_group_options(group, ObjectType.CONFIG)
