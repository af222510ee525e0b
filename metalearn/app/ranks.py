"""The launcher: starts the ranks of this host, and waits for them. Only launchers import this module: torch's agent
imports for half a second."""

import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from distributed.launch import elastic, on_ray
from distributed.launch.isolation import CannotIsolateError
from distributed.launch.processes import can_fork
from metalearn.app.job import Job
from metalearn.app.parts import Parts, check_device
from metalearn.app.process import exit_code_of_process, print_all
from metalearn.app.run import check_run, look_into_folder
from metalearn.config.check import computes_elsewhere, on_several_hosts
from metalearn.errors import ConfigError, RunError
from metalearn.reporting.logging import log_to_terminal
from metalearn.runs import checkpoint, folder
from metalearn.runs.folder import FolderState

HANDED_ON = ("METALEARN_", "WANDB_", "MLFLOW_", "NCCL_", "PYTHONPATH")
"""How the names of those environment variables begin that ranks on other hosts get from here."""

log = logging.getLogger("metalearn")


def start(rank_main: Callable[[Job], int], parts: Parts) -> int:
    """The launcher: checks the run, has each rank of this host run `rank_main`, and waits; returns the exit code."""
    job = parts.job
    first_host = job.config.launch.node_rank == 0
    log_to_terminal(logging.INFO if first_host else logging.ERROR)  # rank zero's launcher reports for all hosts
    state, done = look_into_folder(parts) if first_host else (None, None)
    if done is not None and not on_several_hosts(job.config):
        return print_all(done)
    check_run(parts, state.snapshot if state else None)
    with _refusals():  # before the run folder is made or changed
        if computes_elsewhere(job.config):
            _ray_cluster(job)
        else:
            elastic.check_isolation(_launch_config(job))
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
    """Runs `rank_main(job)` for each rank of this host, and waits; returns the exit code. The ranks are forks of this
    process, which has composed the job and imported torch. A fork inherits no other thread and cannot use a GPU; where
    there are such, or no room for locks, or the ranks are on other hosts, each rank is a program that is given the
    job's arguments, and composes it again."""
    program = [*job.program.arguments, *job.arguments]
    config = _launch_config(job)
    with _refusals():
        if computes_elsewhere(job.config):
            variables = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
            return on_ray.launch(
                program, variables, _ray_cluster(job), config.workers, max_restarts=max_restarts, say=log.warning
            )
        check_device(job.config.device, job.config.precision, config.workers)
        forks = torch.cuda.device_count() == 0 and can_fork(config.workers)
        run = partial(exit_code_of_process, partial(rank_main, job)) if forks else [sys.executable, *program]
        return elastic.launch(run, config, max_restarts=max_restarts, say=log.warning)


def _launch_config(job: Job) -> elastic.LaunchConfig:
    settings = job.config.launch
    return elastic.LaunchConfig(
        job.workers // settings.nnodes, settings.nnodes, settings.node_rank, settings.master_addr,
        settings.master_port, settings.interface, settings.isolate, job.config.strategy.timeout,
    )  # fmt: skip


def _ray_cluster(job: Job) -> on_ray.Cluster:
    settings, device = job.config.launch.ray, job.config.device
    gpus = {"cpu": 0, "cuda": 1, "auto": None}[device] if settings.gpus == "auto" else settings.gpus
    cluster = on_ray.Cluster(settings.address, settings.cpus, gpus, settings.spread, settings.wait, settings.grows)
    return connect_to_ray(cluster, job.workers)


def connect_to_ray(cluster: on_ray.Cluster, workers: int) -> on_ray.Cluster:
    """Connects this process to the cluster; returns what each worker reserves there. Raises ConfigError if there is no
    such cluster, or its hosts can never hold the workers."""
    import ray  # is optional

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unasked
    try:
        if not ray.is_initialized():
            host, _, port = (cluster.address or "").rpartition(":")
            if host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=5.0).close()
            # On one host nothing is shared out, so Ray must not refuse workers for want of CPUs. Only output goes
            # through the object store.
            alone = {"address": "local", "num_cpus": max(os.cpu_count() or 1, math.ceil(cluster.cpus * workers)),
                     "object_store_memory": 100 * 2**20, "include_dashboard": False}  # fmt: skip
            where = alone if cluster.address is None else {"address": cluster.address}
            ray.init(log_to_driver=False, logging_level="ERROR", **where)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"launch=ray: no Ray cluster answers: {str(error).splitlines()[0]}; start one by ray start --head, and "
            "type launch.ray.address=HOST:6379; or leave launch.ray.address out for a cluster of this host alone"
        ) from error
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if cluster.gpus is None:
        cluster = cluster._replace(gpus=1 if cluster._replace(gpus=1).room(nodes) >= workers else 0)
    if cluster.room(nodes) < workers and not cluster.grows:
        ray.shutdown()
        has = (f"{n['NodeManagerAddress']} has {n['Resources'].get('CPU', 0):g} CPUs and "
               f"{n['Resources'].get('GPU', 0):g} GPUs" for n in nodes)  # fmt: skip
        raise ConfigError(
            f"launch=ray: the Ray cluster has room for {cluster.room(nodes)} of {workers} workers with "
            f"{cluster.cpus:g} CPUs and {cluster.gpus:g} GPUs each: {'; '.join(has)}; type fewer workers, less of "
            "launch.ray.cpus or launch.ray.gpus, or, for a cluster that starts hosts on demand, launch.ray.grows=true"
        )
    return cluster


@contextmanager
def _refusals() -> Iterator[None]:
    """Makes what the launcher refuses an error of the config."""
    try:
        yield
    except CannotIsolateError as error:
        raise ConfigError(
            f"launch.isolate=true: these ranks cannot have a network of their own: {error}; type launch.isolate=auto"
        ) from error
    except elastic.CannotListenError as error:
        raise ConfigError(f"{error}; type another launch.master_addr or launch.master_port") from error
    except on_ray.LackingHostError as error:
        raise ConfigError(f"launch=ray: {error}") from error
    except on_ray.BusyError as error:
        raise RunError(f"launch=ray: {error}; try again later, or type a longer launch.ray.wait") from error
