"""One run as the command line asks for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from metalearn.config.check import check_network, check_top_level, world_size
from metalearn.config.compose import CONF


class Job(NamedTuple):
    """One run: its config, folder and experiment; the program and overrides that repeat it; and its number of workers.

    `in_sweep` says that it is one of a multirun, for which Hydra has made the folder. `fork` runs the program with new
    arguments in a fork of this process; it is None where that cannot be done.
    """

    config: DictConfig
    run_dir: Path
    experiment: str
    program: Path
    overrides: list[str]
    workers: int
    in_sweep: bool = False
    fork: Callable[[Sequence[str]], int] | None = None


def to_job(config: DictConfig, run_dir: Path, experiment: str, program: Path, overrides: Sequence[str]) -> Job:
    """The job that a composed config asks for; `program` is the script that was started.

    Raises:
        ConfigError: a value that is not allowed, of a key that belongs to no component.
    """
    check_top_level(config)
    command = " ".join([str(program.relative_to(CONF.parent)), *overrides])
    workers = world_size(config, command)
    check_network(config)
    return Job(config, run_dir, experiment, program, list(overrides), workers)
