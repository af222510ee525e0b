"""Trains a meta-learner as its config says: a run from the command line to its result."""

import logging
import sys
from collections.abc import Sequence
from functools import partial

from metalearn.app.job import Job, Program, installed, to_job
from metalearn.app.outcome import OK, exit_code_of, print_to_pipe, printable
from metalearn.app.process import announce, end_with_starter, importing, set_up_process, set_up_torch
from metalearn.app.sweep import run_sweep
from metalearn.app.with_hydra import run_by_hydra, show_by_hydra
from metalearn.config.check import started_by_launcher
from metalearn.config.compose import compose_config
from metalearn.config.help import help_text
from metalearn.config.options import search, search_flags
from metalearn.errors import ConfigError
from metalearn.runs.signals import INTERRUPTED


def main(argv: Sequence[str], program: Program | None = None) -> int:
    """Runs the command line of `program`, by default that of the installed package; returns the exit code."""
    end_with_starter()
    try:
        return exit_code_of(lambda: run_command(argv, program or installed()))
    except KeyboardInterrupt:
        return INTERRUPTED


def run_command(argv: Sequence[str], program: Program) -> int:
    """Composes and checks the config; then runs one job, or those of a multirun."""
    from hydra._internal.utils import get_args_parser

    arguments = get_args_parser().parse_args(argv)
    for flag, value in (("--config-path", arguments.config_path), ("--config-name", arguments.config_name)):
        if value is not None:
            raise ConfigError(
                f"{flag}={value}: this program composes its own conf; type --config-dir=FOLDER to add yours"
            )
    search(arguments.config_dir)
    if arguments.help:
        print_to_pipe(help_text())
        return OK
    sys.argv = [sys.argv[0], *argv]  # where Hydra looks
    if arguments.multirun:
        return run_sweep(program, arguments.overrides, run_job, partial(main, program=program))
    composed = compose_config(arguments.overrides)
    if arguments.hydra_help or arguments.cfg or arguments.info or arguments.shell_completion:
        return show_by_hydra()
    job = to_job(*composed, program, [*search_flags(), *arguments.overrides])
    return run_job(job._replace(fork=partial(main, program=program)))


def run_job(job: Job) -> int:
    """One run, as its launcher or as one of its ranks; returns the exit code."""
    announce(job)
    set_up_process(job.config.threads)
    with importing():  # torch among others: keys and choices are known to be right, and the threads are set
        from metalearn.app import ranks
        from metalearn.app.parts import assemble, first_tasks
        from metalearn.app.run import follow, found_in_folder, seen_by
        from metalearn.app.unseen import check_reported, check_same_classes, check_unseen
        from metalearn.reporting.logging import log_to_terminal
        from metalearn.runs import folder
        from metalearn.runs.seen import from_meta
        from metalearn.training.compatibility import check_compatible

    set_up_torch(job.config)
    parts = assemble(job)
    log_to_terminal(logging.ERROR if started_by_launcher() or not ranks.leads(job) else logging.INFO)
    if ranks.leads(job):
        folder.check_copy(job.config.launch.model)
    state = found_in_folder(job, parts) if ranks.leads(job) else None
    done = folder.report_if_done(job.run_dir, job.config, state)
    if done is not None and state is not None and state.snapshot is not None:
        check_reported(state.snapshot, job.config, parts.source, parts.settings.steps)
    if state is not None and state.result is not None:
        ranks.hand_out(job)
    if done is not None and not ranks.ask_rank_zero(job):
        if done:
            print(printable(done))
        return OK
    check_compatible(parts.algorithm, parts.model, parts.start, parts.source, first_tasks(parts))
    begun = state.snapshot if state else None
    if begun is not None and begun.meta["step"] and job.config.resume == "auto":
        check_same_classes(from_meta(begun.meta), parts.source, parts.settings.steps)
    seen = seen_by(parts, begun)
    for split in ("test", "val"):
        check_unseen(seen, parts.source, split, job.config.seen_classes)
    if ranks.to_be_started(job):
        return ranks.start_workers(job, state)
    if done is not None and ranks.leads(job):
        return ranks.dismiss_others(parts, done)
    if not ranks.leads(job):
        return ranks.serve(job, parts, lambda strategy: follow(job, parts, strategy))
    log_to_terminal()  # the launcher has logged what was checked above
    with folder.lock(job.run_dir, wait=job.in_sweep):
        state = found_in_folder(job, parts)  # another process may have been in it
        if job.in_sweep:
            return ranks.lead(job, parts, state)
        assert job.whole is not None
        return run_by_hydra(lambda config: ranks.lead(job, parts, state), job.whole, job.run_dir)
