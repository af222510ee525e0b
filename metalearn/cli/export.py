"""Publishes what a run or `metalearn fit` has learned: a folder for other machines, without code and without paths.

    metalearn export outputs/protonet_omniglot/seed0 --out protonet_omniglot
    metalearn export classifier --out animals
    metalearn export classifier --out animals_onnx --format onnx
    metalearn export sold --out sold_onnx --format onnx

A classifier's folder has all that metalearn predict reads, weights included. With --format onnx or torch-export, it has
one program of the network and the head, compared with this one's answers, and README.md says how to run it elsewhere.
What metalearn fit has made of a table becomes such a program, too.

Of a run, the folder has model.safetensors, model.json and the model card README.md; and weights.safetensors, if the
network began with weights of a file. RUN is a run folder, whose best checkpoint is taken, or the
folder of a checkpoint. model.json says how to build and use the network: algorithm, architecture, preprocessing, ways,
shots, inner optimiser and steps. For its readers it has the test accuracy, the data set and its licence, and the
versions. A part that a package of yours makes is only named: users of the model need the package, and admit it. Use the
model by metalearn.load, metalearn adapt, metalearn evaluate checkpoint=FOLDER, or init_from=FOLDER.

Exit codes: 0 done; 2 nothing that can be published.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from metalearn.app import fit_table
from metalearn.app.outcome import OK
from metalearn.app.process import set_up_process
from metalearn.cli.arguments import command_name, names
from metalearn.cli.fit import ended
from metalearn.errors import ConfigError, printable

FORMATS = ("folder", "onnx", "torch-export")

UNKNOWN = {
    "test": "not known, so model.json has no accuracy; only the best checkpoint of a completed run has been tested",
    "licence": "that of the data is not known to this program; type --licence TEXT",
}
"""The message for each fact that model.json lacks."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        command_name("export"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of a run, of a checkpoint, or of what metalearn fit has made"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the output folder; new, or empty")
    parser.add_argument("--licence", metavar="TEXT", help="of the data of a run, or of the weights of a classifier")
    parser.add_argument(
        "--format", choices=FORMATS, help="of a classifier (default: folder), or of a table (default: onnx)"
    )
    parser.add_argument("--weights", metavar="PATH", help="of a classifier's network, if its folder does not have them")
    parser.add_argument("--network", help="the class of the run's network, if it is not one of this program's")
    parser.add_argument(
        "--plugins", type=names, default=(), metavar="PACKAGE,…", help="packages of yours that it needs"
    )
    parser.add_argument(
        "--without", type=names, default=(), metavar="KEY,…",
        help="keys of model.json whose paths stay here, if the network does without them",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    return ended(lambda: publish(options))


def publish(options: argparse.Namespace) -> int:
    """Publishes; returns the exit code."""
    set_up_process(1)
    if (options.run / "classifier.json").exists():
        return publish_classifier(options)
    if fit_table.is_fitted(options.run):
        return publish_table(options)
    for option in ("format", "weights"):
        if getattr(options, option) is not None:
            raise ConfigError(
                f"--{option}={getattr(options, option)}: is for classifiers that metalearn fit has made, and "
                f"RUN={options.run} is none; leave it out"
            )
    from metalearn.api.export import export  # imports torch, after the line above

    facts = export(
        options.run, options.out, licence=options.licence, network=options.network, plugins=options.plugins,
        without=options.without, keys=("RUN", "--out"),
    )  # fmt: skip
    for name in ("test", "licence"):
        if facts[name] is None:
            print(f"{name}: {UNKNOWN[name]}")
    print(options.out)
    return OK


def publish_table(options: argparse.Namespace) -> int:
    """Publishes what was fitted to a table; returns the exit code."""
    for option in ("network", "without", "weights"):
        if getattr(options, option):
            raise ConfigError(f"--{option}: is not for tables, and RUN={options.run} is one; leave it out")
    from metalearn.api.exported_table import export
    from metalearn.api.tables import fitted

    model = fitted(options.run, plugins=options.plugins)
    said = export(model, options.out, file_format=options.format or "onnx", licence=options.licence, key="--out")
    print(printable("\n".join([said, str(options.out)])))
    return OK


def publish_classifier(options: argparse.Namespace) -> int:
    """Publishes a classifier; returns the exit code."""
    for option in ("network", "plugins", "without"):
        if getattr(options, option):
            raise ConfigError(f"--{option}: is for runs, and RUN={options.run} is a classifier; leave it out")
    from metalearn.classifier.classifier import PictureClassifier
    from metalearn.classifier.exported import export

    classifier = PictureClassifier.load(options.run, weights=options.weights, key="RUN")
    said = export(classifier, options.out, file_format=options.format or "folder", licence=options.licence, key="--out")
    print(printable("\n".join([*said, str(options.out)])))
    return OK
