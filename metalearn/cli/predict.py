"""Asks a classifier that `metalearn fit` has made: which class does each picture show, or none of them.

Prints a table, or writes CSV (columns file, label, probability, and one for each class) or JSON lines (.jsonl).

  metalearn predict classifier photo.jpg another.jpg
  metalearn predict classifier new_pictures --out answers.csv
  metalearn predict prices new_houses.csv --out answers.csv       what metalearn fit has made of a table
"""

import argparse
import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from metalearn.app.process import FAILED, OK, print_all, set_up_process
from metalearn.cli.arguments import names
from metalearn.cli.fit import TABLES, add_threshold, classifier_parser, ended, loaded, read_table
from metalearn.errors import ConfigError, log, log_to_stderr
from metalearn.saved.form import kind_of
from metalearn.storage.files import creating, is_folder, write_atomically

if TYPE_CHECKING:
    from metalearn.classifier.classifier import Answer

NONE = "none of these"
LEVELS = (0.05, 0.95)  # the quantiles of a real number that are written


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a picture could not be read."""
    parser = classifier_parser("predict", __doc__)
    arg = parser.add_argument
    arg("pictures", nargs="+", type=Path, metavar="PICTURES", help="files, or folders of them at any depth; or a table")
    arg("--out", type=Path, metavar="FILE", help="a new file: .csv or .jsonl; without it, a table is printed")
    arg("--plugins", type=names, metavar="PACKAGE,…", help="of a table: as for metalearn fit")
    add_threshold(parser, argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if kind_of(options.classifier) == "table":
        if "threshold" in options:
            parser.error("--threshold, --always-name: of pictures; leave them out for a table")
        return predict_table(options)
    out: Path | None = options.out
    check_answers(out, (".csv", ".jsonl"))
    classifier = loaded(options)
    if "threshold" in options:
        classifier.threshold = options.threshold
    from metalearn.api.pictures import seen
    from metalearn.classifier.backbones import features_from_cache

    labels = [str(label) for label in classifier.classes_]
    paths, classes = zip(*files_in(options.pictures, labels), strict=True)
    files, pictures, asked = list[str](), [], []
    for path, named, picture in zip(paths, classes, seen(paths, classifier.opened().form), strict=True):
        if isinstance(picture, str):
            log.warning("%s: cannot be read: %s", path, picture)
        else:
            files.append(str(path))
            pictures.append(picture)
            asked.append(named)
    features = features_from_cache(classifier.opened(), pictures)
    answers = classifier.answers_of(features)
    if line := classifier.too_good(features):
        log.warning("PICTURES: %s", line)
    if out is None:
        code = print_all(table(files, answers, labels))
    else:
        text = io.StringIO(newline="")
        if out.suffix == ".csv":
            writer = csv.writer(text)
            writer.writerow(["file", "label", "probability", *labels])
            for name, (label, best, each) in zip(files, answers, strict=True):
                shown = NONE if label is None else label
                writer.writerow([name, shown, f"{best:.6f}", *(f"{value:.6f}" for value in each)])
        else:  # a JSON object for each picture; `label` is null where it is none of the classes
            for name, answer in zip(files, answers, strict=True):
                by_class = dict(zip(labels, answer.probabilities.round(6).tolist(), strict=True))
                row = {"file": name, "label": answer.label, "probability": round(answer.probability, 6)}
                text.write(json.dumps(row | {"probabilities": by_class}) + "\n")
        write_atomically(out, text.getvalue())
        code = print_all(f"{len(files)} pictures: {out}")
    if asked and None not in asked:
        print_all("\n".join(accuracy(asked, answers, labels)))
    if broken := len(paths) - len(files):
        log.warning("%d of %d pictures could not be read", broken, len(paths))
    return code or (FAILED if broken else OK)


def predict_table(options: argparse.Namespace) -> int:
    """Answers for the rows of a table; returns the exit code."""
    if len(options.pictures) != 1 or options.pictures[0].suffix.lower() not in TABLES:
        paths = ", ".join(map(str, options.pictures))
        raise ConfigError(f"TABLE={paths}: must be one .csv or .parquet; {options.classifier} was made of a table")
    out: Path | None = options.out
    check_answers(out, TABLES)
    set_up_process(options.threads)
    log_to_stderr()
    from metalearn.tables.estimators import PFNClassifier, fitted

    model = fitted(options.classifier, plugins=options.plugins or ())
    frame = read_table(options.pictures[0], model.texts())
    import pandas as pd

    columns = list(getattr(model, "feature_names_in_", frame.columns))  # those of an array have no names
    missing = [name for name in columns if name not in frame]
    if missing:
        raise ConfigError(f"TABLE={options.pictures[0]}: has no column {missing[0]}, which the network was shown")
    x = frame[columns] if hasattr(model, "feature_names_in_") else frame.to_numpy()
    if isinstance(model, PFNClassifier):
        votes = model.predict_proba(x)
        answers = pd.DataFrame(votes, columns=[f"probability of {name}" for name in model.classes_])
        answers.insert(0, "label", model.classes_[votes.argmax(axis=1)])
    else:
        answers = pd.DataFrame(model.predict_quantiles(x, LEVELS), columns=[f"quantile {level:g}" for level in LEVELS])
        answers.insert(0, "mean", model.predict(x))
    if out is None:
        return print_all(answers.to_string(float_format="{:.4g}".format))
    with creating("--out", out):
        answers.to_csv(out, index=False) if out.suffix == ".csv" else answers.to_parquet(out, index=False)
    return print_all(f"{len(answers)} rows: {out}")


def check_answers(out: Path | None, suffixes: Sequence[str]) -> None:
    """Raises ConfigError if the file of `--out` is there already, has another ending, or lies in no folder."""
    if out is not None and (out.suffix not in suffixes or out.exists()):
        reason = "is there already" if out.exists() else f"must end in {' or '.join(suffixes)}"
        raise ConfigError(f"--out={out}: {reason}; type another name, such as answers.csv")
    if out is not None and not is_folder(out.parent):
        raise ConfigError(f"--out={out}: there is no folder {out.parent}; make it, or type another --out")


def files_in(paths: Sequence[Path], labels: list[str]) -> Iterator[tuple[Path, str | None]]:
    """The files, and the pictures below the folders, in the order of their names; each with the class that its folder
    is named by, if all of that argument are. Raises ValueError for a path without pictures."""
    from metalearn.api.pictures import queries_in

    for path in paths:
        if path.is_dir():
            queries = queries_in(path, labels, "PICTURES=")
            yield from zip(queries.paths, queries.classes or repeat(None), strict=False)
        elif path.exists():
            yield path, None
        else:
            raise ConfigError(f"PICTURES={path}: there is no such file or folder")


def accuracy(asked: Sequence[str], answers: "Sequence[Answer]", labels: Sequence[str]) -> list[str]:
    """How many are right, with the interval of Wilson, and the pairs that were confused most often, in lines."""
    from metalearn.api.results import wilson

    shown = [NONE if answer.label is None else str(answer.label) for answer in answers]
    right = sum(answer == truth for answer, truth in zip(shown, asked, strict=True))
    low, high = wilson(right, len(asked))
    wrong = Counter((truth, answer) for truth, answer in zip(asked, shown, strict=True) if answer != truth)
    lines = [
        f"accuracy {right / len(asked):.1%} (95% interval {low:.1%} to {high:.1%}), by the names of the folders; "
        f"{NONE}: {shown.count(NONE)} of {len(asked)}"
    ]
    if wrong:
        pairs = ", ".join(f"{truth} as {answer} {count}" for (truth, answer), count in wrong.most_common(5))
        lines.append(f"most often confused: {pairs}")
    return lines


def table(files: Sequence[str], answers: "Sequence[Answer]", labels: Sequence[str]) -> str:
    """A line for each picture: its file, the class, and how probable it is."""
    width = max(map(len, files), default=0)
    return "\n".join(
        f"{name:{width}}  {f'{NONE}; most like ' if answer.label is None else ''}"
        f"{labels[int(answer.probabilities.argmax())]}  {answer.probability:.1%}"
        for name, answer in zip(files, answers, strict=True)
    )
