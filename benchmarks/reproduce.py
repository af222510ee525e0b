"""Trains and evaluates rows of RESULTS.md and of pages in docs/results again, and draws their tables.

    metalearn reproduce --only maml_5w1s --output again      one row, in the folder `again`
    metalearn reproduce --only maml_5w1s anil_5w1s --seeds 3
    metalearn reproduce                                      every row without a result, but for those on other pictures
    metalearn reproduce --list                               the rows, and which have results
    metalearn reproduce --render                             draw the pages from results/ alone

It may be stopped at any time: the run under way saves, and the same command goes on with it. The rows are those of
results/*.yaml; --tables FOLDER takes others. A row is one command for each seed: a training, which may begin with the
network of another row, or an evaluation of another row's checkpoints. Runs are in outputs/reproduce/ROW/seedN. Results
are lines of the .csv beside the .yaml of the row, and their curves (validations, accuracies after each inner step)
lines of the _curves.csv. To run a row again, remove its folder and its line, or give another folder by --output.

Exit codes: 0 all done; 1 a run failed (the others were run); 2 bad usage; 130 or 143 stopped by a signal.
"""

import argparse
import csv
import datetime
import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from metalearn.cli.arguments import command_parser, whole
from metalearn.config.saved import read_config
from metalearn.errors import ConfigError, real_number
from metalearn.reporting.index import curve_of
from metalearn.reporting.provenance import commit, cpu_name, version_of
from metalearn.storage.files import creating, read_json, read_object, write_atomically

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "results"
PAGES = {
    "results": "RESULTS.md", "drawn": "docs/results/drawn.md", "sequences": "docs/results/sequences.md",
    "stream": "docs/results/stream.md",
}  # fmt: skip
"""The files that tables are drawn in."""
LAST = "last"
OK, FAILED, BAD_USAGE = 0, 1, 2

COLUMNS = (
    "row", "seed", "algorithm", "dataset", "split", "ways", "shots", "queries", "accuracy", "mse", "bits", "ci95",
    "tasks", "task_list", "transductive", "seen_classes", "steps", "seconds", "workers", "command", "date", "commit",
    "machine",
)  # fmt: skip
"""Of a file of results. A cell is empty for None; cells that are not of `TEXTS` are JSON."""
TEXTS = ("row", "algorithm", "dataset", "split", "task_list", "command", "date", "commit", "machine")
NOT_ALWAYS = ("accuracy", "mse", "bits", "seen_classes")
"""Columns that a result has only with a value."""
CURVE_COLUMNS = ("row", "seed", "curve", "at", "value", "ci95", "seconds")
"""Of a file of curves: `at` is the inner step of the test, the meta-step of a validation, or a position."""
OF_TEST, OF_VALIDATION = "inner steps", "validation"
BY_POSITION = ("bits_by_position", "optimum_by_position", "window_optimum_by_position")
"""Curves of documents, as they are named in result.json."""

Result = dict[str, Any]
"""The result of a run; see `result_of`."""
Kept = dict[tuple[str, int], Result]
"""Results by row and seed."""


class ResultRow(NamedTuple):
    """One line of a table, from a yaml. `run` has overrides of train.py. With `of`, they are those of an evaluation of
    the checkpoints of the row that `of` names: each by itself or, as an `ensemble`, those of all its seeds together.
    With `start` it is a training that begins with the network of that row and seed. `counts` is what its inner steps
    are called.
    `papers` has the paper's figures by the number of inner steps, or `last`; `ci95` is their interval."""

    name: str
    metric: str
    overrides: list[str]
    papers: dict[str, float | None]
    seeds: list[int]
    method: str
    of: str | None = None
    start: str | None = None
    counts: str = "step"
    ensemble: bool = False
    ci95: float | None = None
    source: str = ""
    note: str = ""


class ResultTable(NamedTuple):
    """Rows that are compared with each other. `by_shots`: its columns are numbers of shots. Rows of a table that is
    `on_request` run only if they are named. `page` is one of `PAGES`. `group` is the name of its file: that of a set of
    data."""

    title: str
    rows: list[ResultRow]
    group: str
    by_shots: bool = False
    on_request: bool = False
    page: str = "results"


def read_tables(folder: Path) -> list[ResultTable]:
    """All tables, in the order of their yaml files' names.

    Raises:
        ConfigError: a file does not describe a table, or `of` or `start` names no row that trains.
    """
    tables = [table for path in sorted(folder.glob("*.yaml")) for table in _tables(path)]
    rows = [row for table in tables for row in table.rows]
    trained = [row.name for row in rows if row.of is None]
    for row in rows:
        for key, name in (("of", row.of), ("start", row.start)):
            if name not in (None, *trained):
                raise ConfigError(f"{row.name}: {key}: {name}: must name a row that trains: {', '.join(trained)}")
    return tables


def _tables(path: Path) -> list[ResultTable]:
    try:
        return [_table(content, path.stem) for content in yaml.safe_load(path.read_text(encoding="utf-8"))]
    except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{path}: does not describe tables ({reason}); see the files in {TABLES}") from error


def _table(content: dict[str, Any], group: str) -> ResultTable:
    metric, common = content.pop("metric", "accuracy"), content.pop("all", "").split()
    rows = [_row(name, metric, common, **fields) for name, fields in content.pop("rows").items()]
    table = ResultTable(rows=rows, group=group, **content)
    if table.page not in PAGES:
        raise ValueError(f"page: {table.page} is none of {', '.join(PAGES)}")
    return table


def _row(name: str, metric: str, common: Sequence[str], *, run: str, paper: Any = None, **fields: Any) -> ResultRow:
    """The row that a yaml describes. It may override what its table says in `all`."""
    papers = {str(after): value for after, value in (paper if isinstance(paper, Mapping) else {LAST: paper}).items()}
    for value in papers.values():
        if value is not None:
            real_number(name, value)
    overridden = {override.partition("=")[0] for override in run.split()}
    overrides = [*run.split(), *(override for override in common if override.partition("=")[0] not in overridden)]
    fields.setdefault("seeds", [0] if fields.get("ensemble") else [0, 1])
    return ResultRow(name, metric, overrides, papers, **fields)


# Runs


class RowRun(NamedTuple):
    """One run of a row: its command and its folder, and the trainings `of` whose checkpoints it takes."""

    row: ResultRow
    seed: int
    folder: Path
    command: list[str]
    of: "list[RowRun]"

    @property
    def name(self) -> str:
        return f"{self.row.name} seed {self.seed}"

    @property
    def key(self) -> tuple[str, int]:
        return self.row.name, self.seed

    @property
    def command_line(self) -> str:
        return shlex.join(["python", *self.command])

    @property
    def with_all_before(self) -> "list[RowRun]":
        """The run after those that it needs."""
        return [*(run for of in self.of for run in of.with_all_before), self]


def run_of(row: ResultRow, seed: int, rows: Mapping[str, ResultRow], output: Path) -> RowRun:
    """The run of a row; `rows` has all rows, and `output` is the folder of `--output`, or empty."""
    runs = output / ("outputs/reproduce" if output == Path() else "runs")
    folder = runs / row.name / f"seed{seed}"
    if row.of is None:
        before = [run_of(rows[row.start], seed, rows, output)] if row.start else []
        start = [f"init_from={run.folder}/checkpoints/best" for run in before]
        command = ["train.py", *row.overrides, *start, f"seed={seed}", f"hydra.run.dir={folder}"]
        return RowRun(row, seed, folder, command, before)
    of = [run_of(rows[row.of], each, rows, output) for each in (rows[row.of].seeds if row.ensemble else [seed])]
    first, *others = [str(run.folder / "checkpoints/best") for run in of]
    members = [f"ensemble=[{','.join(others)}]"] if row.ensemble else []
    command = ["scripts/evaluate.py", f"checkpoint={first}", *members, *row.overrides, f"output={folder}"]
    return RowRun(row, seed, folder, command, of)


def is_done(run: RowRun, kept: Kept) -> bool:
    """Whether there is a result of this very command; for an evaluation, of the present trainings."""
    if run.key not in kept or not all(is_done(of, kept) for of in run.of):
        return False
    result = kept[run.key]
    of_these = run.row.of is None or result["seconds"] == math.fsum(kept[of.key]["seconds"] for of in run.of)
    return result["command"] == run.command_line and of_these


def is_trained(run: RowRun) -> bool:
    """Whether the folder holds a complete training that can be evaluated: a result may come from elsewhere."""
    complete = read_json(run.folder / "result.json").get("status") == "completed"
    return complete and (run.folder / "checkpoints/best").exists()


def run_all(runs: Sequence[RowRun], kept: Kept, tables: Sequence[ResultTable], output: Path) -> int:
    """Trains, then evaluates, and keeps each result; returns the exit code. After a signal the run under way saves, and
    no other starts."""
    processes, signals, failed = list[subprocess.Popen[bytes]](), list[int](), False

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for process in processes[-1:]:
            process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    needed = {of.folder for run in runs if not is_done(run, kept) for of in run.with_all_before[:-1]}
    for run in sorted(runs, key=lambda run: run.row.of is not None):
        if is_done(run, kept) and (is_trained(run) or run.folder not in needed):
            continue
        if undone := [of.name for of in run.of if not is_done(of, kept) or not is_trained(of)]:
            failed = True
            print(f"{run.name}: left out: it needs {undone[0]}, which is not done", file=sys.stderr)
            continue
        log = run.folder.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{run.name}: {run.command_line}\n  tail -f {log}", flush=True)
        if run.row.of is None and not is_trained(run):
            (run.folder / "result.json").unlink(missing_ok=True)  # or train.py would find the run complete
        with log.open("wb") as file:
            command = [sys.executable, *run.command]
            # In a session of its own, a run sees no Ctrl-C of the terminal: `stop` ends it, once.
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True))
            code = processes[-1].wait()
        if signals:
            return 128 + signals[0]
        if code != OK:
            last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            print("\n  ".join([f"{run.name}: failed with exit code {code}", *last]), file=sys.stderr, flush=True)
            failed = True
            continue
        try:
            result = kept[run.key] = result_of(run, kept)
        except ConfigError as error:
            print(f"{run.name}: no result: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        group = next(table.group for table in tables if run.row in table.rows)
        write_results(output / "results", group, [row.name for t in tables if t.group == group for row in t.rows], kept)
        print(f"{run.name}: {run.row.metric} {result[run.row.metric]:.4f} ± {result['ci95']:.4f}", flush=True)
    return FAILED if failed else OK


def result_of(run: RowRun, kept: Kept) -> Result:
    """The result of a complete run. An evaluation has the steps, seconds and workers of its training (an ensemble the
    seconds of all) and, if the row names no others, its algorithm and dataset.

    Raises:
        ConfigError: its test has not what the row asks for.
    """
    row, saved = run.row, read_object(run.folder / "result.json")
    test = saved.get("test") or {}
    if test.get(row.metric) is None:
        raise ConfigError(f"{run.folder}: its test has no {row.metric}; type the metric of its dataset in the table")
    missing = [after for after in row.papers if after not in (LAST, *test["by_step"])]
    if missing:
        steps = ", ".join(test["by_step"])
        raise ConfigError(f"paper: the test has inner steps {steps}, and not {missing[0]}; type algorithm.eval_steps")
    if row.of:
        trained = [kept[of.key] for of in run.of]
        typed = dict(override.split("=", 1) for override in row.overrides)
        choices = {key: typed.get(key, trained[0][key]) for key in ("algorithm", "dataset")}
        took = trained[0] | {"seconds": math.fsum(result["seconds"] for result in trained)}
        config, validation = run.folder / "config.yaml", None
    else:
        choices = read_config(run.folder / ".hydra/hydra.yaml")["hydra"]["runtime"]["choices"]
        took, config, curve = saved, run.folder / ".hydra/config.yaml", curve_of(run.folder)
        seconds = [round(value, 1) for value in curve.seconds or []]
        values = [round(value, 5) for value in curve.values]
        validation = {"steps": curve.steps, "seconds": seconds, "values": values}
    dataset = read_config(config)["dataset"]
    if dataset.get("test") == "stream":
        from metalearn.tasks.omniglot import STREAM  # it takes torch, for seconds

        dataset |= STREAM._asdict() | {"eval_queries": STREAM.queries}
    # The inner steps of a document are its chunks, so their figures are those by position.
    figures = (*BY_POSITION, "ci95_by_position") if BY_POSITION[0] in test else ()
    # Of a long curve every fiftieth is enough, and 600 lines are nothing to read.
    shown = [step for step in test["by_step"] if int(step) <= 100 or int(step) % 50 == 0] if not figures else []
    return {
        "row": row.name,
        **{key: choices[key] for key in ("algorithm", "dataset")},
        **{key: dataset.get(key) for key in ("split", "ways", "shots")},
        "queries": dataset.get("eval_queries", dataset.get("queries")),
        **{key: test.get(key) for key in (row.metric, "ci95", "tasks", "task_list", "transductive")},
        **{key: {step: test[key][step] for step in shown} for key in ("by_step", "ci95_by_step")},
        **{key: test[key] for key in (*figures, "seen_classes") if key in test},
        **{key: took[key] for key in ("steps", "seconds")},
        "seed": run.seed,
        "workers": took["workers"],
        "command": run.command_line,
        "date": datetime.date.today().isoformat(),
        "commit": commit(ROOT),
        "machine": machine_name(),
        "validation": validation,
    }


def machine_name() -> str:
    """The processor, its cores, NVIDIA's GPUs if their driver is loaded, and the version of torch, in one line."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    facts = [line.partition(":") for path in files for line in path.read_text().splitlines()]
    gpus, cores = [name.strip() for fact, _, name in facts if fact.startswith("Model")], os.cpu_count() or 1
    return ", ".join([cpu_name(), f"{cores} core{'s' * (cores > 1)}", *gpus, f"torch {version_of('torch')}"])


def read_results(folder: Path) -> Kept:
    """The results of all groups in a folder, with their curves.

    Raises:
        ConfigError: a file holds something else, such as the marks of a merge.
    """
    kept: Kept = {}
    for path in sorted(folder.glob("*_curves.csv")):
        table = path.with_name(f"{path.name.removesuffix('_curves.csv')}.csv")
        for cells in _lines_of(table, COLUMNS):
            cells = {k: v for k, v in cells.items() if v or k not in NOT_ALWAYS}
            result: Result = {k: (v if k in TEXTS else json.loads(v)) if v else None for k, v in cells.items()}
            kept[result["row"], result["seed"]] = result | {"by_step": {}, "ci95_by_step": {}, "validation": None}
        for cells in _lines_of(path, CURVE_COLUMNS):
            if (key := (cells["row"], int(cells["seed"]))) not in kept:  # its line was removed, to run it again
                continue
            result, value = kept[key], float(cells["value"])
            if cells["curve"] in BY_POSITION:
                result.setdefault(cells["curve"], {})[cells["at"]] = value
                if cells["ci95"]:
                    result.setdefault("ci95_by_position", {})[cells["at"]] = float(cells["ci95"])
                continue
            if cells["curve"] == OF_TEST:
                result["by_step"][cells["at"]], result["ci95_by_step"][cells["at"]] = value, float(cells["ci95"])
                continue
            curve = result["validation"] = result["validation"] or {"steps": [], "seconds": [], "values": []}
            curve["steps"].append(int(cells["at"]))
            curve["values"].append(value)
            curve["seconds"] += [float(cells["seconds"])] if cells["seconds"] else []
    return kept


def _lines_of(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file, strict=True))
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); mend it") from error
    for number, cells in enumerate(lines, start=2):
        if tuple(cells) != tuple(columns) or None in cells.values():
            raise ConfigError(f"{path}, line {number}: is not of the columns {', '.join(columns)}; mend it")
    return lines


def write_results(folder: Path, group: str, rows: Sequence[str], kept: Kept) -> None:
    """Writes the results of a group's rows, and their curves."""
    results = [kept[key] for key in sorted(kept) if key[0] in rows]
    lines, curves = [list(COLUMNS)], [list(CURVE_COLUMNS)]
    for result in results:
        values = [(name, result.get(name)) for name in COLUMNS]
        lines.append(["" if v is None else v if name in TEXTS else json.dumps(v) for name, v in values])
        start, validation = [result["row"], result["seed"]], result["validation"] or {"steps": [], "values": []}
        for at, value in result["by_step"].items():
            curves.append([*start, OF_TEST, at, value, result["ci95_by_step"][at], ""])
        for name in BY_POSITION:
            intervals = result.get("ci95_by_position", {}) if name == BY_POSITION[0] else {}
            curves += [[*start, name, at, v, intervals.get(at, ""), ""] for at, v in result.get(name, {}).items()]
        points = zip(validation["steps"], validation["values"], validation.get("seconds") or repeat(""), strict=False)
        curves += [[*start, OF_VALIDATION, at, value, "", seconds] for at, value, seconds in points]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((f"{group}.csv", lines), (f"{group}_curves.csv", curves)):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(content)
        write_atomically(folder / name, text.getvalue())


# The command


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = command_parser("reproduce", __doc__)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows; --list shows all")
    parser.add_argument("--seeds", nargs="+", type=whole(0), metavar="SEED", help="instead of the row's")
    parser.add_argument("--output", type=Path, default=ROOT, metavar="FOLDER", help="folder of runs, results and page")
    parser.add_argument("--tables", type=Path, default=TABLES, metavar="FOLDER", help="other tables")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show the runs, and run nothing")
    instead.add_argument("--render", action="store_true", help="draw the page, and run nothing")
    options = parser.parse_args(arguments)
    options.tables, options.output = options.tables.absolute(), options.output.absolute()
    os.chdir(ROOT)  # so that commands can be repeated there
    try:
        return _reproduce(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE


def _reproduce(options: argparse.Namespace) -> int:
    # It imports this module.
    from benchmarks.results_page import BESIDE_PAPERS, PICTURES, curves_of, curves_picture, page, rows_picture

    tables, output = read_tables(options.tables), Path() if options.output == ROOT else options.output
    rows = {row.name: row for table in tables for row in table.rows}
    if unknown := [name for name in options.only or [] if name not in rows]:
        raise ConfigError(f"--only {' '.join(unknown)}: no such row; allowed: {', '.join(rows)}")
    usual = [row.name for table in tables if options.list or not table.on_request for row in table.rows]
    runs = [
        run_of(rows[name], seed, rows, output)
        for name in options.only or usual
        for seed in (rows[name].seeds if rows[name].ensemble else options.seeds or rows[name].seeds)
    ]
    runs = list({run.folder: run for each in runs for run in each.with_all_before}.values())
    kept = read_results(output / "results")
    if options.list:
        print("\n".join(f"{run.name:50} {'done' if is_done(run, kept) else 'not run'}" for run in runs))
        return OK
    with creating("--output", output):
        output.mkdir(parents=True, exist_ok=True)
    code = OK if options.render else run_all(runs, kept, tables, output)
    by_row: dict[str, list[Result]] = {name: [] for name in rows}
    for (name, seed), result in sorted(kept.items()):
        if name not in rows:
            raise ConfigError(f"{name}: has a result and no row; remove its lines in results/, or bring the row back")
        by_row[name].append(result)
        if not is_done(run := run_of(rows[name], seed, rows, output), kept):
            reason = "its result was made by another command than that of its row, or from another training"
            print(f"{run.name}: {reason}; to run it again, remove its line and {run.folder}", file=sys.stderr)
    for name in dict.fromkeys(table.page for table in tables):
        shown = [table for table in tables if table.page == name]
        written = {output / PAGES[name]: page(shown, by_row)}
        if name in PICTURES and (curves := curves_of(shown, by_row)):
            written[output / PICTURES[name].path] = curves_picture(PICTURES[name], curves)
        for table in shown:
            if table.title in BESIDE_PAPERS and any(by_row[row.name] for row in table.rows):
                written[output / BESIDE_PAPERS[table.title]] = rows_picture(table.rows, by_row)
        for path, text in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
            print(path)
    return code
