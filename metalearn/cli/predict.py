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
from pathlib import Path
from typing import TYPE_CHECKING

from metalearn.app import fit_table
from metalearn.app.process import FAILED, OK, print_all
from metalearn.cli.arguments import names
from metalearn.cli.fit import add_threshold, classifier_parser, ended, loaded
from metalearn.errors import ConfigError, printable
from metalearn.reporting.to_stderr import log
from metalearn.saved.form import kind_of
from metalearn.storage.files import write_atomically

if TYPE_CHECKING:
    from metalearn.classifier.classifier import Answer

NONE = "none of these"


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a picture could not be read."""
    parser = classifier_parser("predict", __doc__)
    parser.add_argument(
        "pictures", nargs="+", type=Path, metavar="PICTURES", help="files, or folders of them at any depth; or a table"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="a new file: .csv or .jsonl; without it, a table is printed"
    )
    parser.add_argument("--plugins", type=names, metavar="PACKAGE,…", help="of a table: as for metalearn fit")
    add_threshold(parser, argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if kind_of(options.classifier) == "table":
        if "threshold" in options:
            parser.error("--threshold, --always-name: of pictures; leave them out for a table")
        return fit_table.predict(options)
    out: Path | None = options.out
    if out is not None and (out.suffix not in (".csv", ".jsonl") or out.exists()):
        reason = "is there already" if out.exists() else "must end in .csv or .jsonl"
        raise ConfigError(f"--out={out}: {reason}; type another name, such as answers.csv")
    classifier = loaded(options)
    if "threshold" in options:
        classifier.threshold = options.threshold
    from metalearn.api.pictures import seen
    from metalearn.classifier.backbones import features_from_cache

    paths, files, pictures = list(files_in(options.pictures)), list[str](), []
    for path, picture in zip(paths, seen(paths, classifier.opened().form), strict=True):
        if isinstance(picture, str):
            log.warning("%s: cannot be read: %s", path, picture)
        else:
            files.append(str(path))
            pictures.append(picture)
    features = features_from_cache(classifier.opened(), pictures)
    answers = classifier.answers_of(features)
    if line := classifier.too_good(features):
        log.warning("PICTURES: %s", line)
    labels = [str(label) for label in classifier.classes_]
    if out is None:
        code = print_all(printable(table(files, answers, labels)))
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
        code = print_all(printable(f"{len(files)} pictures: {out}"))
    if asked := classes_of(options.pictures, files, labels):
        print(printable("\n".join(accuracy(asked, answers, labels))))
    if broken := len(paths) - len(files):
        log.warning("%d of %d pictures could not be read", broken, len(paths))
    return code or (FAILED if broken else OK)


def files_in(paths: Sequence[Path]) -> Iterator[Path]:
    """The files, and the pictures below the folders, in the order of their names.

    Raises:
        ValueError: a path that is not there, or a folder without pictures.
    """
    from metalearn.tasks.common.pictures import picture_folders

    for path in paths:
        if path.is_dir():
            yield from (path / file for files in picture_folders(path, "PICTURES=").values() for file in files)
        elif path.exists():
            yield path
        else:
            raise ConfigError(f"PICTURES={path}: there is no such file or folder")


def classes_of(folders: Sequence[Path], files: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The class of each file, by its folder below one of `folders`; empty if a folder has no class's name."""
    from metalearn.tasks.common.pictures import one_form

    by_form, classes = {one_form(label): label for label in labels}, list[str]()
    for file in files:
        above = [folder for folder in folders if folder.is_dir() and Path(file).is_relative_to(folder)]
        name = one_form(Path(file).relative_to(above[0]).parent.as_posix()) if above else ""
        if name not in by_form:
            return []
        classes.append(by_form[name])
    return classes


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
