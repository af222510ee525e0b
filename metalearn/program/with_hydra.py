"""What Hydra does for a run: it makes the run folder with its `.hydra`, and deals out the jobs of a multirun."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from metalearn.config.check import started_as_rank
from metalearn.config.compose import CONF, compose_config, quoted, resolved, sweep_jobs
from metalearn.errors import ConfigError
from metalearn.program.job import Job, to_job
from metalearn.program.outcome import OK
from metalearn.program.process import set_up_process
from metalearn.runs.signals import STOPPED


def run_by_hydra(task: Callable[[DictConfig], int], *, sweep: bool) -> int:
    """Lets Hydra make the run folder and its `.hydra`, then call `task`; returns the task's exit code.

    With `sweep` the task is one job of a multirun. A job that was stopped ends the multirun; the exit code is the
    largest of all jobs.
    """
    import hydra

    codes: list[int] = []

    def job(config: DictConfig) -> None:
        codes.append(task(config))
        if sweep and codes[-1] in STOPPED:
            raise SystemExit(codes[-1])  # ends the sweep, where an Exception would only fail this job
        if sweep and codes[-1] != OK:
            raise RuntimeError(f"the job ended with exit code {codes[-1]}")

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    return max(codes, default=OK)


def check_sweep(program: Path, overrides: Sequence[str]) -> None:
    """Checks every job of a multirun before the first one is started.

    Raises:
        ConfigError: as for a single run; or torchrun has started this process.
    """
    if started_as_rank():
        raise ConfigError(
            "a multirun cannot be started by torchrun: its jobs would mix. Type\n"
            f"  python {program.name} --multirun workers={os.environ['WORLD_SIZE']} {' '.join(overrides)}"
        )
    for job_overrides in sweep_jobs(overrides):
        job = to_job(*compose_config(job_overrides), program, job_overrides)
        set_up_process(job.config.threads)
        from metalearn.program.parts import assemble  # imports torch, after the line above

        assemble(job)


def sweep_job(config: DictConfig, program: Path) -> Job:
    """One job of a multirun, in the folder that Hydra gave it."""
    from hydra.core.hydra_config import HydraConfig

    own = HydraConfig.get()
    folder = Path(own.runtime.output_dir)
    overrides = [*own.overrides.task, f"hydra.run.dir={quoted(folder)}"]
    return to_job(resolved(config), folder, own.runtime.choices["experiment"], program, overrides)
