"""Learns to tell the classes of your pictures apart: one folder a class in, a classifier out.

The features of a pretrained network stay as they are; a head learns from them. Cross-validation over your classes
chooses the head, and says what to expect of new pictures. `metalearn predict` asks the classifier.

  metalearn fit animals --out classifier
  metalearn predict classifier new_pictures --out answers.csv
  metalearn add classifier more_animals
  metalearn remove classifier cat dog

Or reads a table: a network that was trained on tables of a prior (algorithm=pfn) predicts a column, without training.

  metalearn fit houses.csv --target price --out prices
  metalearn predict prices new_houses.csv --out answers.csv
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metalearn.app import fit_table
from metalearn.app.process import BAD_CONFIG, FAILED, OK, exit_code_of_process, importing, report_error, set_up_process
from metalearn.cli.arguments import command_parser, names, similarity, typed, whole
from metalearn.errors import log_to_stderr, printable
from metalearn.storage.files import refuse_used

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier


def ended(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """A command on pictures or tables that reports its errors: the exit code in place of each."""

    @functools.wraps(main)
    def reported(arguments: Sequence[str]) -> int:
        try:
            return exit_code_of_process(lambda: main(arguments))
        except ValueError as error:
            return report_error(error, BAD_CONFIG)
        except BrokenPipeError:  # no failure of the command: see `metalearn.cli.run`
            raise
        except OSError as error:
            return report_error(error, FAILED)

    return reported


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("fit", __doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER|TABLE", help="has a folder of pictures for each class; or .csv, .parquet"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="CLASSIFIER", help="the output folder; new, or empty"
    )
    parser.add_argument("--backbone", metavar="NAME", help="the pretrained network (default: efficientnet_lite0)")
    parser.add_argument("--weights", metavar="PATH", help="its weights, for a network of torchvision")
    parser.add_argument("--head", default="auto", help="what learns (default: auto, the best in cross-validation)")
    parser.add_argument("--folds", type=whole(2), default=5, help="parts of the cross-validation (default: 5)")
    parser.add_argument(
        "--strict", action="store_true", help="refuse damaged pictures and copies; else they are passed over"
    )
    parser.add_argument("--threads", type=whole(1), default=1, help="threads of torch (default: 1)")
    add_threshold(parser, "auto")
    of_table = parser.add_argument_group("of a table")
    of_table.add_argument("--target", metavar="COLUMN", help="the column to predict")
    of_table.add_argument(
        "--network",
        metavar="RUN",
        help="classes or numbers, as shipped (default: by the column); or a run of algorithm=pfn",
    )
    of_table.add_argument("--plugins", type=names, metavar="PACKAGE,…", help="packages of yours, whose code may run")
    options = parser.parse_args(arguments)
    if options.folder.suffix.lower() in fit_table.SUFFIXES:
        for_pictures = ("backbone", "weights", "head", "strict", "threshold")
        others = [f"--{name}" for name in for_pictures if getattr(options, name) != parser.get_default(name)]
        return fit_table.fit(options, others)
    others = [f"--{name}" for name in ("target", "network", "plugins") if getattr(options, name) is not None]
    if others:
        parser.error(f"{', '.join(others)}: of a table; type a file that ends in .csv or .parquet, or leave it out")
    refuse_used("--out", options.out)
    set_up(options.threads)
    from metalearn.classifier.backbones import DEFAULT
    from metalearn.classifier.classifier import PictureClassifier, collect

    classifier = PictureClassifier(
        options.backbone or DEFAULT, weights=options.weights, head=options.head, folds=options.folds,
        threshold=options.threshold,
    )  # fmt: skip
    backbone = classifier.opened()
    print(f"features: {backbone.note}", flush=True)
    collected = collect(options.folder, backbone.form, key="FOLDER=", strict=options.strict)
    print(f"{len(set(collected.labels))} classes, {len(collected.pictures)} pictures", flush=True)
    classifier.fit_collected(collected)
    classifier.save(options.out, command=typed("fit", arguments))
    print(printable("\n".join([*summary(classifier), f"all in {options.out}; open report.html there"])))
    return OK


@ended
def add(arguments: Sequence[str]) -> int:
    """Adds pictures to a classifier that `metalearn fit` has made: of new classes, or of its own. No training.

    metalearn add classifier more_animals
    """
    parser = classifier_parser("add", add.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="has a folder of pictures for each class")
    parser.add_argument("--strict", action="store_true", help="refuse damaged pictures and copies")
    options = parser.parse_args(arguments)
    classifier = loaded(options)
    from metalearn.classifier.classifier import collect

    before = classifier.pictures
    collected = collect(options.folder, classifier.opened().form, key="FOLDER=", strict=options.strict, least=1)
    classifier.add(collected).save(options.classifier, replace=True, command=typed("add", arguments))
    new = classifier.pictures - before
    print(f"{new} new pictures, {len(collected.pictures) - new} that it had; {len(classifier.classes_)} classes")
    print(printable("\n".join(summary(classifier))))
    return OK


@ended
def remove(arguments: Sequence[str]) -> int:
    """Removes classes from a classifier that `metalearn fit` has made. No training.

    metalearn remove classifier cat dog
    """
    parser = classifier_parser("remove", remove.__doc__)
    parser.add_argument("classes", nargs="+", metavar="CLASS", help="names of classes")
    options = parser.parse_args(arguments)
    classifier = loaded(options).remove(options.classes)
    classifier.save(options.classifier, replace=True, command=typed("remove", arguments))
    print(printable("\n".join([f"{len(classifier.classes_)} classes", *summary(classifier)])))
    return OK


# What the commands of a classifier share


def classifier_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a command that asks or changes a classifier."""
    parser = command_parser(command, about)
    parser.add_argument("classifier", type=Path, metavar="CLASSIFIER", help="the folder that metalearn fit has made")
    parser.add_argument("--weights", metavar="PATH", help="the weights of its network, if they are not in a package")
    parser.add_argument("--threads", type=whole(1), default=1, help="threads of torch (default: 1)")
    return parser


def add_threshold(parser: argparse.ArgumentParser, default: str) -> None:
    """The options of when a picture is none of the classes."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--threshold", type=similarity, default=default, metavar="SIMILARITY",
        help="less similar pictures are none of the classes, from -1 to 1 (default: by cross-validation)",
    )  # fmt: skip
    either.add_argument(
        "--always-name", dest="threshold", action="store_const", const=None, default=default, help="name every picture"
    )


def loaded(options: argparse.Namespace) -> "PictureClassifier":
    """The classifier that a command line names, in a process that is set up for it."""
    set_up(options.threads)
    from metalearn.classifier.classifier import PictureClassifier

    return PictureClassifier.load(options.classifier, weights=options.weights, key="CLASSIFIER")


def set_up(threads: int) -> None:
    """Sets up this process for a classifier, which is then imported without delay."""
    set_up_process(threads)
    with importing():  # most of what one answer takes
        import torch  # after the first line

        from metalearn.classifier import classifier  # noqa: F401
    torch.set_num_threads(threads)
    log_to_stderr()


def summary(classifier: "PictureClassifier") -> list[str]:
    """What the cross-validation has found, in lines."""
    from metalearn.classifier.validation import strangers_in_words, twice_in_words

    report = classifier.report_
    if report["accuracy"] is None:
        return [f"accuracy: not known: {report['unknown']}"]
    low, high = report["interval95"]
    lines = [
        f"accuracy {report['accuracy']:.1%} of pictures not learned from (95% interval {low:.1%} to {high:.1%}, "
        f"{report['pictures']} pictures, chance {1 / report['classes']:.1%})",
        "head: "
        + ", ".join(
            f"{'*' if name == report['head'] else ''}{name} {value:.1%}" for name, value in report["by_head"].items()
        ),
    ]
    if report["by_shots"]:
        curve = [f"{shots}: {value:.1%}" for shots, value in report["by_shots"].items()]
        lines.append("pictures a class: " + ", ".join([*curve, *filter(None, [twice_in_words(report)])]))
    hardest = sorted(report["by_class"].items(), key=lambda pair: pair[1])[:3]
    if hardest[0][1] < 1:
        lines.append("hardest classes: " + ", ".join(f"{name} {value:.0%}" for name, value in hardest if value < 1))
    lines.append(f"none of these: {strangers_in_words(report['strangers'], classifier.threshold)}")
    return lines
