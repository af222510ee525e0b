"""One run as the command line asks for it, the program that was started for it, and the role of this process in it."""

import os
import sys
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf, read_write

from metalearn.config.check import check_network, check_top_level, computes_elsewhere, started_as_rank, world_size

ROOT = Path(__file__).resolve().parents[2]


class Program(NamedTuple):
    """A program of ours: `python` with `arguments` starts it; users type `torchrun … NAME`, or `as_typed(NAME)`."""

    arguments: tuple[str, ...]
    name: str


def script(path: Path) -> Program:
    """The program in a file of the checkout."""
    path = path.resolve()
    return Program((str(path),), str(path.relative_to(ROOT)))


def installed(command: str = "train") -> Program:
    """A sub-command of the installed command `metalearn`, as a module. It looks for modules in the folder where it is
    started only if this process does."""
    place = () if sys.path[0] == str(Path.cwd()) else ("-P",)
    return Program((*place, "-m", "metalearn", command), f"-m metalearn {command}")


class Job(NamedTuple):
    """One run: its config, folder and experiment; the program and arguments that repeat it; and its number of workers.
    `whole` is what Hydra has composed, and makes the run folder of; None where it makes none. `in_sweep` says that this
    is one of a multirun, for which Hydra has made the folder."""

    config: DictConfig
    run_dir: Path
    experiment: str
    whole: DictConfig | None
    program: Program
    arguments: list[str]
    workers: int
    in_sweep: bool = False

    def changed(self, **values: Any) -> "Job":
        """The same run with other values of top-level keys, also in Hydra's record and in the arguments."""
        typed = [f"{key}={value}" for key, value in values.items()]
        config, whole = self.config.copy(), self.whole and self.whole.copy()
        for node in filter(None, (config, whole)):
            for key, value in values.items():
                OmegaConf.update(node, key, value)
        if whole is not None:
            with read_write(whole.hydra):
                whole.hydra.overrides.task.extend(typed)
        return self._replace(config=config, whole=whole, arguments=[*self.arguments, *typed])


class Role(Enum):
    """What a process does in a run."""

    LAUNCHER = auto()  # starts the ranks of this host, and waits for them
    LEADER = auto()  # rank zero, or the only process of the run: trains, and writes everything
    WORKER = auto()  # another rank: computes what rank zero asks for


def role_of(job: Job) -> Role:
    """The role of this process. The ranks that a launcher starts, forks too, find their own in the environment."""
    if started_as_rank():
        return Role.LEADER if int(os.environ["RANK"]) == 0 else Role.WORKER
    # A single rank is a process of its own only where it must be isolated, or be on another host.
    alone = job.workers == 1 and job.config.launch.isolate is not True and not computes_elsewhere(job.config)
    return Role.LEADER if alone else Role.LAUNCHER


def to_job(
    config: DictConfig, run_dir: Path, experiment: str, whole: DictConfig | None, program: Program,
    arguments: Sequence[str],
) -> Job:  # fmt: skip
    """The job that a composed config asks for. Raises ConfigError for a value of a key of no component."""
    check_top_level(config)
    workers = world_size(config, " ".join([program.name, *arguments]))
    check_network(config)
    return Job(config, run_dir, experiment, whole, program, list(arguments), workers)
