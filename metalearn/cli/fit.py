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
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from metalearn.app import process
from metalearn.cli.arguments import command_parser, names, similarity, typed, whole
from metalearn.errors import ConfigError, install, log, log_to_stderr, nearest
from metalearn.storage.files import refuse_used

if TYPE_CHECKING:
    from metalearn.classifier.classifier import PictureClassifier

TABLES = (".csv", ".parquet")
KINDS = ("classes", "numbers")
MOST_CLASSES = 10  # a column of more different numbers is one of real numbers


def ended(main: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """A command on pictures or tables that reports its errors: the exit code in place of each."""

    @functools.wraps(main)
    def reported(arguments: Sequence[str]) -> int:
        try:
            return process.exit_code_of_process(lambda: main(arguments))
        except ValueError as error:
            return process.report_error(error, process.BAD_CONFIG)
        except BrokenPipeError:  # no failure of the command: see `metalearn.cli.run`
            raise
        except OSError as error:
            return process.report_error(error, process.FAILED)

    return reported


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("fit", __doc__)
    arg = parser.add_argument
    arg("folder", type=Path, metavar="FOLDER|TABLE", help="has a folder of pictures for each class; or .csv, .parquet")
    arg("--out", required=True, type=Path, metavar="CLASSIFIER", help="the output folder; new, or empty")
    arg("--backbone", metavar="NAME", help="the pretrained network (default: efficientnet_lite0)")
    arg("--weights", metavar="PATH", help="its weights, for a network of torchvision")
    arg("--head", default="auto", help="what learns (default: auto, the best in cross-validation)")
    arg("--folds", type=whole(2), default=5, help="parts of the cross-validation (default: 5)")
    arg("--strict", action="store_true", help="refuse damaged pictures and copies; else they are passed over")
    arg("--threads", type=whole(1), default=1, help="threads of torch (default: 1)")
    add_threshold(parser, "auto")
    of_table = parser.add_argument_group("of a table")
    of_table.add_argument("--target", metavar="COLUMN", help="the column to predict")
    of_network = "classes or numbers, as shipped (default: by the column); or a run of algorithm=pfn"
    of_table.add_argument("--network", metavar="RUN", help=of_network)
    of_table.add_argument("--plugins", type=names, metavar="PACKAGE,…", help="packages of yours, whose code may run")
    options = parser.parse_args(arguments)
    if options.folder.suffix.lower() in TABLES:
        for_pictures = ("backbone", "weights", "head", "strict", "threshold")
        others = [f"--{name}" for name in for_pictures if getattr(options, name) != parser.get_default(name)]
        if others:
            raise ConfigError(f"{', '.join(others)}: of pictures; a table has no use for it, leave it out")
        return fit_table(options)
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
    return process.print_all("\n".join([*summary(classifier), f"all in {options.out}; open report.html there"]))


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
    return process.print_all("\n".join(summary(classifier)))


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
    return process.print_all("\n".join([f"{len(classifier.classes_)} classes", *summary(classifier)]))


# Tables


def fit_table(options: argparse.Namespace) -> int:
    """Fits a table, and says what cross-validation finds; returns the exit code."""
    if options.target is None:
        raise ConfigError("--target: missing; a table needs it, type --target price")
    refuse_used("--out", options.out)
    process.set_up_process(options.threads)
    log_to_stderr()
    from metalearn.tables.estimators import SHIPPED, PFNClassifier, estimator

    frame, target, network = read_table(options.folder), options.target, options.network
    if target not in frame:
        columns = [str(name) for name in frame]
        hint = nearest(target, columns) or f"; it has {', '.join(columns[:10])}{', …' if len(columns) > 10 else ''}"
        raise ConfigError(f"--target={target}: {options.folder} has no such column{hint}")
    without = frame[target].isna()
    if without.all():
        raise ConfigError(f"--target={target}: is missing in every row of {options.folder}; type another column")
    if network is None:
        network = KINDS[frame[target].dtype.kind in "iuf" and frame[target].nunique() > MOST_CLASSES]
        print(f"{target}: {network}, by the network that comes with metalearn; --network names another", flush=True)
    model = estimator(SHIPPED / network if network in KINDS else network, plugins=options.plugins or ())
    of_classes = isinstance(model, PFNClassifier)
    if of_classes and options.folder.suffix.lower() == ".csv":
        # NA and the like are missing values among numbers, and texts among texts.
        labels = read_table(options.folder, [target])[target].mask(without)
        without = labels.isna()
        # Others than whole numbers stay texts: as numbers, 01 and 1, or 2 and 2.0, would be one class.
        whole = labels.dropna().str.fullmatch("0|-?[1-9][0-9]{0,14}").all()
        frame[target] = labels.astype(float) if whole else labels
    x, y = frame[~without].drop(columns=target), frame.loc[~without, target].to_numpy()
    # Where some are missing, pandas makes real numbers of whole ones. From 2⁵³ on all of them are whole.
    if y.dtype.kind == "f" and ((y % 1 == 0) & (abs(y) < 2**53)).all():
        y = y.astype(np.int64)
    if of_classes and len(set(y.tolist())) < 2:
        raise ConfigError(f"--target={target}: has one class, {y[0]}; type a column of two classes or more")
    try:
        model.fit(x, y)
    except ValueError as error:
        if not str(error).startswith("y: "):
            raise
        raise ConfigError(f"--target={target}: {str(error)[3:].replace('path=', '--network=')}") from error
    lines = [f"{len(y)} rows, {x.shape[1]} columns", *cross_validated(model, x, y, options.folds)]
    model.save(options.out)
    if without.any():
        lines.append(f"{without.sum()} rows without {target} are left out; metalearn predict answers for such rows")
    return process.print_all("\n".join([*lines, f"all in {options.out}"]))


def cross_validated(model: Any, x: Any, y: Any, folds: int) -> list[str]:
    """What is predicted of rows that were not known, in lines."""
    from sklearn.base import is_classifier
    from sklearn.metrics import r2_score
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict

    from metalearn.api.results import wilson

    most = int(np.unique(y, return_counts=True)[1].min()) if is_classifier(model) else len(y)
    if most < 2:
        return ["accuracy: not known: a class has one row"]
    cut = (StratifiedKFold if is_classifier(model) else KFold)(min(folds, most), shuffle=True, random_state=0)
    log.disabled = True  # the fit to all rows has said what is to say
    try:
        predicted = cross_val_predict(model, x, y, cv=cut)
    finally:
        log.disabled = False
    if not is_classifier(model):
        return [f"explains {r2_score(y, predicted):.1%} of the variance of rows not known (R²)"]
    right, guess = int((predicted == y).sum()), np.unique(y, return_counts=True)[1].max() / len(y)
    low, high = wilson(right, len(y))
    return [
        f"accuracy {right / len(y):.1%} of rows not known (95% interval {low:.1%} to {high:.1%}; always the most "
        f"frequent class: {guess:.1%})"
    ]


def read_table(path: Path, texts: Sequence[str] = ()) -> Any:
    """The data frame of a file. In a CSV file, the columns `texts` are read as texts, whatever they look like, and of
    texts, only an empty cell is missing. Raises ValueError if it cannot be read, or has no rows."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError(f"TABLE: needs pandas and more; type {install('tables')}") from error
    try:
        csv = path.suffix.lower() == ".csv"
        if csv:
            # A blank line is a row of a table of one column, but not at its ends.
            content = path.read_bytes().strip(b"\r\n")
            read_csv = functools.partial(pd.read_csv, skip_blank_lines=False)
            frame = read_csv(io.BytesIO(content), dtype=str, keep_default_na=False, na_values="")
            # NA, None and the like are missing among numbers; among texts they are values.
            for name, cells in read_csv(io.BytesIO(content)).items():
                if cells.dtype.kind in "iuf" and name not in texts:
                    frame[name] = cells.to_numpy()
        else:
            frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TABLE={path}: cannot be read ({error})") from error
    if not len(frame):
        raise ConfigError(f"TABLE={path}: has no rows")
    if csv and not isinstance(frame.index, pd.RangeIndex):
        raise ConfigError(f"TABLE={path}: lines have more cells than there are names; is there a comma at their ends?")
    if "Unnamed: 0" in frame:
        log.warning(
            "TABLE=%s: its first column has no name and is read as any other; is it an index? Leave it out then", path
        )
    return frame


# What the commands of a classifier share


def classifier_parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of a command that asks or changes a classifier."""
    parser = command_parser(command, about)
    arg = parser.add_argument
    arg("classifier", type=Path, metavar="CLASSIFIER", help="the folder that metalearn fit has made")
    arg("--weights", metavar="PATH", help="the weights of its network, if they are not in a package")
    arg("--threads", type=whole(1), default=1, help="threads of torch (default: 1)")
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
    process.set_up_process(threads)
    with process.importing():  # most of what one answer takes
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
