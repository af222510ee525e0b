"""Publishes what a run or `metalearn fit` has learned: a folder for other machines, without code and without paths.

    metalearn export outputs/protonet_omniglot/seed0 --out protonet_omniglot
    metalearn export classifier --out animals
    metalearn export classifier --out animals_onnx --format onnx
    metalearn export sold --out sold_onnx --format onnx
    metalearn export my_task --out my_task_onnx --format onnx

A classifier's folder has all that metalearn predict reads, weights included. With --format onnx or torch-export, it has
one program of the network and the head, compared with this one's answers, and README.md says how to run it elsewhere.
What metalearn fit has made of a table, and an adapted task of pictures, become such a program, too.

Of a run, the folder has params.safetensors, meta.json with its manifest.json, and the model card README.md; and
weights.safetensors, if the network began with weights of a file. RUN is a run folder, whose best checkpoint is taken,
or the folder of a checkpoint. meta.json says how to build and use the network: algorithm, model, preprocessing, ways,
shots, inner optimiser and steps. For its readers it has the test accuracy, the licence of the data, and the versions.
A part that a package of yours makes is only named: users of the model need the package, and admit it. Use the model by
metalearn.load, metalearn adapt, metalearn evaluate checkpoint=FOLDER, or init_from=FOLDER.

Exit codes: 0 done; 2 nothing that can be published.
"""

from collections.abc import Sequence
from pathlib import Path

from metalearn.app.process import print_all, set_up_process
from metalearn.cli.arguments import command_parser, names
from metalearn.cli.fit import ended
from metalearn.errors import ConfigError
from metalearn.saved.form import kind_of

FORMATS = ("folder", "onnx", "torch-export")

OPTIONS = {
    "run": ("network", "plugins", "without"), "classifier": ("format", "weights"), "table": ("format", "plugins"),
    "task": ("format", "network", "plugins"),
}  # fmt: skip
"""What RUN may be, and the options that are for it."""

UNKNOWN = {
    "test": "not known, so meta.json has no accuracy; only the best checkpoint of a completed run has been tested",
    "licence": "that of the data is not known to this program; type --licence TEXT",
}
"""The message for each fact that meta.json lacks."""


@ended
def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = command_parser("export", __doc__)
    arg = parser.add_argument
    arg(
        "run", type=Path, metavar="RUN", help="the folder of a run, a checkpoint, an adapted task, or what fit has made"
    )
    arg("--out", required=True, type=Path, metavar="FOLDER", help="the output folder; new, or empty")
    arg("--licence", metavar="TEXT", help="of the data of a run, or of the weights of a classifier")
    arg("--format", choices=FORMATS, help="of a classifier (default: folder); of a table or a task (default: onnx)")
    arg("--weights", metavar="PATH", help="of a classifier's network, if its folder does not have them")
    arg("--network", help="the class of the run's network, if it is not one of this program's")
    arg("--plugins", type=names, default=(), metavar="PACKAGE,…", help="packages of yours that it needs")
    without = "keys of the config whose paths stay here, if the network does without them"
    arg("--without", type=names, default=(), metavar="KEY,…", help=without)
    options = parser.parse_args(arguments)
    set_up_process(1)  # sets the threads of OpenMP, which reads them once, when torch is imported
    kind = str(kind_of(options.run))
    kind = kind if kind in OPTIONS else "run"
    for option in ("format", "weights", "network", "plugins", "without"):
        if getattr(options, option) and option not in OPTIONS[kind]:
            raise ConfigError(f"--{option}: is not for a {kind}, and RUN={options.run} is one; leave it out")
    out, licence, plugins = options.out, options.licence, options.plugins
    # These import torch, after the line above that sets its threads.
    if kind == "run":
        from metalearn.api.export import export

        facts = export(
            options.run, out, licence=licence, network=options.network, plugins=plugins, without=options.without,
            keys=("RUN", "--out"),
        )  # fmt: skip
        lines = [f"{name}: {text}" for name, text in UNKNOWN.items() if facts[name] is None]
    elif kind == "task":
        from metalearn.api.learner import load_task

        task = load_task(options.run, network=options.network, plugins=plugins)
        lines = task.export(out, format=options.format or "onnx", licence=licence, key="--out")
    elif kind == "table":
        from metalearn.tables.estimators import fitted

        model = fitted(options.run, plugins=plugins)
        lines = model.export(out, format=options.format or "onnx", licence=licence, key="--out")
    else:
        from metalearn.classifier.classifier import PictureClassifier

        classifier = PictureClassifier.load(options.run, weights=options.weights, key="RUN")
        lines = classifier.export(out, format=options.format or "folder", licence=licence, key="--out")
    return print_all("\n".join([*lines, str(out)]))
