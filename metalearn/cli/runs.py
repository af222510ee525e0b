"""Several runs side by side: in one plot, or in a table."""

import sys
import threading
import urllib.parse
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path

from metalearn.app.local_server import LocalHandler, opened, serve
from metalearn.cli.arguments import command_parser, whole
from metalearn.errors import ConfigError, RunError, printable
from metalearn.reporting.index import (
    INDEX,
    comparison,
    curve_of,
    index_page,
    report_at,
    runs_below,
    text_columns,
    write_index,
)
from metalearn.runs.metrics import METRIC_NAMES, TESTS, difference, read_table, shown
from metalearn.storage.files import creating, is_folder

OK, FAILED, BAD_USAGE = 0, 1, 2

REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


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
        print(printable(f"error: {error}"), file=sys.stderr)
        return BAD_USAGE
    for curve in curves:
        if curve.seconds is None:
            print(
                f"{printable(curve.name)}: its metrics.jsonl has no elapsed_seconds, so it is drawn against steps only"
            )
    print(printable("\n".join(table)))
    print(drawn)
    return OK


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
    first, rows, others = tests[0], [], []
    for (name, _), test in zip(named, tests, strict=True):
        cells = [name, "no test yet" if test is None else shown(test.metric, *test.mean()), "", ""]
        if first is not None and test is not None and test is not first:
            delta = difference(first, test)
            cells[2] = shown(test.metric, delta.mean, delta.ci95, "+")
            cells[3] = f"paired, {len(test.values)} tasks" if delta.paired else "not paired"
            others += [] if delta.paired else [name]
        rows.append(cells)
    metric = next((METRIC_NAMES[test.metric] for test in tests if test is not None), "")
    lines = [text_columns([["run", f"test {metric}".rstrip(), f"difference to {named[0][0]}", ""], *rows])]
    if others:
        lines.append(
            f"{', '.join(others)}: other test tasks than those of {named[0][0]}; each interval is that of two "
            "independent means, which is wider"
        )
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
        print(printable(f"error: {error}"), file=sys.stderr)
        return BAD_USAGE if isinstance(error, FileNotFoundError) else FAILED
    print(printable(f"{runs} runs: {folder / INDEX}"))
    return OK


def watch(arguments: Sequence[str]) -> int:
    """Shows the runs below a folder in the browser, as they go: a local page that renews itself, with all curves, what
    is running, and how long it may still take.

    It listens on this machine alone, writes nothing, and ends with Ctrl-C. Runs may begin later.

      metalearn watch outputs
      metalearn watch outputs --port 8000
    """
    parser = command_parser("watch", watch.__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that holds the folders of runs")
    parser.add_argument("--port", type=whole(0), default=0, help="the port (default: 0, any that is free)")
    parser.add_argument("--every", type=whole(1), default=5, help="seconds until the page is renewed (default: 5)")
    options = parser.parse_args(arguments)
    try:
        if not is_folder(options.folder):
            raise ConfigError(f"{options.folder}: is no folder; type the one that holds the folders of runs")
        return serve(watched(options.folder, options.port, options.every))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE


def watched(folder: Path, port: int, every: int) -> ThreadingHTTPServer:
    """A server of the index of a folder, and of the reports that it links to, which waits for `serve`. Raises
    ConfigError if there is no such port, or it is taken."""
    one_at_a_time = threading.Lock()  # matplotlib draws in one thread only

    class IndexHandler(LocalHandler):
        def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
            address = urllib.parse.urlsplit(self.path).path
            if not self.is_ours():
                self.say(404, error="there is no such page")
                return
            try:
                with one_at_a_time:
                    runs = runs_below(folder)
                    content = index_page(folder, runs, every).encode() if address == "/" else None
                    content = content or report_at(folder, runs, address)
            except Exception as error:  # whatever is damaged, or gone meanwhile: the next request is answered
                self.say(500, error=printable(f"{type(error).__name__}: {error}"))
                return
            if content is None:
                self.say(404, error="there is no such page")
            else:
                # Scripts for the index alone: a report may come from elsewhere.
                more = {} if address == "/" else {"Content_Security_Policy": REPORT_POLICY}
                self.reply(200, content, "text/html; charset=utf-8", **more)

    return opened(IndexHandler, port)
