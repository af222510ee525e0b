"""Publishes the model of a run: a folder with model.safetensors and model.json, without code and without paths.

    metalearn export outputs/protonet_omniglot/seed0 --out protonet_omniglot

RUN is a run folder, whose best checkpoint is taken, or the folder of a checkpoint. model.json says how to build and use
the network: algorithm, architecture, preprocessing, ways, shots, inner optimiser and steps. For its readers it has the
test accuracy, the data set and its licence, and the versions. A part that a package of yours makes is only named: users
of the model need the package, and admit it. Use the model by metalearn.load, metalearn adapt, metalearn evaluate
checkpoint=FOLDER, or init_from=FOLDER. Exit codes: 0 done; 2 nothing that can be published.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from metalearn.app.outcome import OK, exit_code_of_process
from metalearn.app.process import set_up_process
from metalearn.cli.arguments import command_name, names

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
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, or of a checkpoint")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the output folder; new, or empty")
    parser.add_argument("--licence", metavar="TEXT", help="that of your pictures, or of a data set that is not known")
    parser.add_argument("--network", help="the class of the run's network, if it is not one of this program's")
    parser.add_argument(
        "--plugins", type=names, default=(), metavar="PACKAGE,…", help="packages of yours that it needs"
    )
    options = parser.parse_args(arguments)
    return exit_code_of_process(lambda: publish(options))


def publish(options: argparse.Namespace) -> int:
    """Publishes; returns the exit code."""
    set_up_process(1)
    from metalearn.api.export import export  # imports torch, after the line above

    facts = export(
        options.run, options.out, licence=options.licence, network=options.network, plugins=options.plugins,
        keys=("RUN", "--out"),
    )  # fmt: skip
    for name in ("test", "licence"):
        if facts[name] is None:
            print(f"{name}: {UNKNOWN[name]}")
    print(options.out)
    return OK
