"""Removes classes from a classifier that `metalearn fit` has made. No training.

metalearn remove classifier cat dog
"""

from collections.abc import Sequence

from metalearn.app.process import OK
from metalearn.cli.arguments import typed
from metalearn.cli.fit import classifier_parser, ended, loaded, summary
from metalearn.errors import printable


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = classifier_parser("remove", __doc__)
    parser.add_argument("classes", nargs="+", metavar="CLASS", help="names of classes")
    options = parser.parse_args(arguments)
    classifier = loaded(options).remove(options.classes)
    classifier.save(options.classifier, replace=True, command=typed("remove", arguments))
    print(printable("\n".join([f"{len(classifier.classes_)} classes", *summary(classifier)])))
    return OK
