"""Trains a meta-learner as its config says: `python train.py --help`.

Composes and checks the config, then runs it here, or starts the workers that do.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from metalearn.config import compose as configs
from metalearn.config.build import build
from metalearn.config.help import help_text
from metalearn.errors import ConfigError, DataError, RunError
from metalearn.program.memory import keep_freed_memory
from metalearn.runs.signals import INTERRUPTED, STOPPED, StopSignal

if TYPE_CHECKING:  # torch is imported only once the keys and choices are known to be right
    import torch

    from distributed.strategies.common.work import Work
    from metalearn.program.run import Parts
    from metalearn.runs.folder import Found
    from metalearn.training.optimizers import OuterOptimizer
    from metalearn.types import Algorithm, Model, Params, Strategy, TaskSource

OK, FAILED, BAD_CONFIG = 0, 1, 2
_OWN_RANK_SECONDS = 10.0

log = logging.getLogger("metalearn")


# From the command line to a run


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    from hydra._internal.utils import get_args_parser

    arguments = get_args_parser().parse_args(argv)
    if arguments.help:
        print(help_text())
        return OK
    sys.argv = [sys.argv[0], *argv]  # where Hydra looks
    asks_hydra = arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion

    def run() -> int:
        if arguments.multirun:
            check_sweep(arguments.overrides)
            return run_by_hydra(sweep_job, sweep=True)
        composed = configs.compose_config(arguments.overrides)
        if asks_hydra:
            return run_by_hydra(lambda config: OK, sweep=False)
        return run_job(to_job(*composed, arguments.overrides), in_sweep=False)

    try:
        return exit_code_of(run)
    except KeyboardInterrupt:
        return INTERRUPTED


def exit_code_of(run: Callable[[], int]) -> int:
    """What `run` returns; or, if it raises one of the errors that need no traceback, says so and gives its code."""
    try:
        return run()
    except (ConfigError, DataError) as error:
        return complain(error, BAD_CONFIG)
    except RunError as error:
        return complain(error, FAILED)


def to_job(
    config: DictConfig, run_dir: Path, experiment: str, overrides: Sequence[str], program: str = "train.py"
) -> configs.Job:
    """The job that a composed config asks for.

    Raises:
        ConfigError: a value that is not allowed, of a key that belongs to no component.
    """
    configs.check_top_level(config)
    workers = configs.world_size(config, " ".join([program, *overrides]))
    configs.check_network(config)
    return configs.Job(config, run_dir, experiment, list(overrides), workers)


def check_sweep(overrides: Sequence[str]) -> None:
    """Checks every job of a multirun before the first is started.

    Raises:
        ConfigError: as for a single run; or torchrun has started this.
    """
    if configs.started_as_rank():
        raise ConfigError(
            "a multirun cannot be started by torchrun: its jobs would mix. Type\n"
            f"  python train.py --multirun workers={os.environ['WORLD_SIZE']} {' '.join(overrides)}"
        )
    for job_overrides in configs.sweep_jobs(overrides):
        job = to_job(*configs.compose_config(job_overrides), job_overrides)
        set_up_process(job.config.threads)
        assemble(job)


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
    experiment = own.runtime.choices["experiment"]
    return exit_code_of(lambda: run_job(to_job(configs.resolved(config), folder, experiment, overrides), in_sweep=True))


def set_up_process(threads: int) -> None:
    """What must be set before torch is imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer that leaves is told of by us, in words
    keep_freed_memory()


def run_job(job: configs.Job, *, in_sweep: bool) -> int:
    """Checks every value, then starts the workers, or runs as one of them."""
    set_up_process(job.config.threads)

    import torch

    from distributed.engine import launch
    from metalearn.nn.precision import compute_with
    from metalearn.program.run import first_tasks, follow
    from metalearn.runs import folder as run_folder
    from metalearn.runs.logging import log_to_terminal
    from metalearn.training.compatibility import check_fit

    torch.set_num_threads(job.config.threads)
    compute_with(job.config.precision)
    launch.die_with_parent()
    if job.config.launch.interface is not None:
        launch.use_interface(job.config.launch.interface)
    parts = assemble(job)
    log_to_terminal()
    config = configs.to_container(job.config)
    leads = int(os.environ["RANK"]) == 0 if configs.started_as_rank() else job.config.launch.node_rank == 0
    found = run_folder.examine(job.run_dir, config) if leads else None
    if found is not None and found.result is not None:
        print(run_folder.announcement(job.run_dir, found.result))
        return OK
    follows = found is None and not run_folder.goes_back(job.run_dir, config["resume"])
    if follows and run_folder.finished(job.run_dir, parts.settings.steps):
        return OK
    check_fit(parts.algorithm, parts.model, parts.start, parts.source, first_tasks(parts))
    if job.workers > 1 and not configs.started_as_rank():
        return start_workers(job, found)
    if not leads:
        return serve(parts, lambda strategy: follow(job, parts, strategy))
    with run_folder.lock(job.run_dir):
        found = run_folder.examine(job.run_dir, config)  # whoever held the folder may have gone on
        if in_sweep:
            return drive(job, parts, found)
        return run_by_hydra(lambda config: drive(job, parts, found), sweep=False)


def start_workers(job: configs.Job, found: "Found | None") -> int:
    """Runs this program once a worker, on loopback, and waits."""
    from metalearn.runs import checkpoint
    from metalearn.runs import folder as run_folder

    command = [sys.executable, str(Path(__file__).resolve()), *job.overrides]
    if found is not None:
        with run_folder.lock(job.run_dir):  # a folder in use is found here, before a worker is started
            if found.goes_back and found.snapshot is not None:
                checkpoint.rewind(job.run_dir, found.snapshot.meta["step"])
                command.append("resume=auto")  # go back once, not again at every restart
    return start_ranks(job, command, max_restarts=job.config.launch.max_restarts)


def start_ranks(job: configs.Job, command: list[str], *, max_restarts: int) -> int:
    """Runs a command once a worker of the job, and waits."""
    from distributed.engine.launch import CannotListenError, Place, launch

    settings = job.config.launch
    place = Place(
        job.workers // settings.nnodes, settings.nnodes, settings.node_rank, settings.master_addr,
        settings.master_port, settings.interface,
    )  # fmt: skip
    try:
        return launch(command, place, max_restarts=max_restarts, say=log.warning)
    except CannotListenError as error:
        raise ConfigError(f"{error}; type another launch.master_addr or launch.master_port") from error


def assemble(job: configs.Job) -> "Parts":
    """Builds every component, which checks its values; starts and opens nothing.

    Raises:
        ConfigError: a value that a component refuses.
    """
    from distributed.strategies.common.work import Plan
    from metalearn.program.run import Parts, check_sizes

    config = job.config
    check_device(config.device, config.precision)
    source = build(config, "dataset")
    model = build(config, "model")
    algorithm = build(config, "algorithm", model=model, inner=build(config, "inner"))
    outer = build(config, "optimizer")
    start = initial_params(config, algorithm)
    work = make_work(config, algorithm, model, source, start, outer)
    reduce = build(config, "reducer")
    plan = Plan(work, job.workers, build(config, "partitioner"), reduce)
    settings = build(config, "trainer")
    check_sizes(settings, source)
    return Parts(
        settings=settings,
        source=source,
        model=model,
        start=start,
        algorithm=algorithm,
        device=work.device,
        outer=outer,
        reduce=reduce,
        connect=build(config, "strategy", plan=plan),
        keeper=build(config, "checkpoint")(job.run_dir),
        open_log=build(config, "logger"),
    )


def initial_params(config: DictConfig, algorithm: "Algorithm") -> "Params":
    """The meta-parameters before the first step: drawn from the seed, or those of `init_from`.

    Raises:
        ConfigError: a checkpoint of another model.
    """
    import torch

    from metalearn.nn.precision import type_of
    from metalearn.runs.checkpoint import start_params

    dtype = type_of(config.precision)
    drawn = algorithm.init(torch.Generator().manual_seed(config.seed))
    params = {name: value.to(dtype) for name, value in drawn.items()}
    return params if config.init_from is None else start_params(Path(config.init_from), params)


# Running


def drive(job: configs.Job, parts: "Parts", found: "Found") -> int:
    """Rank zero: trains, tests, writes everything."""
    from metalearn.program.run import lead
    from metalearn.runs.folder import announcement
    from metalearn.runs.logging import detach, log_to_file
    from metalearn.training.loop import Stopped

    stop = StopSignal()
    handler = log_to_file(job.run_dir / "train.log")
    try:
        strategy = connect(parts)
        assert strategy.drives
        code = OK
        try:
            print(announcement(job.run_dir, lead(job, parts, found, strategy, lambda: stop.asked)))
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
        stop.forget()


def serve(parts: "Parts", along: "Callable[[Strategy], None]") -> int:
    """The other ranks: compute what rank zero asks for, or, where all drive, go `along` with it, until it is done."""
    from distributed.engine.session import StoppedByLeader
    from metalearn.training.loop import Stopped

    try:
        strategy = connect(parts)
        # Rank zero is asked to stop by the same signals; it saves, then ends this rank too.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if strategy.drives:
            along(strategy)
        strategy.close()
    except Stopped:
        return OK
    except (StoppedByLeader, RunError) as error:
        log.debug("%s", error)  # rank zero has said why
        return FAILED
    except (RuntimeError, ConnectionError) as error:
        print(f"error: worker{os.environ['RANK']}: {error}", file=sys.stderr)
        return FAILED
    return OK


def connect(parts: "Parts") -> "Strategy":
    """Joins this rank to its world, on its own device."""
    import torch

    if parts.device.type == "cuda":
        torch.cuda.set_device(parts.device)
    return parts.connect()


def make_work(
    config: DictConfig,
    algorithm: "Algorithm",
    model: "Model",
    source: "TaskSource",
    start: "Params",
    outer: "OuterOptimizer",
) -> "Work":
    """What this rank computes, on its device, in the precision asked for."""
    from distributed.strategies.common.work import Pieces, Work
    from metalearn.nn.precision import type_of
    from metalearn.training.chunks import chunk_functions, piece_functions, single_stages

    device, dtype = own_device(config.device), type_of(config.precision)
    pieces = None
    if model.stages and algorithm.judged_by == "samples":
        sizes = {name: value.numel() for name, value in start.items()}
        pieces = Pieces(single_stages(model), *piece_functions(model, source, device, dtype), outer.start, sizes)
    functions = chunk_functions(algorithm, source, device, dtype)
    return Work(*functions, device, plain=algorithm.learns_from == "samples", pieces=pieces)


def check_device(name: str, precision: str) -> None:
    """Raises ConfigError where a GPU, or what only a GPU can, is asked for and there is none."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no GPU here; type device=auto or device=cpu")
    if precision == "tf32" and own_device(name).type == "cpu":
        raise ConfigError("precision=tf32: is a mode of NVIDIA GPUs; type precision=float32, or precision=bf16")


def own_device(name: str) -> "torch.device":
    """This rank's device: with `auto` a GPU where there is one, shared out by local rank."""
    import torch

    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


# What is told


def complain(error: BaseException, code: int) -> int:
    """Says what is wrong, once for all ranks of a host; returns `code`."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"error: {error}{notes}", file=sys.stderr)
        log.debug("ended by %s: %s%s", type(error).__name__, error, notes)  # for train.log
    elif code == BAD_CONFIG:
        # torchrun ends all ranks with the first that fails: let rank zero of the host be the one that speaks.
        time.sleep(_OWN_RANK_SECONDS)
        print(f"error: worker{os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
