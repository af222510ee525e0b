"""A multirun: its jobs are checked before the first one starts; then Hydra's sweeper runs each as a trial."""

import os
import pkgutil
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metalearn.app import process
from metalearn.app.job import Job, Program, to_job
from metalearn.app.process import BAD_CONFIG, DISK, DIVERGED, FAILED, OK, exit_code_of
from metalearn.config.check import check_rank_variables, started_as_rank
from metalearn.config.compose import PROVIDER, compose_config, compose_sweeper, own_error, parsed, sweep_jobs
from metalearn.config.options import CONF, groups, search_flags
from metalearn.config.values import AUTO, FREE_KEYS, SEARCHED, experiment_of, quoted, run_name
from metalearn.errors import ConfigError, DataError, as_typed, printable
from metalearn.runs.signals import STOPPED
from metalearn.storage.files import is_disk_fault, read_json, unwritten

if TYPE_CHECKING:  # a grid of Hydra's own needs no sweeper of ours
    from hydra_async_sweeper.space import SweepPlan

ROOT = Path(__file__).resolve().parents[2]
OURS = "hydra_plugins.async_sweeper."  # where the sweepers are that search
LAUNCHERS = {  # of other packages, and what to install for them
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}

_DECIDING = ("trainer.steps", "trainer.patience", "pause_after", "resume", "resume_changes", "dataset.root")
"""Keys that may differ when a run goes on, but not among the trials of a sweep, which are compared."""

RunJob = Callable[[Job], int]


def preload() -> tuple[str, ...]:
    """What trials need, so that a trial that is forked from a process that has imported it starts at once."""
    return (
        "metalearn.app.evaluation", "metalearn.app.ranks", "metalearn.training.optimizers",
        "metalearn.algorithms.common.inner", "distributed.strategies.ddp", "distributed.strategies.rpc_autograd",
        "distributed.strategies.split", "matplotlib.figure", "torch.utils.tensorboard", "torchvision",
        *(
            module.name
            for package in ("algorithms", "models", "tasks")
            for module in pkgutil.iter_modules([str(ROOT / "metalearn" / package)], f"metalearn.{package}.")
        ),
    )  # fmt: skip


def run_sweep(program: Program, overrides: Sequence[str], run_job: RunJob) -> int:
    """Checks and runs a multirun; returns the exit code. Raises ConfigError for a job that is refused, a sweep that
    cannot be started, or a process that torchrun has started."""
    check_rank_variables()
    if started_as_rank():
        raise ConfigError(
            "a multirun cannot be started by torchrun: its jobs would mix. Type\n  "
            + as_typed(f"{program.name} --multirun workers={os.environ['WORLD_SIZE']} {' '.join(overrides)}")
        )
    _check_launcher(overrides)
    try:
        sweeper, folder = compose_sweeper(overrides)
    except ConfigError as error:
        if _has_plugin("async_sweeper"):
            raise
        raise ConfigError(
            f"{error}\nThe sweepers async and pbt are of the package hydra-async-sweeper, which is not installed; type "
            "pip install ./hydra_async_sweeper in the checkout of this program"
        ) from error
    if not str(sweeper.pop("_target_")).startswith(OURS):
        jobs = sweep_jobs(overrides)
        for typed in jobs:
            _assemble(program, typed)
        paths = [str(ROOT), sys.path[0], os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))  # for a launcher's Pythons
        searched = [override.get_key_element() for override in parsed(overrides) if override.is_sweep_override()]
        os.environ[SEARCHED] = ",".join([*(sweeper.get("params") or ()), *searched])
        places: list[Path] = []

        def run(config: DictConfig) -> int:
            job = job_of(config, program)
            places.append(job.run_dir)
            return run_job(job)

        code = run_grid_by_hydra(lambda config: exit_code_of(lambda: run(config)), folder)
        from metalearn.reporting.index import jobs_table  # imports torch, which the jobs have set up

        table = jobs_table(folder.resolve(), jobs, places)
        process.print_all(table or f"the runs are not in {folder} alone; metalearn index --help tells how to list them")
        return code
    checked = check_trials(program, overrides, sweeper)
    if isinstance(checked, int):
        return checked
    process.set_up_process(1)  # the process that imports torch and forks the trials inherits this
    process.log_sweep()

    def run_trial(config: DictConfig) -> dict[str, Any]:
        return trial(config, program, run_job)

    study = str(sweeper.get("study_name"))
    named = study not in ("sweep", "pbt") and re.fullmatch(r"[\w-]+", study)  # by the user, to keep several searches
    vars(run_trial).update(  # which the sweeper reads, as its `TaskTraits`
        objective=checked.objective,
        maximized=checked.maximized,
        preload=preload(),
        free_keys=[key for key in FREE_KEYS if key not in _DECIDING],
        program=as_typed(shlex.join([*program.name.split(), *search_flags()])),
        groups_of_sweeps=("sweep",),
        best_run=(f"run=best_{study}" if named else "run=best",),
        segment=partial(segment, checked.steps),
    )
    return by_hydra(run_trial)


def by_hydra(task: Callable[[DictConfig], Any]) -> int:
    """Lets Hydra call `task` with the config of each job, or print what `--cfg` and the like ask for; returns 0."""
    import hydra

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
    return OK


def run_grid_by_hydra(task: Callable[[DictConfig], int], sweep_dir: Path) -> int:
    """Lets one of Hydra's own sweepers call `task` for each job of a multirun; returns the largest exit code. A job
    that was stopped, or whose disk has failed, ends the multirun. Raises RunError if its folder cannot be written."""
    codes: list[int] = []
    controller = os.getpid()

    def job(config: DictConfig) -> None:
        codes.append(task(config))
        if codes[-1] in (*STOPPED, DISK):  # ends the sweep, where an Exception would only fail this job
            raise SystemExit(FAILED if codes[-1] == DISK else codes[-1])
        if codes[-1] != OK and os.getpid() != controller:  # only an error tells another process
            raise RuntimeError(f"the job ended with exit code {codes[-1]}")

    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors of Hydra's and of a task, in place of a print and an exit
    try:
        by_hydra(job)
    except HydraException as error:
        raise own_error(error) from error
    except OSError as error:  # of multirun.yaml; those of a job are its own
        if not is_disk_fault(error) and not isinstance(error, PermissionError | IsADirectoryError):
            raise
        raise unwritten(Path(os.fsdecode(error.filename or sweep_dir)), error) from error
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
    return max(codes, default=OK)


def _check_launcher(overrides: Sequence[str]) -> None:
    """Raises ConfigError if the launcher of the jobs is not installed, or this host is no part of its cluster."""
    name = next((text.partition("=")[2] for text in overrides if text.startswith("hydra/launcher=")), "")
    package = LAUNCHERS.get(name)
    if package is not None and not _has_plugin(package.replace("-", "_")):
        raise ConfigError(f"hydra/launcher={name}: is not installed; type pip install {package}")
    if name == "submitit_slurm" and shutil.which("srun") is None:
        raise ConfigError(
            "hydra/launcher=submitit_slurm: this host has no srun, so it is in no Slurm cluster; type the command "
            "on a host of the cluster, or hydra/launcher=submitit_local for jobs on this one"
        )


def _has_plugin(name: str) -> bool:
    """Whether Hydra finds this plugin; there may be no plugin at all."""
    with suppress(ModuleNotFoundError):
        return find_spec(f"hydra_plugins.{name}") is not None
    return False


def segment(steps: int, round_: int, rounds: int, parent: Path | None, keys: Sequence[str]) -> list[str]:
    """The overrides of a run that trains one of several rounds, from 0 on, as even as can be. It goes on from the
    checkpoint of the run folder `parent`, whose values of `keys` may differ; None: it begins."""
    first, last = steps * round_ // rounds, steps * (round_ + 1) // rounds
    overrides = [f"pause_after={last}"] if last < steps else []
    if parent is not None:
        checkpoint = parent / "checkpoints" / f"step_{first:06d}"
        overrides += [f"resume={quoted(checkpoint)}", f"resume_changes=[{','.join(keys)}]"]
    return overrides


def job_of(config: DictConfig, program: Program) -> Job:
    """The job of a multirun that Hydra has made this config and folder for. It draws only if told to."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    flags = [f"--config-dir={place.path}" for place in hydra.runtime.config_sources if place.provider == PROVIDER]
    overrides = [*flags, *hydra.overrides.task, f"hydra.run.dir={quoted(folder)}"]
    complete = config.copy()
    try:
        OmegaConf.resolve(complete)
    except OmegaConfBaseException as error:
        raise own_error(error) from error
    if complete.run == AUTO:  # the folder, which Hydra has made, says what else is changed
        complete.run = run_name(complete.seed, {})
    for key in ("logger.plots", "logger.report"):
        if not any(text.startswith(f"{key}=") for text in overrides):
            overrides.append(f"{key}=false")
            OmegaConf.update(complete, key, False)
    job = to_job(complete, folder, experiment_of(hydra.runtime.choices), None, program, overrides)
    return job._replace(in_sweep=True)


def trial(config: DictConfig, program: Program, run_job: RunJob) -> dict[str, Any]:
    """Runs one trial; what became of it: `status`, `exit` (code), `error`, and the fields of its result.json."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    code, error = process.ending_of(lambda: run_job(job_of(config, program)))
    result = read_json(folder / "result.json") if code in (OK, FAILED, DIVERGED) else {}
    if not error and code in (FAILED, DIVERGED):
        error = reason_in(folder / "train.log")
    statuses = {BAD_CONFIG: "refused", FAILED: "failed", DISK: "failed", **dict.fromkeys(STOPPED, "stopped")}
    status = statuses.get(code) or result.get("status", "failed")
    return {**result, "status": status, "exit": code, "error": error}


def reason_in(path: Path) -> str:
    """The last line of a log, without its time: what has ended a run whose ranks are other processes."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    last = next((line for line in reversed(lines) if line.strip()), "nothing is in its log")
    return printable(re.sub(r"^\S+ \S+\s+[A-Z]+\s+(ended by \w+: )?", "", last))


class Checked(NamedTuple):
    """What the check of trials has found: the default objective, a run's steps, the metrics to maximise."""

    objective: str
    steps: int
    maximized: list[str]


def check_trials(program: Program, overrides: Sequence[str], sweeper: Mapping[str, Any]) -> Checked | int:
    """Checks the search, then one option at a time and both ends of every number, in a child process: this one must not
    import torch. Returns the exit code if the child has refused a job, and has reported why. Raises ConfigError for an
    override that describes no space, or a key of the sweeper with a value that is not allowed."""
    # Here, since every run imports this file, and few are sweeps.
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    from hydra_async_sweeper.settings import settings_of
    from hydra_async_sweeper.space import SpaceError, plan_of

    searched = [override for override in overrides if not override.lstrip("+~").startswith(("hydra.", "hydra/"))]
    others = [override for override in overrides if override not in searched]
    try:
        plan = plan_of(searched, sweeper["params"], lambda group: groups().get(group, []))
        settings_of(sweeper, plan.space)
    except SpaceError as error:
        raise ConfigError(str(error)) from error
    sys.stdout.flush()
    sys.stderr.flush()
    with ProcessPoolExecutor(1, get_context("fork")) as child:
        try:
            checked: Checked | int = child.submit(_in_child, program, plan, others, sweeper).result()
        except BrokenProcessPool:
            checked = FAILED
    if isinstance(checked, int) and checked not in (BAD_CONFIG, DISK):
        raise ConfigError(f"the check of the trials has ended with exit code {checked}")
    return checked


def _in_child(program: Program, plan: "SweepPlan", others: Sequence[str], sweeper: Mapping[str, Any]) -> Checked | int:
    checked: list[Checked] = []

    def check() -> int:
        checked.append(_check(program, plan, others, sweeper))
        return OK

    try:
        code = exit_code_of(check)
    except Exception:
        traceback.print_exc()
        code = FAILED
    return checked[0] if checked else code


def _check(program: Program, plan: "SweepPlan", others: Sequence[str], sweeper: Mapping[str, Any]) -> Checked:
    from hydra_async_sweeper.space import ends_of

    in_rounds = "rounds" in sweeper
    metric, steps, shapes = "", 0, None
    # The first value of every dimension; then, one at a time, each other option or end.
    first = {key: ends_of(dimension)[0] for key, dimension in plan.space.items()}
    others_of = [first | {key: value} for key, dimension in plan.space.items() for value in ends_of(dimension)[1:]]
    for params in [first, *others_of]:
        searched = plan.overrides(params)
        try:
            config, parts = _assemble(program, [*others, *searched])
        except ConfigError as error:
            options = " ".join(f"{key}={option}" for key, option in params.items() if option in groups().get(key, ()))
            if not options:
                raise
            raise ConfigError(
                f"{error}; the search combines it with {options}: type keys that all its options have, or one search "
                "for each option"
            ) from error
        # These import torch, as `_assemble` has done.
        from metalearn.runs.metrics import ERRORS, METRIC_NAMES
        from metalearn.training.chunks import check_compatible

        if params == first or any(params[key] != first[key] for key in params if key in groups()):
            try:  # as a run does, so that not every trial fails there
                check_compatible(parts.algorithm, parts.model, parts.start, parts.source, parts.first_tasks())
            except DataError:  # another launcher may start the trials where the data are
                if not any(text.startswith("hydra/launcher=") for text in others):
                    raise
        loss, classes = parts.algorithm.computes, parts.source.classes("val")
        before, metric = metric, loss.metric if loss else "mse" if classes is None else "accuracy"
        decides = "loss" if parts.settings.best_by == "loss" else metric
        if before not in ("", metric) and decides == metric and sweeper["objective"] is None:
            raise ConfigError(
                f"hydra.sweeper.objective: val.{before} or val.{metric}? The metrics differ; type "
                "hydra.sweeper.objective=val.loss if the losses are alike, or one search for each"
            )
        _check_objective(sweeper["objective"], metric, in_rounds, sweeper.get("pruner", "none"))
        steps = parts.settings.steps
        before_shapes, shapes = shapes, {name: value.shape for name, value in parts.start.items()}
        if in_rounds and before_shapes not in (None, shapes):
            raise ConfigError(
                f"hydra/sweeper=pbt: {' '.join(searched)} gives the model other parameters, so it cannot "
                "take over a checkpoint; search for keys that leave the model's parameters as they are"
            )
    if in_rounds:
        _check_rounds(plan, config, sweeper["rounds"], steps)
    return Checked(f"val.{decides}", steps, [name for name in METRIC_NAMES if name not in ERRORS])


def _check_rounds(plan: "SweepPlan", config: DictConfig, rounds: int, steps: int) -> None:
    for key in ("trainer.patience", "pause_after"):
        if (value := OmegaConf.select(config, key)) is not None:
            raise ConfigError(f"{key}={value}: ends a member before its round; type {key}=null")
    for key in plan.space:
        if key in ("trainer.steps", "seed", *FREE_KEYS):
            raise ConfigError(f"{key}: all members of hydra/sweeper=pbt share it; type one value")
    if steps < rounds:
        advice = f"type hydra.sweeper.rounds={max(steps, 1)} or fewer"
        raise ConfigError(f"hydra.sweeper.rounds={rounds}: trainer.steps={steps} has not one step for each; {advice}")


def _check_objective(objective: Any, metric: str, in_rounds: bool, pruner: str) -> None:
    splits = ("val",) if in_rounds else ("val", "test")
    fields = [f"{split}.{name}" for split in splits for name in (metric, "loss", "ci95")]
    allowed = fields if in_rounds else [*fields, "seconds", "steps"]
    for name in [objective] if isinstance(objective, str) else objective or []:
        if name not in allowed:
            raise ConfigError(
                f"hydra.sweeper.objective={name}: result.json has no such number for this dataset; allowed: "
                f"{', '.join(allowed)}"
            )
        if pruner != "none" and "." not in name:
            raise ConfigError(
                f"hydra.sweeper.pruner={pruner}: compares validations, which have no {name}; type "
                f"hydra.sweeper.pruner=none, or hydra.sweeper.objective=val.{metric}"
            )


def _assemble(program: Program, overrides: Sequence[str]) -> tuple[DictConfig, Any]:
    """The config and the parts of a job."""
    job = to_job(*compose_config(overrides), program, overrides)
    process.set_up_process(job.config.threads)
    from metalearn.app.parts import assemble  # imports torch, after the line above

    return job.config, assemble(job)
