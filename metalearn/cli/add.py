"""Adds pictures to a classifier that `metalearn fit` has made: of new classes, or of those that it has. No training.

metalearn add classifier more_animals
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.outcome import OK
from metalearn.cli.arguments import typed
from metalearn.cli.fit import classifier_parser, ended, loaded, summary
from metalearn.errors import printable


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = classifier_parser("add", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="has a folder of pictures for each class")
    parser.add_argument("--strict", action="store_true", help="refuse damaged pictures and copies")
    options = parser.parse_args(arguments)
    return ended(lambda: add(options, arguments))


def add(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code. `arguments` are those that were typed."""
    classifier = loaded(options)
    from metalearn.classifier.collected import collect

    before = classifier.pictures
    found = collect(options.folder, classifier.opened().form, key="FOLDER=", strict=options.strict, least=1)
    classifier.add(found).save(options.classifier, replace=True, command=typed("add", arguments))
    new = classifier.pictures - before
    print(f"{new} new pictures, {len(found.pictures) - new} that it had; {len(classifier.classes_)} classes")
    print(printable("\n".join(summary(classifier))))
    return OK
