"""Trains a meta-learner as its config says: a run from the command line to its result."""

import os
import sys
from collections.abc import Sequence

from metalearn.app import process
from metalearn.app.job import Job, Program, Role, installed, role_of, to_job
from metalearn.app.sweep import by_hydra, run_sweep
from metalearn.config.check import check_folder, started_by_launcher
from metalearn.config.compose import as_path, compose_config, with_sets
from metalearn.config.options import search, search_flags, short_help
from metalearn.errors import ConfigError, printable


def main(argv: Sequence[str], program: Program | None = None) -> int:
    """Runs the command line of `program`, by default that of the installed package; returns the exit code."""
    process.end_with_starter()
    return process.exit_code_of_process(lambda: run_command(argv, program or installed()))


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
        return process.print_all(short_help())
    overrides = [as_path(text) for text in arguments.overrides]
    flags = [word for word in argv if word not in arguments.overrides]
    sys.argv = [sys.argv[0], *flags, *with_sets(overrides)]  # where Hydra looks
    if arguments.shell_completion:  # install=bash and the like are no keys
        return by_hydra(lambda config: None)
    if arguments.multirun and (arguments.cfg or arguments.info):
        flag = "--cfg" if arguments.cfg else "--info"
        raise ConfigError(f"{flag}: shows one run, and --multirun asks for several; leave one of them out")
    if arguments.multirun:
        return run_sweep(program, with_sets(overrides), run_job)
    composed = compose_config(overrides)
    if arguments.hydra_help or arguments.cfg or arguments.info:
        return by_hydra(lambda config: None)
    return run_job(to_job(*composed, program, [*search_flags(), *overrides]))


def run_job(job: Job) -> int:
    """One run, as its launcher or as one of its ranks; returns the exit code. A rank that is a fork begins here."""
    role = role_of(job)
    if role is not Role.WORKER and job.config.launch.node_rank == 0:
        check_folder(job.run_dir, job.config)
    if int(os.environ.get("RANK", 0)) == 0 and not started_by_launcher():  # now, since importing torch takes seconds
        print(printable(f"{job.experiment}: starting in {job.run_dir}"), file=sys.stderr, flush=True)
    process.set_up_process(job.config.threads)
    with process.importing():  # torch among others: keys and choices are known to be right, and the threads are set
        from metalearn.app import run
        from metalearn.app.parts import assemble
    process.set_up_torch(job.config)
    parts = assemble(job)
    match role:
        case Role.LAUNCHER:
            from metalearn.app import ranks

            return ranks.start(run_job, parts)
        case Role.LEADER:
            return run.lead(parts)
        case Role.WORKER:
            return run.serve_run(parts)
