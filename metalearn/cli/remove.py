"""Removes classes from a classifier that `metalearn fit` has made. No training.

metalearn remove classifier cat dog
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
        command_name("remove"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("classifier", type=Path, metavar="CLASSIFIER", help="the folder that metalearn fit has made")
    parser.add_argument("classes", nargs="+", metavar="CLASS", help="names of classes")
    parser.add_argument("--weights", metavar="PATH", help="the weights of its network, if they are not in a package")
    options = parser.parse_args(arguments)
    return ended(lambda: remove(options, arguments))


def remove(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code. `arguments` are those that were typed."""
    set_up_process(1)
    from metalearn.classifier.classifier import PictureClassifier

    log_to_stderr()
    classifier = PictureClassifier.load(options.classifier, weights=options.weights, key="CLASSIFIER")
    classifier.remove(options.classes).save(options.classifier, replace=True, command=typed("remove", arguments))
    print(f"{len(classifier.classes_)} classes")
    print(printable("\n".join(summary(classifier))))
    return OK
