"""Adapts what a run has learned to pictures of yours, and predicts the classes of others.

    metalearn adapt --model outputs/protonet_omniglot/seed0 --support my_folder --query other_folder --out out

--model is a run folder (its best checkpoint), a checkpoint folder, or a folder that metalearn export has written. In
--support, each folder with pictures is a class, named by its path. --query may have class folders of the same names, or
just pictures.

    metalearn adapt --model outputs/protonet_omniglot/seed0 --support my_folder --export program --format onnx

writes one program of the adapted network, which runs without this one; README.md in its folder says how.

    metalearn adapt --model outputs/ttt_texts/base --text book.txt

reads a text and learns from it (algorithm=reading): prints the bits of a byte, and how the text might go on.

--out gets predictions.csv (file, label, probability, and a column for each class) and page.png (the queries beside the
support pictures of their label); and, if the classes of the queries are known, confusion.csv, confusion.png and
accuracy.json. Exit codes: 0 done; 1 failed; 2 bad usage, or a folder, a model or a picture that cannot be used.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metalearn.app.process import OK, print_all, set_up_process
from metalearn.cli.arguments import command_parser, names, whole
from metalearn.cli.export import FORMATS
from metalearn.cli.fit import ended
from metalearn.errors import ConfigError
from metalearn.storage.files import creating, refuse_used

if TYPE_CHECKING:
    from metalearn.api.learner import Prediction
    from metalearn.api.pictures import Found


CONTINUED = 200  # bytes that are drawn after a text


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("adapt", __doc__)
    arg = parser.add_argument
    arg("--model", required=True, type=Path, metavar="FOLDER", help="of a run, a checkpoint or a published model")
    arg("--support", type=Path, metavar="FOLDER", help="a folder for each class")
    arg("--text", type=Path, metavar="FILE", help="a text, for a model of algorithm=reading")
    arg("--query", type=Path, metavar="FOLDER", help="pictures, or a folder for each class")
    arg("--out", type=Path, metavar="FOLDER", help="the output folder; new, or empty")
    arg("--export", type=Path, metavar="FOLDER", help="a new folder for a program of the network")
    arg("--format", choices=FORMATS[1:], help="of that program (default: onnx)")
    arg("--network", help="the class of the model's network, if it is not one of this program's")
    arg("--plugins", type=names, default=(), metavar="PACKAGE,…", help="packages of yours that it needs")
    arg("--transductive", action="store_true", help="normalise all queries together, not each by the support alone")
    arg("--threads", type=whole(1), default=1, help="threads of torch (default: 1)")
    options = parser.parse_args(arguments)
    if (options.text is None) == (options.support is None):
        raise ConfigError("--support, --text: type one of them: a folder of pictures, or a text")
    if options.text is not None:
        return read_text(options)
    out: Path | None = options.out
    if (out is None) != (options.query is None) or (out is None and options.export is None):
        raise ConfigError("--query, --out: type both; or, for a program of the adapted network, --export FOLDER")
    if options.format is not None and options.export is None:
        raise ConfigError(f"--format={options.format}: is for a program; type --export FOLDER as well")
    for option, folder in (("--out", out), ("--export", options.export)):
        if folder is not None:
            refuse_used(option, folder)
    set_up_process(options.threads)
    # These import torch, after the line above.
    from metalearn.api.learner import Classification, load
    from metalearn.api.pictures import queries_in, support_in

    support = support_in(options.support)
    assert support.classes is not None
    queries = None if out is None else queries_in(options.query, support.classes)
    learner = load(
        options.model, network=options.network, plugins=options.plugins, transductive=options.transductive,
        key="--model",
    )  # fmt: skip
    if learner.form is None:
        advice = "type --text" if learner.taught.algorithm.stream else "type a model of pictures"
        raise ConfigError(f"--model={options.model}: learns of no pictures; {advice}")
    task = learner.adapt(support.paths, support.classes)
    assert isinstance(task, Classification)
    if options.export is not None:
        lines = task.export(options.export, format=options.format or FORMATS[1], key="--export")
        print_all("\n".join([*lines, str(options.export)]))
    if out is not None and queries is not None:
        predictions = task.predict(queries.paths)
        with creating("--out", out):
            out.mkdir(parents=True, exist_ok=True)
        report(out, support, queries, predictions, learner.transductive)
    return OK


def read_text(options: argparse.Namespace) -> int:
    """Reads `--text`, and prints what it costs and how it might go on; returns the exit code."""
    if unused := [f"--{name}" for name in ("query", "out", "export", "format") if getattr(options, name) is not None]:
        raise ConfigError(f"{', '.join(unused)}: is for pictures; leave it out with --text")
    try:
        content = options.text.read_bytes()
    except OSError as error:
        raise ConfigError(f"--text={options.text}: cannot be read: {error.strerror}") from error
    set_up_process(options.threads)
    # This imports torch, after the line above.
    from metalearn.api.learner import load

    learner = load(options.model, network=options.network, plugins=options.plugins, key="--model")
    if learner.taught.algorithm.stream is None:
        raise ConfigError(f"--model={options.model}: reads no texts; type a run of algorithm=reading")
    if len(content) < 2:
        raise ConfigError(f"--text={options.text}: has {len(content)} bytes; give a text of two or more")
    begun = learner.adapt(content[:1])
    print(f"{begun.bits(content[1:]):.3f} bits a byte, each before it was learned from ({len(content):,} bytes)")
    return print_all(f"it might go on: {begun.read(content[1:]).continuation(CONTINUED)!r}")


def report(
    out: Path, support: "Found", queries: "Found", predictions: "Sequence[Prediction]", transductive: bool
) -> None:
    """Writes the tables and pictures, and prints the accuracy if the classes of the queries are known."""
    from metalearn.api import results
    from metalearn.api.pictures import in_support, summary

    labels = list(dict.fromkeys(support.classes or ()))
    results.write_predictions(out / "predictions.csv", queries.files, predictions, labels)
    results.page(out / "page.png", support, queries, predictions)
    print(f"{summary(support)}; {len(predictions)} queries")
    if repeated := in_support(queries, support):
        print(f"support pictures among the queries: {repeated}; these say nothing about new pictures")
    if queries.classes is None:
        print_all(f"no accuracy: {queries.why}")
    else:
        table = results.confusion(predictions, queries.classes, labels)
        rows = [[label, *row] for label, row in zip(labels, table, strict=True)]
        results.write_csv(out / "confusion.csv", ["true label", *labels], rows)
        results.confusion_matrix(out / "confusion.png", table, labels)
        figures = results.accuracy(predictions, queries.classes)
        figures |= {"in_support": repeated, "transductive": transductive}
        (out / "accuracy.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        low, high = figures["interval95"]
        interval = f"95% interval {low:.2%} to {high:.2%}, {figures['pictures']} pictures"
        print(f"accuracy {figures['accuracy']:.2%} ({interval})")
    print(f"all in {out}")
