"""Adds pictures to a classifier that `metalearn fit` has made: of new classes, or of those that it has. No training.

metalearn add classifier more_animals
"""

from collections.abc import Sequence
from pathlib import Path

from metalearn.app.process import OK
from metalearn.cli.arguments import typed
from metalearn.cli.fit import classifier_parser, ended, loaded, summary
from metalearn.errors import printable


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = classifier_parser("add", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="has a folder of pictures for each class")
    parser.add_argument("--strict", action="store_true", help="refuse damaged pictures and copies")
    options = parser.parse_args(arguments)
    classifier = loaded(options)
    from metalearn.classifier.classifier import collect

    before = classifier.pictures
    found = collect(options.folder, classifier.opened().form, key="FOLDER=", strict=options.strict, least=1)
    classifier.add(found).save(options.classifier, replace=True, command=typed("add", arguments))
    new = classifier.pictures - before
    print(f"{new} new pictures, {len(found.pictures) - new} that it had; {len(classifier.classes_)} classes")
    print(printable("\n".join(summary(classifier))))
    return OK
