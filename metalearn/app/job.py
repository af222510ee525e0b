"""One run as the command line asks for it, and the program that was started for it."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from metalearn.config.check import check_network, check_top_level, world_size

MODULE = "metalearn"
ROOT = Path(__file__).resolve().parents[2]


class Program(NamedTuple):
    """A program of ours: `python` with `arguments` starts it; users type `python NAME` or `torchrun … NAME`."""

    arguments: tuple[str, ...]
    name: str


def script(path: Path) -> Program:
    """The program in a file of the checkout."""
    path = path.resolve()
    return Program((str(path),), str(path.relative_to(ROOT)))


def installed(*command: str) -> Program:
    """The installed command `metalearn`, or one of its sub-commands, as a module. It looks for modules in the folder
    where it is started only if this process does."""
    place = () if sys.path[0] == str(Path.cwd()) else ("-P",)
    return Program((*place, "-m", MODULE, *command), " ".join(["-m", MODULE, *command]))


class Job(NamedTuple):
    """One run: its config, folder and experiment; the program and arguments that repeat it; and its number of workers.

    `whole` is what Hydra has composed, and makes the run folder of; None where it makes none. `in_sweep` says that this
    is one of a multirun, for which Hydra has made the folder. `fork` runs the program with new arguments in a fork of
    this process; it is None where that cannot be done.
    """

    config: DictConfig
    run_dir: Path
    experiment: str
    whole: DictConfig | None
    program: Program
    arguments: list[str]
    workers: int
    in_sweep: bool = False
    fork: Callable[[Sequence[str]], int] | None = None


def to_job(
    config: DictConfig,
    run_dir: Path,
    experiment: str,
    whole: DictConfig | None,
    program: Program,
    arguments: Sequence[str],
) -> Job:
    """The job that a composed config asks for; `program` is what was started.

    Raises:
        ConfigError: a value that is not allowed, of a key that belongs to no component.
    """
    check_top_level(config)
    workers = world_size(config, " ".join([program.name, *arguments]))
    check_network(config)
    return Job(config, run_dir, experiment, whole, program, list(arguments), workers)
