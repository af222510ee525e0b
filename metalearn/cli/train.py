"""Trains a meta-learner as its config says: a run from the command line to its result."""

import sys
from collections.abc import Sequence

from metalearn.app.job import Job, Program, Role, installed, role_of, to_job
from metalearn.app.process import (
    OK,
    announce,
    end_with_starter,
    exit_code_of_process,
    importing,
    print_all,
    set_up_process,
    set_up_torch,
)
from metalearn.app.sweep import by_hydra, run_sweep
from metalearn.config.check import check_folder
from metalearn.config.compose import as_path, compose_config
from metalearn.config.options import search, search_flags, short_help
from metalearn.errors import ConfigError


def main(argv: Sequence[str], program: Program | None = None) -> int:
    """Runs the command line of `program`, by default that of the installed package; returns the exit code."""
    end_with_starter()
    return exit_code_of_process(lambda: run_command(argv, program or installed()))


def run_command(argv: Sequence[str], program: Program) -> int:
    """Composes and checks the config; then runs one job, or those of a multirun."""
    from hydra._internal.utils import get_args_parser

    # Flags may stand between overrides.
    arguments = get_args_parser().parse_intermixed_args(argv)
    for flag, value in (("--config-path", arguments.config_path), ("--config-name", arguments.config_name)):
        if value is not None:
            raise ConfigError(
                f"{flag}={value}: this program composes its own conf; type --config-dir=FOLDER to add yours"
            )
    if arguments.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={arguments.experimental_rerun}: would run what a pickle names; type the command "
            "that the run's report.html shows, or the overrides in its .hydra/overrides.yaml"
        )
    search(arguments.config_dir)
    if arguments.help:
        return print_all(short_help())
    overrides = [as_path(text) for text in arguments.overrides]
    flags = [word for word in argv if word not in arguments.overrides]
    sys.argv = [sys.argv[0], *flags, *overrides]  # where Hydra looks
    if arguments.shell_completion:  # install=bash and the like are no keys
        by_hydra(lambda config: OK)
        return OK
    if arguments.multirun and (arguments.cfg or arguments.info):
        flag = "--cfg" if arguments.cfg else "--info"
        raise ConfigError(f"{flag}: shows one run, and --multirun asks for several; leave one of them out")
    if arguments.multirun:
        return run_sweep(program, overrides, run_job)
    composed = compose_config(overrides)
    if arguments.hydra_help or arguments.cfg or arguments.info:
        by_hydra(lambda config: OK)
        return OK
    return run_job(to_job(*composed, program, [*search_flags(), *overrides]))


def run_job(job: Job) -> int:
    """One run, as its launcher or as one of its ranks; returns the exit code. A rank that is a fork begins here."""
    role = role_of(job)
    if role is not Role.WORKER and job.config.launch.node_rank == 0:
        check_folder(job.run_dir, job.config)
    announce(job)
    set_up_process(job.config.threads)
    with importing():  # torch among others: keys and choices are known to be right, and the threads are set
        from metalearn.app import run
        from metalearn.app.parts import assemble
    set_up_torch(job.config)
    parts = assemble(job)
    match role:
        case Role.LAUNCHER:
            from metalearn.app import ranks

            return ranks.start(run_job, parts)
        case Role.LEADER:
            return run.lead(parts)
        case Role.WORKER:
            return run.serve_run(parts)
