"""A sweep from Hydra's command line to its last trial."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write

from sweeps.settings import Settings, settings_of
from sweeps.slots import NurseryGoneError, Slots
from sweeps.space import Space, SpaceError, as_overrides, dimension_of, to_plain
from sweeps.terms import FAILED, Trial

if TYPE_CHECKING:
    from sweeps.study import Study

JOURNAL = "study.journal"

log = logging.getLogger("sweeps")


class Task(NamedTuple):
    """What a task function says of itself, by attributes of these names; all may be absent.

    `objective` is the field of the returned mapping that is searched for by default; `preload` the modules that its
    trials need; `free_keys` the keys that may differ when a sweep resumes; `program` the command that runs it; and
    `groups_of_sweeps` the config groups that say nothing about a single run. `segment(round, rounds, parent, keys)`
    gives the overrides of a trial that trains one of several rounds: from the checkpoint in the folder `parent`, if it
    is not None, with other values of `keys`.
    """

    objective: str | None
    preload: Sequence[str]
    free_keys: Sequence[str]
    program: str
    groups_of_sweeps: Sequence[str]
    segment: Callable[[int, int, Path | None, Sequence[str]], list[str]] | None

    @classmethod
    def of(cls, function: TaskFunction | None) -> "Task":
        get = partial(getattr, function)
        return cls(
            get("objective", None), get("preload", ()), get("free_keys", ()), get("program", sys.argv[0]),
            get("groups_of_sweeps", ()), get("segment", None),
        )  # fmt: skip


class Plan(NamedTuple):
    """The space, and the overrides of a trial: the fixed ones as they are, and the key where a parameter stands; and
    those of the command line."""

    space: Space
    template: list[tuple[str, bool]]
    arguments: list[str]

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """A trial's overrides, in the order of the command line."""
        chosen = dict(zip(params, as_overrides(params), strict=True))
        return [chosen[text] if searched else text for text, searched in self.template]


def plan_of(arguments: Sequence[str], params: Mapping[str, Any], options: Callable[[str], Sequence[str]]) -> Plan:
    """What the overrides on the command line, and those of `hydra.sweeper.params`, ask for.

    Args:
        arguments: overrides of the command line; they come before `params` of the same key.
        params: key → value or sweep, as text.
        options: from the name of a config group to its options.

    Raises:
        SpaceError: a sweep that describes no space.
    """
    parser = OverridesParser.create()
    given = parser.parse_overrides(list(arguments))
    own = {override.get_key_element() for override in given}
    more = parser.parse_overrides([f"{key}={value}" for key, value in params.items() if key not in own])
    space: Space = {}
    template: list[tuple[str, bool]] = []
    for override in (*more, *given):
        key = override.get_key_element()
        if override.is_sweep_override():
            space[key] = dimension_of(override, options)
            template.append((key, True))
        else:
            template.append((str(override.input_line), False))
    return Plan(space, template, list(arguments))


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
        SystemExit: 1 if the nursery was killed, 2 if the sweep cannot be started, 130 or 143 if it was stopped.
        HydraException: more trials have failed than `max_failure_rate` allows.
    """
    task = Task.of(task_function)
    try:
        plan = plan_of(arguments, settings["params"], partial(_options, loader))
        chosen = settings_of(settings, plan.space, task.objective)
        folder = Path(str(config.hydra.sweep.dir))
        # Nothing must be imported before the fork that starts threads, as optuna's dependencies may.
        slots = Slots(
            partial(_run_trial, launcher), folder / "logs",
            preload=[*task.preload, *chosen.preload] if chosen.warm else (), gpus=_gpus(config),
        )  # fmt: skip
        with closing(slots):
            return _run(plan, chosen, task, config, folder, slots)
    except SpaceError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except NurseryGoneError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _run(
    plan: Plan, chosen: Settings, task: Task, config: DictConfig, folder: Path, slots: Slots
) -> list[list[JobReturn]]:
    """The sweep, once its trials can be started."""
    from sweeps.controller import Controller, Limits
    from sweeps.pruning import Watch
    from sweeps.records import Records
    from sweeps.report import View
    from sweeps.samplers import pruner_of, search_of

    folder_of = _trial_folders(config, folder)
    overrides_of = _overrides_of(plan, chosen, task, folder_of)
    study = _open_study(plan, chosen, task, config, folder)
    with closing(study):
        # The law of exchanges must not change when the sweep resumes with other slots.
        island_size = study.keep("island_size", chosen.islands.island_size)
        chosen = chosen._replace(islands=chosen.islands._replace(island_size=island_size))
        names = chosen.objective or ["value"]
        view = View(study.count(), names, chosen.directions, chosen.n_jobs, study.finished(), lanes=chosen.lanes)
        records = Records(
            study, plan, chosen, task, folder, names, lambda n: folder_of(n).name if folder_of else str(n),
            _texts(config.hydra.overrides.hydra),
        )  # fmt: skip
        watch = None
        if folder_of is not None and chosen.objective:
            metric = chosen.objective[0].rpartition(".")[2]
            watch = Watch(study, pruner_of(chosen.pruner), folder_of, metric, view.progress)
        controller = Controller(
            study, slots, overrides_of=overrides_of, search=search_of(study, chosen), objective=chosen.objective,
            limits=Limits(chosen.n_jobs, chosen.max_retries, chosen.sampler != "grid"), watch=watch, view=view,
            record=records.write,
        )  # fmt: skip
        try:
            stopped = controller.run()
        finally:
            view.close()
        records.write()
        if stopped:
            raise SystemExit(128 + stopped)
        records.draw()
        records.announce()
        _check_failures(study, chosen.max_failure_rate)
    returned = [_job_return(controller.returned[number]) for number in sorted(controller.returned)]
    return [returned[i : i + chosen.n_jobs] for i in range(0, len(returned), chosen.n_jobs)]


def _overrides_of(
    plan: Plan, chosen: Settings, task: Task, folder_of: Callable[[int], Path] | None
) -> Callable[[Trial], list[str]]:
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

    def overrides(trial: Trial) -> list[str]:
        parent = None if trial.parent is None else folder_of(trial.parent).resolve()
        round_ = trial.number // population.members
        return [*plan.overrides(trial.params), *segment(round_, population.rounds, parent, keys)]

    return overrides


def _open_study(plan: Plan, chosen: Settings, task: Task, config: DictConfig, folder: Path) -> "Study":
    """The study with all its trials, new or as it was left; and Hydra's multirun.yaml beside it.

    Raises:
        SpaceError: another process holds it, or it belongs to another sweep.
    """
    from sweeps.samplers import combinations
    from sweeps.study import Study, StudyError

    journal = Path(chosen.storage) if chosen.storage else folder / JOURNAL
    try:
        study = Study(journal, chosen.study_name, plan.space, chosen.directions, _identity(plan, chosen, task, config))
    except StudyError as error:
        raise SpaceError(str(error)) from error
    (folder / "multirun.yaml").write_text(OmegaConf.to_yaml(config))
    if chosen.sampler == "grid":
        study.enqueue_grid(combinations(plan.space)[: chosen.n_trials])
    else:
        study.enqueue(chosen.n_trials or 0)
    return study


def _check_failures(study: "Study", allowed: float) -> None:
    """Raises HydraException if trials could not be started, or a larger share has failed than is allowed."""
    if study.waiting():
        raise HydraException("no member of the latest round has a value, so none can go on")
    failed = [trial for trial in study.finished() if trial.outcome == FAILED]
    if len(failed) > allowed * study.count():
        reasons = "\n".join(f"  trial {trial.number}: {trial.failure}" for trial in failed[:5])
        raise HydraException(
            f"{len(failed)} of {study.count()} trials have failed, and hydra.sweeper.max_failure_rate={allowed:g}:\n"
            f"{reasons}"
        )


def _identity(plan: Plan, chosen: Settings, task: Task, config: DictConfig) -> dict[str, Any]:
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


def _trial_folders(config: DictConfig, folder: Path) -> Callable[[int], Path] | None:
    """From a trial's number to its folder; None where that depends on more than the number."""

    def folder_of(number: int) -> Path:
        own = config.copy()
        with read_write(own.hydra):
            own.hydra.job.num, own.hydra.job.override_dirname = number, ""
        singleton = HydraConfig.instance()
        before: Any = singleton.cfg
        singleton.cfg = own  # type: ignore[assignment]  # where `${hydra:…}` looks
        try:
            return folder / str(OmegaConf.select(own, "hydra.sweep.subdir", throw_on_missing=True))
        finally:
            singleton.cfg = before

    try:
        return folder_of if folder_of(0) != folder_of(1) else None
    except Exception:  # the interpolations of an application may fail in any way
        return None


def _gpus(config: DictConfig) -> int:
    """GPUs that the slots of the basic launcher share out; found without asking CUDA, which would spoil later forks."""
    own_host = str(config.hydra.launcher._target_).endswith(".BasicLauncher")
    if not own_host or "CUDA_VISIBLE_DEVICES" in os.environ:
        return 0
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


# One trial


def _run_trial(launcher: Launcher, number: int, overrides: Sequence[str]) -> dict[str, Any]:
    """In a trial's process: runs it by the launcher; what has become of it, as JSON can hold it."""
    # A launcher may start a Python of its own, which must find the program and the plugin, too.
    paths = [str(Path(__file__).resolve().parents[1]), sys.path[0], os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    try:
        returned = launcher.launch([list(overrides)], initial_job_idx=number)[0]
    except (ConfigCompositionException, HydraException) as error:
        return {"status": "REFUSED", "error": str(error)}
    value, failure = returned._return_value, ""
    if returned.status == JobStatus.FAILED:
        value, failure = None, f"{type(value).__name__}: {value}"
    return {
        "status": returned.status.name,
        "value": value,
        "error": failure,
        "overrides": list(returned.overrides or ()),
        "cfg": _plain(returned.cfg),
        "hydra_cfg": _plain(returned.hydra_cfg),
        "working_dir": returned.working_dir,
        "task_name": returned.task_name,
    }


def _plain(config: DictConfig | None) -> Any:
    return None if config is None else OmegaConf.to_container(config, enum_to_str=True)


def _job_return(outcome: Mapping[str, Any] | None) -> JobReturn:
    """What Hydra expects of a launcher."""
    if outcome is None or "overrides" not in outcome:
        return JobReturn(status=JobStatus.FAILED)
    returned = JobReturn(
        overrides=outcome["overrides"], cfg=OmegaConf.create(outcome["cfg"]),
        hydra_cfg=OmegaConf.create(outcome["hydra_cfg"]), working_dir=outcome["working_dir"],
        task_name=outcome["task_name"], status=JobStatus[outcome["status"]],
    )  # fmt: skip
    returned.return_value = outcome["value"]
    return returned
