"""Trains a meta-learner as its config says: `python train.py --help`.

Composes and checks the config, then runs it here, or starts the workers that do.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig

from metalearn import config as configs
from metalearn.errors import ConfigError, DataError, RunError
from metalearn.memory import keep_freed_memory
from metalearn.signals import STOPPED, StopSignal

if TYPE_CHECKING:  # torch is imported only once the keys and choices are known to be right
    import torch

    from distributed.work import Connect, Work
    from metalearn.checkpoint import Keeper
    from metalearn.logging import OpenLog
    from metalearn.optimizers import OuterOptimizer
    from metalearn.run_folder import Found
    from metalearn.trainer import Reduce, Settings
    from metalearn.types import Algorithm, Episode, Model, Params, TaskSource

OK, FAILED, BAD_CONFIG = 0, 1, 2
_OWN_RANK_SECONDS = 10.0

log = logging.getLogger("metalearn")


class Job(NamedTuple):
    """One run: its config, folder and experiment, the command that repeats it, and its number of workers."""

    config: DictConfig
    run_dir: Path
    experiment: str
    overrides: list[str]
    workers: int


class Parts(NamedTuple):
    """The components that the config describes; `start` is what the meta-parameters are at the outset."""

    settings: "Settings"
    source: "TaskSource"
    model: "Model"
    start: "Params"
    algorithm: "Algorithm"
    outer: "OuterOptimizer"
    reduce: "Reduce"
    connect: "Connect"
    keeper: "Keeper"
    open_log: "OpenLog"


# From the command line to a run


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    from hydra._internal.utils import get_args_parser

    arguments = get_args_parser().parse_args(argv)
    if arguments.help:
        print(configs.help_text())
        return OK
    plain = not (arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion)
    try:
        if arguments.multirun:
            _refuse_multirun_under_torchrun(arguments.overrides)
            configs.check_sweep(arguments.overrides)
            return run_by_hydra(sweep_job, sweep=True)
        composed = configs.compose_config(arguments.overrides)
        if not plain:
            return run_by_hydra(lambda config: OK, sweep=False)
        configs.check_top_level(composed.config)
        workers = configs.world_size(composed.config, " ".join(arguments.overrides))
        return run_job(Job(*composed, arguments.overrides, workers), in_sweep=False)
    except (ConfigError, DataError) as error:
        return complain(error, BAD_CONFIG)
    except RunError as error:
        return complain(error, FAILED)


def run_by_hydra(task: Any, *, sweep: bool) -> int:
    """Lets Hydra make the run folder and its `.hydra`, then call `task`; returns the task's exit code."""
    import hydra

    codes: list[int] = []

    def job(config: DictConfig) -> None:
        codes.append(task(config))
        if sweep and codes[-1] in STOPPED:
            raise SystemExit(codes[-1])  # ends the sweep, where an Exception would only fail this job
        if sweep and codes[-1] != OK:
            raise RuntimeError(f"the job ended with exit code {codes[-1]}")

    hydra.main(version_base="1.3", config_path="conf", config_name="config")(job)()
    return max(codes, default=OK)


def sweep_job(config: DictConfig) -> int:
    """One job of a multirun, in the folder that Hydra gave it."""
    from hydra.core.hydra_config import HydraConfig

    own = HydraConfig.get()
    folder = Path(own.runtime.output_dir)
    overrides = [*own.overrides.task, f"hydra.run.dir={configs.quoted(folder)}"]
    try:
        resolved = configs.resolved(config)
        configs.check_top_level(resolved)
        workers = configs.world_size(resolved, " ".join(overrides))
        return run_job(Job(resolved, folder, own.runtime.choices["experiment"], overrides, workers), in_sweep=True)
    except (ConfigError, DataError) as error:
        return complain(error, BAD_CONFIG)
    except RunError as error:
        return complain(error, FAILED)


def run_job(job: Job, *, in_sweep: bool) -> int:
    """Checks every value, then starts the workers, or runs as one of them."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(job.config.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer that leaves is told of by us, in words
    keep_freed_memory()

    from distributed import launch
    from metalearn import run_folder
    from metalearn.logging import log_to_terminal
    from metalearn.run_folder import announcement

    launch.die_with_parent()
    parts = assemble(job)
    log_to_terminal()
    leads = int(os.environ["RANK"]) == 0 if launch.launched() else job.config.launch.node_rank == 0
    if leads:
        found = run_folder.examine(job.run_dir, configs.to_container(job.config))
        if found.result is not None:
            print(announcement(job.run_dir, found.result))
            return OK
    elif run_folder.finished(job.run_dir, parts.settings.steps):
        return OK
    first_task(parts)
    if job.workers > 1 and not launch.launched():
        return start_workers(job)
    if not leads:
        return serve(job, parts)
    with run_folder.lock(job.run_dir):
        if in_sweep:
            return drive(job, parts, found)
        return run_by_hydra(lambda config: drive(job, parts, found), sweep=False)


def start_workers(job: Job) -> int:
    """Runs this program once a worker, on loopback, and waits."""
    from distributed.launch import Place, launch

    settings = job.config.launch
    place = Place(
        job.workers // settings.nnodes, settings.nnodes, settings.node_rank, settings.master_addr,
        settings.master_port, settings.interface,
    )  # fmt: skip
    command = [sys.executable, str(Path(__file__).resolve()), *job.overrides]
    return launch(command, place, max_restarts=settings.max_restarts, say=log.warning)


def assemble(job: Job) -> Parts:
    """Builds every component, which checks its values; starts and opens nothing.

    Raises:
        ConfigError: a value that a component refuses.
    """
    config = job.config
    check_device(config.device)
    model = configs.build(config, "model")
    algorithm = configs.build(config, "algorithm", model=model)
    partitioner = configs.build(config, "partitioner")
    return Parts(
        settings=configs.build(config, "trainer"),
        source=configs.build(config, "dataset"),
        model=model,
        start=initial_params(config, algorithm),
        algorithm=algorithm,
        outer=configs.build(config, "optimizer"),
        reduce=configs.build(config, "reducer"),
        connect=configs.build(config, "strategy", workers=job.workers, partitioner=partitioner),
        keeper=configs.build(config, "checkpoint")(job.run_dir),
        open_log=configs.build(config, "logger"),
    )


def initial_params(config: DictConfig, algorithm: "Algorithm") -> "Params":
    """The meta-parameters before the first step: drawn from the seed, or those of `init_from`.

    Raises:
        ConfigError: a checkpoint of another model.
    """
    import torch

    from metalearn.checkpoint import start_params

    dtype = getattr(torch, config.precision)
    drawn = algorithm.init(torch.Generator().manual_seed(config.seed))
    params = {name: value.to(dtype) for name, value in drawn.items()}
    return params if config.init_from is None else start_params(Path(config.init_from), params)


# Running


def drive(job: Job, parts: Parts, found: "Found") -> int:
    """Rank zero: trains, tests, writes everything."""
    from metalearn.logging import detach, log_to_file
    from metalearn.trainer import Stopped

    stop = StopSignal()
    handler = log_to_file(job.run_dir / "train.log")
    try:
        strategy = parts.connect(make_work(job, parts))
        try:
            code = train_and_test(job, parts, found, strategy, stop)
        except Stopped as stopped:
            log.info("%s", stopped)
            code = stop.exit_code
        except BaseException as error:
            strategy.close(failure=error)
            raise
        strategy.close()
        return code
    except (ConfigError, DataError, RunError, ConnectionError, TimeoutError) as error:
        return complain(error, FAILED)
    except Exception:
        log.exception("the run failed")
        return FAILED
    finally:
        detach(handler)


def serve(job: Job, parts: Parts) -> int:
    """The other ranks: compute what rank zero asks for, until it is done."""
    try:
        strategy = parts.connect(make_work(job, parts))
        # Rank zero is asked to stop by the same signals; it saves, then ends this rank too.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        strategy.close()
    except (RuntimeError, ConnectionError) as error:
        log.debug("%s", error)  # rank zero has said why
        return FAILED
    return OK


def train_and_test(job: Job, parts: Parts, found: "Found", strategy: Any, stop: "StopSignal") -> int:
    """Trains to the end, tests the best checkpoint, writes result and plots."""
    from metalearn.logging import Span
    from metalearn.run_folder import announcement, write_result
    from metalearn.trainer import Progress, Run, begin, chunk_size, evaluate, fit, restore

    config = configs.to_container(job.config)
    if found.snapshot is not None:
        learner, progress = restore(found.snapshot, parts.outer.start)
        log.info("going on after step %d", progress.step)
    else:
        learner, progress = begin(parts.start, parts.outer.start), Progress()

    chunk = chunk_size(parts.settings, parts.model, first_task(parts))
    run_log = parts.open_log(job.run_dir, Span(progress.step, parts.settings.steps, parts.settings.meta_batch_size))
    run = Run(
        parts.settings, strategy, parts.outer, parts.reduce, chunk, parts.keeper, run_log, config, lambda: stop.asked
    )
    log.info("%s: %d steps, %d workers, %d tasks a chunk", job.run_dir, parts.settings.steps, job.workers, chunk)
    try:
        progress = fit(run, learner, progress)
        best = parts.keeper.load("best").params
        test = evaluate(run, best, "test", parts.settings.test_tasks)
        run_log.evaluation(progress.step, "test", test)
        result = {
            "status": "completed", "experiment": job.experiment, "run": str(job.config.run),
            "seed": job.config.seed, "steps": progress.step, "seconds": round(progress.seconds, 3),
            "workers": job.workers, "val": progress.best, "test": test | {"transductive": parts.model.transductive},
        }  # fmt: skip
        settings = dict(configs.leaves(config))
        run_log.result(settings, {f"test/{k}": v for k, v in test.items() if isinstance(v, int | float)})
    finally:
        run_log.close()
    draw(job, parts, best)
    write_result(job.run_dir, result)
    print(announcement(job.run_dir, result))
    return OK


def first_task(parts: Parts) -> "Episode":
    """The first training task. Asking for it finds, verifies and decodes the data.

    Raises:
        DataError: data that is missing or damaged.
    """
    import torch

    return parts.source.episodes("train", torch.tensor([0]))


def draw(job: Job, parts: Parts, params: "Params") -> None:
    """The pictures of a completed run."""
    import torch

    from metalearn.plots import adaptation, learning_curve

    learning_curve(job.run_dir)
    episode = parts.source.episodes("test", torch.tensor([0]))
    if episode.query.y.is_floating_point() and episode.query.x.shape[2:] == (1,):
        single = {name: value.float() for name, value in params.items()}
        adaptation(job.run_dir, parts.algorithm.adapt, single, episode)


def make_work(job: Job, parts: Parts) -> "Work":
    """What this rank computes, on its device, in the precision asked for."""
    import torch

    from distributed.work import Work
    from metalearn.compute import chunk_functions

    dtype = getattr(torch, job.config.precision)
    return Work(*chunk_functions(parts.algorithm, parts.source, own_device(job.config.device), dtype))


def check_device(name: str) -> None:
    """Raises ConfigError where a GPU is asked for and there is none."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no GPU here; type device=auto or device=cpu")


def own_device(name: str) -> "torch.device":
    """This rank's device: with `auto` a GPU where there is one, shared out by local rank."""
    import torch

    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


# What is told


def complain(error: BaseException, code: int) -> int:
    """Says what is wrong, once for all ranks of a host; returns `code`."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"error: {error}{notes}", file=sys.stderr)
        log.debug("ended by %s: %s%s", type(error).__name__, error, notes)  # for train.log
    elif code == BAD_CONFIG:
        # torchrun ends all ranks with the first that fails: let it be the one that speaks.
        time.sleep(_OWN_RANK_SECONDS)
    return code


def _refuse_multirun_under_torchrun(overrides: Sequence[str]) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        workers = os.environ["WORLD_SIZE"]
        raise ConfigError(
            "a multirun cannot be started by torchrun: its jobs would mix. Type\n"
            f"  python train.py --multirun workers={workers} {' '.join(overrides)}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
