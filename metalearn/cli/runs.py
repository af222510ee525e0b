"""Several runs side by side: in one plot, or in a table."""

from collections.abc import Sequence
from pathlib import Path

from metalearn.app.process import BAD_CONFIG, FAILED, print_all, report_error
from metalearn.cli.arguments import command_parser
from metalearn.errors import RunError
from metalearn.reporting.index import DRAWN_AS, INDEX, comparison, curve_of, text_columns, write_index
from metalearn.runs.metrics import METRIC_NAMES, TESTS, difference, read_table, shown
from metalearn.storage.files import creating, is_folder


def compare(arguments: Sequence[str]) -> int:
    """Compares the tests of several runs in a table, and draws their validations in one plot: against wall-clock time,
    and against meta-steps.

        metalearn compare outputs/maml_omniglot/seed0 outputs/protonet_omniglot/seed0
        metalearn compare first=outputs/maml_omniglot/seed0 second=outputs/maml_omniglot/fast --output both.png

    NAME=FOLDER gives a run a name; without NAME, or if the whole is a folder, it is the folder's path. Runs may still
    be running. The table has each run's difference to the first one with its 95% interval: of the same test tasks that
    of the differences task by task. Exit codes: 0 drawn; 2 a folder holds no validated run, or the runs cannot be
    compared.
    """
    parser = command_parser("compare", compare.__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or NAME=FOLDER")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="the plot (default: compare.png)")
    options = parser.parse_args(arguments)
    try:
        if options.output.suffix not in DRAWN_AS:
            raise ValueError(f"--output={options.output}: must end with {', '.join(DRAWN_AS)}; type --output=both.png")
        named = [named_run(run) for run in options.runs]
        curves = [curve_of(folder)._replace(name=name) for name, folder in named]
        metrics = {curve.metric for curve in curves}
        if len(metrics) > 1:
            names = " and ".join(sorted(metrics))
            raise ValueError(f"{' '.join(options.runs)}: have different metrics, {names}; draw each by itself")
        with creating("--output", options.output):
            drawn = comparison(curves, options.output)
        table = tests_side_by_side(named)
    except (OSError, ValueError) as error:
        return report_error(error, BAD_CONFIG)
    for curve in curves:
        if curve.seconds is None:
            print_all(f"{curve.name}: its metrics.jsonl has no elapsed_seconds, so it is drawn against steps only")
    return print_all("\n".join([*table, str(drawn)]))


def named_run(run: str) -> tuple[str, Path]:
    """The name and the folder in `FOLDER` or `NAME=FOLDER`."""
    name, equals, folder = run.partition("=")
    if not equals or is_folder(Path(run)):  # by default, a folder is named by what was typed, KEY=VALUE
        name = folder = run
    return name, Path(folder)


def tests_side_by_side(named: Sequence[tuple[str, Path]]) -> list[str]:
    """A line for each run: its test, and how far that is from the first one's; and what the intervals are of. Raises
    ValueError if a test.csv is damaged."""
    tests = [read_table(path) if (path := folder / TESTS).exists() else None for _, folder in named]
    first, rows = tests[0], []
    others, nameless = list[str](), list[str]()
    for (name, _), test in zip(named, tests, strict=True):
        cells = [name, "no test yet" if test is None else shown(test.metric, *test.mean()), "", ""]
        if first is not None and test is not None and test is not first:
            mean, ci95, paired = difference(first, test)
            cells[2] = shown(test.metric, mean, ci95, "+")
            cells[3] = f"paired, {len(test.values)} tasks" if paired else "not paired"
            if not paired:
                (others if all(first.digests) and all(test.digests) else nameless).append(name)
        rows.append(cells)
    metric = next((METRIC_NAMES[test.metric] for test in tests if test is not None), "")
    lines = [text_columns([["run", f"test {metric}".rstrip(), f"difference to {named[0][0]}", ""], *rows])]
    apart = "each interval is that of two independent means, which is wider"
    if others:
        lines.append(f"{', '.join(others)}: other test tasks than those of {named[0][0]}; {apart}")
    if nameless:
        lines.append(f"{', '.join(nameless)}: not known whether of the test of {named[0][0]}; {apart}")
    return lines


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
        return report_error(error, BAD_CONFIG if isinstance(error, FileNotFoundError) else FAILED)
    return print_all(f"{runs} runs: {folder / INDEX}")
