"""Builds a data set that the config group `dataset` reads.

    metalearn data emoji                     one idea, drawn by up to nine designers: npm packages
    metalearn data kanji                     characters in the designs of many fonts: Debian packages
    metalearn data scripts                   letters of six scripts in the designs of the same fonts
    metalearn data emoji --classes 20 --out try/emoji      the first 20 classes of each split

The pictures are drawn here from the packages of public registries. Each package is checked against its SHA-256, and
nothing in it is run. The set lies in METALEARN_DATA/NAME (data/NAME) or in --out; ATTRIBUTION.txt beside the pictures
says whose they are. The same command goes on after any end. Exit codes: 0 done; 1 a registry does not answer, or the
disk is full; 2 a program is missing, a package is another one, or wrong arguments.
"""

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.outcome import OK, exit_code_of_process
from metalearn.cli.arguments import command_name, whole


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        command_name("data"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=["emoji", "kanji", "scripts"], help="the data set")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where it is made (default: METALEARN_DATA/NAME)")
    parser.add_argument("--classes", type=whole(1), metavar="N", help="of each split; default: all")
    options = parser.parse_args(arguments)
    return exit_code_of_process(lambda: make(options))


def make(options: argparse.Namespace) -> int:
    """Builds the set; returns the exit code."""
    from metalearn.datasets.drawing import build  # imports torch
    from metalearn.datasets.emoji import emoji
    from metalearn.datasets.fonts import kanji, scripts

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = options.out or Path(os.environ.get("METALEARN_DATA", "data"), options.name)
    recipe = {"emoji": emoji, "kanji": kanji, "scripts": scripts}[options.name]
    made = build(recipe(options.classes), out)
    print(f"{out}: {len(made.classes)} classes, {made.total} pictures, SHA-256 {made.digest}")
    return OK
