"""Looks at the tasks of a prior, before hours are spent on a training with them.

    metalearn prior check my_prior                              a module of yours, with shape(rng) and table(rng, shape)
    metalearn prior check gp dataset.noise=0.3                  one of ours, with other settings
    metalearn prior check my_package.prior --page prior.html    also a page with pictures of tasks

Prints what a forest, a linear model and chance reach on the tasks (needs scikit-learn), the share that nobody can
learn, and how many are drawn in a second. A prior is refused, with exit code 2, if a task is not finite, two are alike,
targets are constant, or the same task comes out otherwise the second time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.process import OK, exit_code_of_process, print_all, set_up_process
from metalearn.cli.arguments import command_parser, names, typed, whole
from metalearn.config.compose import parsed
from metalearn.errors import ConfigError, printable
from metalearn.storage.files import creating


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("prior", __doc__)
    parser.add_argument("action", choices=["check"])
    parser.add_argument("name", metavar="NAME", help="gp, sine, table, or a module of yours, whose code runs here")
    parser.add_argument("settings", nargs="*", metavar="dataset.KEY=VALUE", help="settings of the prior")
    parser.add_argument(
        "--plugins", type=names, default=(), metavar="PACKAGE,…", help="further packages of yours that may be named"
    )
    parser.add_argument("--tasks", type=whole(2), default=60, help="tasks to learn, each of a group (default: 60)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page with pictures: new, ends with .html")
    options = parser.parse_args(arguments)
    return exit_code_of_process(lambda: check(options, arguments))


def check(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code."""
    set_up_process(1)
    from metalearn.app.prior_check import check_prior, in_lines, learners, page_of, source_of  # imports torch

    settings = {}
    for override in parsed(options.settings):
        group, _, key = override.key_or_group.partition(".")
        if group != "dataset" or not key:
            raise ConfigError(f"{override.input_line}: must be a key of the prior; type dataset.KEY=VALUE")
        settings[key] = override.value()
    learn = learners()
    if learn is None:
        print_all(
            "forest, linear model: not measured, since scikit-learn is not installed; type pip install scikit-learn"
        )
    source = source_of(options.name, settings, options.plugins)
    found = check_prior(source, options.tasks, learn)
    lines = in_lines(options.name, found)
    if options.page is not None:
        with creating("--page", options.page):
            options.page.write_text(page_of(options.name, found, typed("prior", arguments)), encoding="ascii")
        lines.append(f"{options.page}: pictures of the tasks")
    print_all(printable("\n".join(lines)))
    return OK
