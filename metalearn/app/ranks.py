"""What each rank of a job does: the launcher starts them, rank zero leads, the others serve it."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from distributed.cluster import on_ray
from distributed.cluster.ending import StoppedByLeader, wish_to_leave
from distributed.cluster.info import get_world_info
from distributed.cluster.isolation import CannotIsolateError
from distributed.cluster.launch import CannotListenError, LaunchConfig, check_isolation, launch
from distributed.cluster.meeting import JOINS
from metalearn.app.job import Job
from metalearn.app.outcome import DIVERGED, FAILED, OK, report_error
from metalearn.app.parts import Parts, connect
from metalearn.app.process import has_one_thread, run_in_fork
from metalearn.app.run import DONE, result_of, train_and_test
from metalearn.app.world_file import comes_and_goes, published
from metalearn.config.check import computes_elsewhere, on_several_hosts, started_as_rank, started_by_launcher
from metalearn.errors import ConfigError, DataError, DivergedError, RunError
from metalearn.reporting.logging import detach, log_to_file, log_to_terminal
from metalearn.runs import checkpoint, folder
from metalearn.runs.folder import FolderState
from metalearn.runs.signals import Interrupted, Stops, StopSignal
from metalearn.training.loop import Paused, Progress, Stopped
from metalearn.types import Strategy

HANDED_ON = ("METALEARN_", "WANDB_", "MLFLOW_", "NCCL_", "PYTHONPATH")
"""How the names of those environment variables begin that ranks on other hosts get from here."""

log = logging.getLogger("metalearn")


def leads(job: Job) -> bool:
    """Whether this process is rank zero, or the launcher on its host."""
    return int(os.environ["RANK"]) == 0 if started_as_rank() else job.config.launch.node_rank == 0


def to_be_started(job: Job) -> bool:
    """Whether this process only starts the ranks: several, or a single one that must be isolated, or be elsewhere."""
    alone = job.workers == 1 and job.config.launch.isolate is not True and not computes_elsewhere(job.config)
    return not started_as_rank() and not alone


def ask_rank_zero(job: Job) -> bool:
    """Whether only rank zero can tell that nothing is left to do: other hosts may not see the run folder."""
    return on_several_hosts(job.config) and JOINS not in os.environ


def start_workers(job: Job, state: FolderState | None) -> int:
    """Runs this program once for each worker and waits; `state` is None where rank zero is on another host."""
    arguments = list(job.arguments)
    with _refusals():  # before the run folder is made or changed
        if computes_elsewhere(job.config):
            on_ray.check(_ray_cluster(job), job.workers)
        else:
            check_isolation(_launch_config(job))
    if state is not None:
        with folder.lock(job.run_dir, wait=job.in_sweep):  # reports a folder in use before any worker is started
            if state.rewinds and state.snapshot is not None:
                checkpoint.rewind(job.run_dir, state.snapshot.meta["step"])
                arguments += ["resume=auto", "resume_changes=[]"]  # rewind once, not again at every restart
        if job.config.resume == "never":
            arguments.append("resume=auto")  # it is the start that finds an empty folder, not a restart
    else:
        log_to_terminal(logging.WARNING)  # what has become of this host's ranks
    return start_ranks(job, arguments, max_restarts=job.config.launch.max_restarts)


def start_ranks(job: Job, arguments: Sequence[str], *, max_restarts: int) -> int:
    """Runs the job's program with these arguments once for each worker of the job, and waits."""
    program = [*job.program.arguments, *arguments]
    config = _launch_config(job)
    with _refusals():
        if computes_elsewhere(job.config):
            command = on_ray.Command(program, os.getcwd(), _own_variables())  # noqa: PTH109
            return on_ray.launch(command, config, _ray_cluster(job), max_restarts=max_restarts, say=log.warning)
        gpus = torch.cuda.device_count()
        check_gpus(job.config.device, config.workers, gpus)
        fork = job.fork if gpus == 0 and has_one_thread() else None
        run = [sys.executable, *program] if fork is None else partial(run_in_fork, fork, arguments)
        return launch(run, config, max_restarts=max_restarts, say=log.warning)


def check_gpus(device: str, workers: int, gpus: int) -> None:
    """Raises ConfigError for `device=cuda` where a host has fewer GPUs than workers. With `auto` they share them."""
    if device == "cuda" and gpus < workers:
        raise ConfigError(
            f"device=cuda: this host has {gpus} GPUs for {workers} workers; type workers={gpus or 1} for each host, or "
            "device=auto to let workers share a GPU"
        )


def _launch_config(job: Job) -> LaunchConfig:
    settings = job.config.launch
    return LaunchConfig(
        job.workers // settings.nnodes, settings.nnodes, settings.node_rank, settings.master_addr,
        settings.master_port, settings.interface, settings.isolate, job.config.strategy.get("max_lost", 0) != 0,
    )  # fmt: skip


def _ray_cluster(job: Job) -> on_ray.Cluster:
    settings, device = job.config.launch.ray, job.config.device
    gpus = {"cpu": 0, "cuda": 1, "auto": None}[device] if settings.gpus == "auto" else settings.gpus
    return on_ray.Cluster(settings.address, settings.cpus, gpus, settings.spread, settings.wait, settings.grows)


def _own_variables() -> dict[str, str]:
    """The environment variables that ranks on other hosts get from here."""
    return {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes what the launcher refuses an error of the config."""
    try:
        yield
    except CannotIsolateError as error:
        raise ConfigError(
            f"launch.isolate=true: these ranks cannot have a network of their own: {error}; type launch.isolate=auto"
        ) from error
    except CannotListenError as error:
        raise ConfigError(f"{error}; type another launch.master_addr or launch.master_port") from error
    except on_ray.NoClusterError as error:
        raise ConfigError(
            f"launch=ray: no Ray cluster answers: {error}; start one by ray start --head, and type "
            "launch.ray.address=HOST:6379; or leave launch.ray.address out for a cluster of this host alone"
        ) from error
    except on_ray.NoRoomError as error:
        raise ConfigError(
            f"launch=ray: {error}; type fewer workers, less of launch.ray.cpus or launch.ray.gpus, or, for a cluster "
            "that starts hosts on demand, launch.ray.grows=true"
        ) from error
    except on_ray.BusyError as error:
        raise RunError(f"launch=ray: {error}; try again later, or type a longer launch.ray.wait") from error
    except on_ray.MissingError as error:
        raise ConfigError(f"launch=ray: {error}; every host needs the program, and a folder that all share") from error


def lead(job: Job, parts: Parts, state: FolderState) -> int:
    """Rank zero: trains, tests, writes everything; returns the exit code."""
    stop = StopSignal()
    handler = log_to_file(job.run_dir / "train.log")
    try:
        with stop.interruptible():
            strategy = connect(parts)
        assert strategy.drives
        with _closing(strategy), published(job):
            return _train(job, parts, state, strategy, stop)
    except DivergedError as error:
        return report_error(error, DIVERGED)
    except Interrupted:
        log.info("stopped before the workers had met")
        return stop.exit_code
    except (ConfigError, DataError, RunError, ConnectionError, TimeoutError) as error:
        return report_error(error, FAILED)
    except Exception:
        log.exception("the run failed")
        return FAILED
    finally:
        detach(handler)
        stop.restore()


@contextmanager
def _closing(strategy: Strategy) -> Iterator[None]:
    """Ends the strategy's session, however this is left: Python must not end while a thread of torch is in it."""
    try:
        yield
    except BaseException as error:
        strategy.close(failure=error)
        raise
    strategy.close()


def dismiss_others(parts: Parts, report: str) -> int:
    """Rank zero of a run in which nothing is left to do: prints the report, and lets the other ranks end."""
    print(report, flush=True)
    try:
        strategy = connect(parts)
        strategy.share(DONE)
        strategy.close()
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        log.debug("%s", error)  # they were not started, or have ended: nothing is lost
    return OK


def _train(job: Job, parts: Parts, state: FolderState, strategy: Strategy, stop: StopSignal) -> int:
    """Trains to the end, or to a stop that was asked for, and writes what became of the run; returns the exit code."""
    pause = job.run_dir / folder.STOP
    stops = Stops(lambda: stop.requested or pause.exists(), stop.interruptible)
    try:
        result = train_and_test(job, parts, state, strategy, stops)
    except Paused as paused:
        folder.write_result(job.run_dir, result_of(job, folder.PAUSED, paused.progress))
        log.info("%s", paused)
        return OK
    except Stopped as stopped:
        strategy.dismiss()
        if not stop.requested:
            folder.write_result(job.run_dir, result_of(job, folder.PRUNED, stopped.progress))
        log.info("%s", stopped)
        return stop.exit_code  # 0 if a file has asked for it
    except DivergedError as error:
        folder.write_result(job.run_dir, result_of(job, "diverged", Progress(error.step - 1)))
        raise
    hand_out(job)
    print(folder.run_report(job.run_dir, result))
    return OK


def hand_out(job: Job) -> None:
    """Copies what a completed run has learned to where the config asks for it; jobs of a multirun copy nothing.

    Raises:
        RunError: the folder cannot be written.
    """
    target = job.config.launch.model
    if target is not None and not job.in_sweep:
        folder.copy_best(job.run_dir, Path(target))


def serve(job: Job, parts: Parts, follow: Callable[[Strategy], object]) -> int:
    """The other ranks: compute what rank zero asks for; or, under a strategy that all ranks drive, `follow` it."""
    joins = JOINS in os.environ and not started_by_launcher()
    try:
        strategy = connect(parts)
        # Rank zero gets the same signals, if they are for the whole run. It saves, then ends this rank too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, (lambda *_: wish_to_leave()) if comes_and_goes(job) else signal.SIG_IGN)
        if joins:
            print(f"{get_world_info().worker_name} has joined {job.run_dir}", file=sys.stderr, flush=True)
        with _closing(strategy), suppress(Paused):
            if strategy.drives:
                follow(strategy)
    except (StoppedByLeader, RunError) as error:
        log.debug("%s", error)  # rank zero has reported the cause
        return FAILED
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        print(f"error: {get_world_info().worker_name}: {error}", file=sys.stderr)
        return FAILED
    return OK
