"""Several runs side by side: in one plot, or in a table."""

import sys
from collections.abc import Sequence
from pathlib import Path

from metalearn.cli.arguments import command_parser
from metalearn.errors import RunError, printable
from metalearn.reporting.plots import Curve, comparison, curve_of
from metalearn.reporting.report import INDEX, write_index
from metalearn.storage.files import creating, is_folder

OK, FAILED, BAD_USAGE = 0, 1, 2


def compare(arguments: Sequence[str]) -> int:
    """Draws the validations of several runs in one plot: against wall-clock time, and against meta-steps.

        metalearn compare outputs/maml_omniglot/seed0 outputs/protonet_omniglot/seed0
        metalearn compare first=outputs/maml_omniglot/seed0 second=outputs/maml_omniglot/fast --output both.png

    NAME=FOLDER gives a run a name in the plot; without NAME, or if the whole is a folder, it is the folder's path. Runs
    may still be running. Exit codes: 0 drawn; 2 a folder holds no validated run, or the runs cannot be compared.
    """
    parser = command_parser("compare", compare.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or NAME=FOLDER")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="the plot (default: compare.png)")
    options = parser.parse_args(arguments)
    try:
        curves = [named_curve(run) for run in options.runs]
        metrics = {curve.metric for curve in curves}
        if len(metrics) > 1:
            names = " and ".join(sorted(metrics))
            raise ValueError(f"{' '.join(options.runs)}: have different metrics, {names}; draw each by itself")
        with creating("--output", options.output):
            drawn = comparison(curves, options.output)
    except (OSError, ValueError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return BAD_USAGE
    for curve in curves:
        if curve.seconds is None:
            print(
                f"{printable(curve.name)}: its metrics.jsonl has no elapsed_seconds, so it is drawn against steps only"
            )
    print(drawn)
    return OK


def named_curve(run: str) -> Curve:
    """The curve of `FOLDER` or `NAME=FOLDER`.

    Raises:
        FileNotFoundError: the folder holds no metrics.jsonl.
        ValueError: the run has not been validated yet.
    """
    name, equals, folder = run.partition("=")
    if not equals or is_folder(Path(run)):  # by default, a folder is named by what was typed, KEY=VALUE
        name = folder = run
    return curve_of(Path(folder))._replace(name=name)


def index(arguments: Sequence[str]) -> int:
    """Writes index.html into a folder: all runs below it in a table of what was typed and what came out.

    Each links to its report. A click on the head of a column sorts by it. It may be the folder of a multirun,
    and runs may be under way.

      metalearn index outputs
    """
    parser = command_parser("index", index.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that holds the folders of runs")
    folder: Path = parser.parse_args(arguments).folder
    try:
        runs = write_index(folder)
    except (FileNotFoundError, RunError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return BAD_USAGE if isinstance(error, FileNotFoundError) else FAILED
    print(printable(f"{runs} runs: {folder / INDEX}"))
    return OK
