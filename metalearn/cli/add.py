"""Adds pictures to a classifier that `metalearn fit` has made: of new classes, or of those that it has. No training.

metalearn add classifier more_animals
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.outcome import OK
from metalearn.app.process import set_up_process
from metalearn.cli.arguments import command_name, typed
from metalearn.cli.fit import ended, summary
from metalearn.errors import printable
from metalearn.reporting.to_stderr import log_to_stderr


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        command_name("add"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("classifier", type=Path, metavar="CLASSIFIER", help="the folder that metalearn fit has made")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="has a folder of pictures for each class")
    parser.add_argument("--weights", metavar="PATH", help="the weights of its network, if they are not in a package")
    parser.add_argument("--strict", action="store_true", help="refuse damaged pictures and copies")
    options = parser.parse_args(arguments)
    return ended(lambda: add(options, arguments))


def add(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code. `arguments` are those that were typed."""
    set_up_process(1)
    from metalearn.classifier.classifier import PictureClassifier
    from metalearn.classifier.collected import collect

    log_to_stderr()
    classifier = PictureClassifier.load(options.classifier, weights=options.weights, key="CLASSIFIER")
    before = classifier.pictures
    found = collect(options.folder, classifier.opened().form, key="FOLDER=", strict=options.strict, least=1)
    classifier.add(found)
    classifier.save(options.classifier, replace=True, command=typed("add", arguments))
    new = classifier.pictures - before
    print(f"{new} new pictures, {len(found.pictures) - new} that it had; {len(classifier.classes_)} classes")
    print(printable("\n".join(summary(classifier))))
    return OK
