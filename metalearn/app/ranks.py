"""What the processes of a run do: the launcher starts the ranks, rank zero leads, the others serve it."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from omegaconf import DictConfig

from distributed.errors import StoppedByLeader
from distributed.info import GOODBYE_SECONDS, get_world_info
from distributed.launch import on_ray
from distributed.launch.elastic import FOLLOWS, CannotListenError, LaunchConfig, check_isolation, launch
from distributed.launch.isolation import CannotIsolateError
from distributed.launch.meeting import note_end
from distributed.launch.processes import has_one_thread
from metalearn.app.job import Job
from metalearn.app.outcome import (
    BAD_CONFIG,
    DISK,
    DIVERGED,
    FAILED,
    OK,
    exit_code_of,
    exit_code_of_process,
    report_error,
    without_memory,
)
from metalearn.app.parts import Parts
from metalearn.app.run import DONE, check_run, follow, look_into_folder, run_by_hydra, train
from metalearn.config.check import computes_elsewhere, on_several_hosts, started_by_launcher
from metalearn.errors import (
    ConfigError,
    DataError,
    DiskError,
    DivergedError,
    MixedWorkersError,
    RunError,
    printable,
)
from metalearn.reporting.logging import detach, log_to_file, log_to_terminal
from metalearn.runs import checkpoint, folder
from metalearn.runs.folder import FolderState
from metalearn.runs.signals import Interrupted, StopSignal
from metalearn.storage.files import comes_from_disk, is_disk_fault
from metalearn.training.trainer import Paused
from metalearn.types import Strategy

HANDED_ON = ("METALEARN_", "WANDB_", "MLFLOW_", "NCCL_", "PYTHONPATH")
"""How the names of those environment variables begin that ranks on other hosts get from here."""

log = logging.getLogger("metalearn")


def ask_rank_zero(job: Job) -> bool:
    """Whether only rank zero can tell that nothing is left to do: other hosts may not see the run folder."""
    return on_several_hosts(job.config)


# The launcher


def start(rank_main: Callable[[Job], int], job: Job, parts: Parts) -> int:
    """The launcher: checks the run, then has each rank of this host run `rank_main` with the job, and waits; returns
    the exit code."""
    first_host = job.config.launch.node_rank == 0
    log_to_terminal(logging.INFO if first_host else logging.ERROR)  # rank zero's launcher reports for all hosts
    state, done = look_into_folder(parts) if first_host else (None, None)
    if done is not None and not ask_rank_zero(job):
        print(printable(done))
        return OK
    check_run(parts, state.snapshot if state else None)
    with _refusals():  # before the run folder is made or changed
        if computes_elsewhere(job.config):
            on_ray.check(_ray_cluster(job), job.workers)
        else:
            check_isolation(_launch_config(job))
    if state is None:
        log_to_terminal(logging.WARNING)  # what has become of this host's ranks
    else:
        with folder.lock(job.run_dir, wait=job.in_sweep):  # reports a folder in use before any worker is started
            job = job_of_ranks(job, state)
    return launch_ranks(rank_main, job, max_restarts=job.config.launch.max_restarts)


def job_of_ranks(job: Job, state: FolderState) -> Job:
    """The job as the ranks run it, and run it again after a restart. If the folder must be rewound, it is done here:
    once, and not at every restart."""
    if state.rewinds and state.snapshot is not None:
        checkpoint.rewind(job.run_dir, state.snapshot.meta["step"])
        return job.changed(resume="auto", resume_changes=[])
    # `never` is a condition of the start, which has found an empty folder; a restart finds checkpoints in it.
    return job.changed(resume="auto") if job.config.resume == "never" else job


def launch_ranks(rank_main: Callable[[Job], int], job: Job, *, max_restarts: int) -> int:
    """Runs `rank_main(job)` for each rank of this host, and waits; returns the exit code.

    The ranks are forks of this process, which has composed the job and imported torch. A fork inherits no other thread
    and cannot use a GPU; where there are such, or the ranks are on other hosts, each rank is a program that is given
    the job's arguments, and composes it again.
    """
    program = [*job.program.arguments, *job.arguments]
    config = _launch_config(job)
    with _refusals():
        if computes_elsewhere(job.config):
            variables = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
            return on_ray.launch(
                program, variables, _ray_cluster(job), config.workers, max_restarts=max_restarts, say=log.warning
            )
        gpus = torch.cuda.device_count()
        check_gpus(job.config.device, config.workers, gpus)
        forks = gpus == 0 and has_one_thread()
        run = partial(exit_code_of_process, partial(rank_main, job)) if forks else [sys.executable, *program]
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
        settings.master_port, settings.interface, settings.isolate, job.config.strategy.timeout,
    )  # fmt: skip


def _ray_cluster(job: Job) -> on_ray.Cluster:
    settings, device = job.config.launch.ray, job.config.device
    gpus = {"cpu": 0, "cuda": 1, "auto": None}[device] if settings.gpus == "auto" else settings.gpus
    return on_ray.Cluster(settings.address, settings.cpus, gpus, settings.spread, settings.wait, settings.grows)


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
    except on_ray.RefusedError as error:
        raise ConfigError(f"launch=ray: {error}") from error
    except on_ray.BusyError as error:
        raise RunError(f"launch=ray: {error}; try again later, or type a longer launch.ray.wait") from error


# Rank zero


def lead(job: Job, parts: Parts) -> int:
    """Rank zero, or the only process of a run: checks the run, if no launcher has, then trains and tests, and writes
    everything; returns the exit code."""
    launched = started_by_launcher()
    log_to_terminal(logging.ERROR if launched else logging.INFO)  # the launcher has logged what is checked here
    if not launched:  # before the run folder is made or changed
        state, done = look_into_folder(parts)
        if done is not None:
            return _report(job, parts, done)
        check_run(parts, state.snapshot)
    with folder.lock(job.run_dir, wait=job.in_sweep):
        state, done = look_into_folder(parts)  # another process may have been in it before the lock was held
        if done is not None:
            return _report(job, parts, done)
        if launched:
            check_run(parts, state.snapshot)
        log_to_terminal()
        if job.in_sweep:
            return _train_and_close(job, parts, state)
        assert job.whole is not None

        def task(config: DictConfig) -> int:
            return exit_code_of(lambda: _train_and_close(job, parts, state))  # Hydra would report an error too

        return run_by_hydra(task, job.whole, job.run_dir)


def _report(job: Job, parts: Parts, done: str) -> int:
    """Reports a run in which nothing is left to do. Ranks on other hosts, which wait for this one, are let go."""
    print(printable(done), flush=True)
    if ask_rank_zero(job):
        try:
            strategy = parts.connect()
            strategy.share(DONE)
            strategy.close()
        except (RuntimeError, ConnectionError, TimeoutError, MixedWorkersError) as error:
            log.debug("%s", error)  # they were not started, or have ended: nothing is lost
    return OK


def _train_and_close(job: Job, parts: Parts, state: FolderState) -> int:
    """Connects the workers, trains, and closes what was opened, whatever has happened; returns the exit code."""
    stop = StopSignal()
    handler = log_to_file(job.run_dir / "train.log")
    try:
        with stop.interruptible():
            strategy = parts.connect()
        assert strategy.drives
        with closing(strategy):
            code = train(parts, state, strategy, stop)
            note_end(code)  # before the others are dismissed: whatever becomes of them then, nothing is started again
            return code
    except DivergedError as error:
        return report_error(error, DIVERGED)
    except MixedWorkersError as error:
        note_end(BAD_CONFIG)
        return report_error(error, BAD_CONFIG)
    except Interrupted:
        log.info("stopped before the workers had met")
        note_end(stop.exit_code)
        return stop.exit_code
    except DiskError as error:
        log.debug("ended by DiskError: %s", error)  # for train.log
        raise
    except (ConfigError, DataError, RunError, ConnectionError, TimeoutError) as error:
        return report_error(error, DISK if comes_from_disk(error) else FAILED)
    except Exception as error:
        if (why := without_memory(error)) is not None:
            return report_error(RunError(why), FAILED)
        if is_disk_fault(error):
            raise
        log.exception("the run failed")
        return FAILED
    finally:
        detach(handler)
        stop.restore()


@contextmanager
def closing(strategy: Strategy) -> Iterator[None]:
    """Ends the strategy's session, however this is left: Python must not end while a thread of torch is in it. On rank
    zero a failure is noted as the end of the run, unless a worker is lost: then the run is started again."""
    try:
        yield
    except BaseException as error:
        if strategy.drives and get_world_info().rank == 0 and not isinstance(error, ConnectionError | TimeoutError):
            note_end(DIVERGED if isinstance(error, DivergedError) else DISK if comes_from_disk(error) else FAILED)
        strategy.close(failure=error)
        raise
    strategy.close()


# Other ranks


def serve_run(job: Job, parts: Parts) -> int:
    """Another rank of a run: checks it as rank zero does, without its folder, and serves; returns the exit code."""
    log_to_terminal(logging.ERROR)
    done = folder.report_if_done(job.run_dir, job.config, None)
    if done is not None and not ask_rank_zero(job):
        if done:
            print(printable(done))
        return OK
    check_run(parts, None)
    return serve(job, parts, lambda strategy: follow(parts, strategy))


def serve(job: Job, parts: Parts, follow: Callable[[Strategy], object]) -> int:
    """The other ranks: compute what rank zero asks for; or, under a strategy that all ranks drive, `follow` it."""
    try:
        strategy = parts.connect()
        # Rank zero gets the same signals, if they are for the whole run. It saves, then ends this rank too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # If the agent of this host alone is stopped, rank zero does not know of it.
        later = threading.Timer(GOODBYE_SECONDS, os._exit, (FOLLOWS,))
        later.daemon = True
        signal.signal(signal.SIGTERM, lambda *_: None if later.is_alive() else later.start())
        with closing(strategy), suppress(Paused):
            if strategy.drives:
                follow(strategy)
    except (StoppedByLeader, RunError) as error:
        log.debug("%s", error)  # rank zero has reported the cause
        return FOLLOWS
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        print(printable(f"error: {get_world_info().worker_name}: {error}"), file=sys.stderr)
        return FAILED
    return OK
