"""Builds a data set that the config group `dataset` reads.

    metalearn data emoji                     one idea, drawn by up to nine designers: npm packages
    metalearn data kanji                     characters in the designs of many fonts: Debian packages
    metalearn data scripts                   letters of six scripts in the designs of the same fonts
    metalearn data emoji --classes 20 --out try/emoji      the first 20 classes of each split
    metalearn data mini_imagenet --from ~/downloads        photographs that you have, in any layout that circulates
    metalearn data cub --from CUB_200_2011 --partial       what there is of them, if it is not as published

emoji, kanji and scripts are drawn here from the packages of public registries. Each package is checked against its
SHA-256, and nothing in it is run. mini_imagenet, tiered_imagenet, cifar_fs, fc100 and cub are read from --from: class
folders, lists, pickles or arrays. Their classes and numbers of pictures are compared with the published ones, and
nothing in a pickle is run. The set lies in METALEARN_DATA/NAME (data/NAME) or in --out; ATTRIBUTION.txt beside the
pictures says whose they are. The same command goes on after any end. Exit codes: 0 done; 1 a registry does not answer,
or the disk is full; 2 a program is missing, a package is another one, the photographs are not as published, or wrong
arguments.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.process import OK, exit_code_of_process
from metalearn.cli.arguments import command_parser, whole

DRAWN = ("emoji", "kanji", "scripts")
PHOTOGRAPHS = ("mini_imagenet", "tiered_imagenet", "cifar_fs", "fc100", "cub")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("data", __doc__)
    parser.add_argument("name", choices=[*DRAWN, *PHOTOGRAPHS], help="the data set")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where it is made (default: METALEARN_DATA/NAME)")
    parser.add_argument("--classes", type=whole(1), metavar="N", help="drawn sets: of each split; default: all")
    parser.add_argument("--from", type=Path, dest="source", metavar="FOLDER", help="photographs: where they lie")
    parser.add_argument("--partial", action="store_true", help="photographs: also those that are not as published")
    options = parser.parse_args(arguments)
    if options.name in DRAWN and (options.source or options.partial):
        parser.error(f"{options.name} is drawn here: --from and --partial are for {', '.join(PHOTOGRAPHS)}")
    if options.name in PHOTOGRAPHS and options.source is None:
        parser.error(f"{options.name}: nothing is downloaded; type --from=/path/to/the/photographs")
    if options.name in PHOTOGRAPHS and options.classes:
        parser.error(f"{options.name} is written whole: --classes is for {', '.join(DRAWN)}")
    return exit_code_of_process(lambda: build(options))


def build(options: argparse.Namespace) -> int:
    """Builds the set; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = options.out or Path(os.environ.get("METALEARN_DATA", "data"), options.name)
    from metalearn.datasets import make  # imports torch

    made = make(options.name, out, source=options.source, classes=options.classes, partly=options.partial)
    print(f"{out}: {len(made.classes)} classes, {made.total} pictures, SHA-256 {made.digest}")
    return OK
