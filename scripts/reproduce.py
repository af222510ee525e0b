"""Regenerates the tables of published accuracies: runs the rows of conf/reproduce/*.yaml, and draws RESULTS.md.

    python scripts/reproduce.py                          every row that has no result yet, one after another, but for
                                                         the tables of photographs, which are not in this repository
    python scripts/reproduce.py --only maml_5w1s anil_5w1s --seeds 0 1
    python scripts/reproduce.py --jobs 2                 two runs at a time
    python scripts/reproduce.py --quick                  a hundred steps of each row, one seed: does all run here?
    python scripts/reproduce.py --list                   the rows, and which have results
    python scripts/reproduce.py --render                 draw RESULTS.md from results/ alone

It may be stopped at any time: the runs save, and the same command continues them. It prints the command of each run.
The run folder is outputs/reproduce/ROW/seedN, and the result is results/ROW_seedN.json. To run a row again, remove
both; a training whose checkpoint is needed and gone is run again by itself. A result whose row has another command by
now is shown with its own, and named. With --output FOLDER, and with --quick, runs, results and page go to another
folder. --tables FOLDER reads your own tables, from files like those of conf/reproduce.

Exit codes: 0 all done; 1 a run failed (the others were run); 2 usage; 130 or 143 stopped by a signal.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.environment import machine_name  # noqa: E402 (the path comes first)
from metalearn.cli.arguments import whole  # noqa: E402
from metalearn.errors import ConfigError  # noqa: E402
from metalearn.reporting.plots import by_inner_step, comparison  # noqa: E402
from metalearn.storage.files import creating, read_json, read_object, write_atomically  # noqa: E402
from scripts.reproduction.page import curves_of, page, panels_of  # noqa: E402
from scripts.reproduction.results import (  # noqa: E402
    Result,
    read_result,
    read_results,
    result_of_evaluation,
    result_of_run,
    result_path,
    seconds_of,
    write_result,
)
from scripts.reproduction.rows import TABLES, Row, Table, read_tables  # noqa: E402

QUICK_TEST = "trainer.test_tasks=600"
QUICK = ("trainer.steps=100", "trainer.val_every=50", "trainer.val_tasks=100", QUICK_TEST)
"""What --quick changes in every training; its evaluations have the test of it."""

OK, FAILED, BAD_USAGE = 0, 1, 2


class Places(NamedTuple):
    """The folders of runs and results, and the page."""

    runs: Path
    results: Path
    page: Path


class Job(NamedTuple):
    """One run of a row: its folder and its command. An evaluation also has the runs `of` whose checkpoints it takes."""

    row: Row
    seed: int
    run_dir: Path
    command: list[str]
    of: "list[Job]"


USUAL = Places(Path("outputs/reproduce"), Path("results"), Path("RESULTS.md"))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = _options(arguments)
    os.chdir(ROOT)
    try:
        return _reproduce(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE


def _reproduce(options: argparse.Namespace) -> int:
    tables = read_tables(options.tables)
    rows = _chosen(tables, options.only) if options.only or options.list else _usual(tables)
    places = _places(options)
    if not options.list:
        with creating("--output", places.page.parent):
            places.page.parent.mkdir(parents=True, exist_ok=True)
    changes = list(QUICK) if options.quick else []
    every = _chosen(tables, None)
    jobs = [_job(row, seed, every, places, changes) for row in rows for seed in _seeds(row, options)]
    jobs = [*(of for job in jobs for of in job.of), *jobs]
    jobs = list({job.run_dir: job for job in jobs}.values())
    if options.list:
        for job in jobs:
            print(f"{job.row.name:36} seed {job.seed}  {'done' if _is_done(job, places) else 'not run'}")
        return OK
    code = OK
    if not options.render:
        waiting = _waiting(jobs, places)
        print(f"{len(jobs)} runs, {len(jobs) - len(waiting)} of them done before", flush=True)
        code = run_all(waiting, places, options.jobs)
    for job in _outdated(tables, places, changes):
        reason = f"{_name(job)}: its result was made by another command than that of its row, or from another training"
        print(f"{reason}; to run it again, remove the result and {job.run_dir}", file=sys.stderr)
    render(tables, places)
    return code


def _outdated(tables: Sequence[Table], places: Places, changes: list[str]) -> list[Job]:
    """The runs whose results, which the page shows, do not count as done."""
    every = _chosen(tables, None)
    shown = [(row, result["seed"]) for row in every for result in read_results(places.results, row.name)]
    jobs = [_job(row, seed, every, places, changes) for row, seed in shown]
    return [job for job in jobs if not _is_done(job, places)]


def _waiting(jobs: Sequence[Job], places: Places) -> list[Job]:
    """The runs to do: those that have no result, the trainings that these evaluate and do not find complete, and all
    evaluations of a training that is done again."""
    undone = [job for job in jobs if not _is_done(job, places)]
    needed = [of for job in undone for of in job.of]
    again = [job for job in jobs if job in needed and job not in undone and not _is_trained(job)]
    for job in again:
        print(f"{_name(job)}: trains again, since {job.run_dir} holds no complete run to be evaluated", flush=True)
    return [job for job in jobs if job in undone or job in again or any(of in again for of in job.of)]


def run_all(jobs: Sequence[Job], places: Places, at_once: int) -> int:
    """Trains, then evaluates what has been trained; returns the exit code."""
    code = Runs([job for job in jobs if not job.of], places).run(at_once)
    if code not in (OK, FAILED):
        return code
    evaluations = []
    for job in jobs:
        if not job.of:
            continue
        undone = [of for of in job.of if not _is_done(of, places) or not _is_trained(of)]
        if undone:
            code = FAILED
            print(f"{_name(job)}: left out: it evaluates {_name(undone[0])}, which is not done", file=sys.stderr)
        else:
            evaluations.append(job)
    return max(code, Runs(evaluations, places).run(at_once))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows; --list shows all")
    parser.add_argument(
        "--seeds", nargs="+", type=whole(0), metavar="SEED", help="these seeds instead of the row's (but an ensemble's)"
    )
    parser.add_argument("--jobs", type=whole(1), default=1, metavar="N", help="runs at a time (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a hundred steps of each run, in another folder")
    parser.add_argument("--output", type=_absolute, metavar="FOLDER", help="folder of runs, results and page")
    parser.add_argument("--tables", type=_absolute, metavar="FOLDER", default=TABLES, help="other tables")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show the runs, and run nothing")
    instead.add_argument("--render", action="store_true", help="draw the page, and run nothing")
    return parser.parse_args(arguments)


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def _places(options: argparse.Namespace) -> Places:
    folder = options.output or (Path("outputs/reproduce_quick") if options.quick else None)
    return USUAL if folder is None else Places(folder / "runs", folder / "results", folder / "RESULTS.md")


def _chosen(tables: Sequence[Table], names: Sequence[str] | None) -> list[Row]:
    rows = {row.name: row for table in tables for row in table.rows}
    unknown = [name for name in names or [] if name not in rows]
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)}: no such row; allowed: {', '.join(rows)}")
    return [rows[name] for name in names or rows]


def _usual(tables: Sequence[Table]) -> list[Row]:
    return [row for table in tables if not table.on_request for row in table.rows]


def _seeds(row: Row, options: argparse.Namespace) -> list[int]:
    if row.ensemble:
        return row.seeds
    return options.seeds or (row.seeds[:1] if options.quick else row.seeds)


def _job(row: Row, seed: int, rows: Sequence[Row], places: Places, changes: list[str]) -> Job:
    run_dir = places.runs / row.name / f"seed{seed}"
    if row.of is None:
        command = ["train.py", *row.overrides, *changes, f"seed={seed}", f"hydra.run.dir={run_dir}"]
        return Job(row, seed, run_dir, command, of=[])
    trained = next(other for other in rows if other.name == row.of)
    of = [_job(trained, each, rows, places, changes) for each in (trained.seeds if row.ensemble else [seed])]
    checkpoint, *others = map(_checkpoint, of)
    members = [f"ensemble=[{','.join(map(str, others))}]"] if row.ensemble else []
    test = [QUICK_TEST] if QUICK_TEST in changes else []
    command = ["scripts/evaluate.py", f"checkpoint={checkpoint}", *members, *row.overrides, *test, f"output={run_dir}"]
    return Job(row, seed, run_dir, command, of)


def _checkpoint(job: Job) -> Path:
    return job.run_dir / "checkpoints/best"


def _name(job: Job) -> str:
    return f"{job.row.name} seed {job.seed}"


def _command_line(job: Job) -> str:
    return shlex.join(["python", *job.command])


def _is_done(job: Job, places: Places) -> bool:
    """Whether the result is that of this very command; for an evaluation, also of the present training."""
    result = _result(job, places)
    if result is None or result["command"] != _command_line(job):
        return False
    if not all(_is_done(of, places) for of in job.of):
        return False
    trained = [found for of in job.of if (found := _result(of, places)) is not None]
    return not trained or result["seconds"] == seconds_of(trained)


def _is_trained(job: Job) -> bool:
    """Whether the run folder holds a complete training that can be evaluated. A result may be older than the folder."""
    return _is_complete(job) and _checkpoint(job).exists()


def _is_complete(job: Job) -> bool:
    return bool(read_json(job.run_dir / "result.json").get("status") == "completed")


def _result(job: Job, places: Places) -> Result | None:
    path = result_path(places.results, job.row.name, job.seed)
    return read_result(path) if path.exists() else None


class Runs:
    """Runs to do, some at a time. After a signal the running ones save and stop, and no other starts."""

    def __init__(self, jobs: Sequence[Job], places: Places) -> None:
        self._jobs = jobs
        self._places = places
        self._running: set[subprocess.Popen[bytes]] = set()
        self._signal = 0

    def run(self, at_once: int) -> int:
        """Runs them all; returns the exit code."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with ThreadPoolExecutor(at_once) as pool:
                codes = [future.result() for future in [pool.submit(self._do, job) for job in self._jobs]]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signal:
            return 128 + self._signal
        return FAILED if any(codes) else OK

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        for process in list(self._running):
            process.terminate()

    def _do(self, job: Job) -> int:
        """One run, from its command to its result; returns its exit code."""
        if self._signal:
            return 128 + self._signal
        output = job.run_dir.with_suffix(".log")
        output.parent.mkdir(parents=True, exist_ok=True)
        name = _name(job)
        print(f"{name}: {_command_line(job)}\n  tail -f {output}", flush=True)
        if not job.of and not _checkpoint(job).exists():
            (job.run_dir / "result.json").unlink(missing_ok=True)  # or train.py would find the run complete
        facts = _facts(job)
        before = output.stat().st_size if output.exists() else 0
        code = self._wait_for(job, output)
        if code == OK:
            try:
                result = self._result(job, facts)
            except ConfigError as error:
                print(f"{name}: no result: {error}", file=sys.stderr, flush=True)
                return FAILED
            path = write_result(self._places.results, result)
            metric = job.row.metric
            print(f"{name}: {metric} {result[metric]:.4f} ± {result['ci95']:.4f}; {path}", flush=True)
        elif not self._signal:
            said = output.read_bytes()[before:].decode(errors="replace")
            last = "\n  ".join(said.splitlines()[-5:])
            print(f"{name}: failed with exit code {code}\n  {last}", file=sys.stderr, flush=True)
        return code

    def _wait_for(self, job: Job, output: Path) -> int:
        """Runs the command of a job, whose lines follow those of earlier tries; returns its exit code."""
        with output.open("a") as file:
            command = [sys.executable, *job.command]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            self._running.add(process)
            if self._signal:  # it came before the process was among the running ones
                process.terminate()
            code = process.wait()
            self._running.discard(process)
        return code

    def _result(self, job: Job, facts: Mapping[str, Any]) -> Result:
        if not job.of:
            return result_of_run(job.row, job.run_dir, facts)
        paths = [result_path(self._places.results, of.row.name, of.seed) for of in job.of]
        trained = [read_result(path) for path in paths]
        return result_of_evaluation(job.row, job.seed, trained, job.run_dir, facts)


def _facts(job: Job) -> dict[str, Any]:
    """A run's command, the date on which it began, and the commits and machines that it ran on. They are kept beside
    its log: a run may go on at another commit, and may be complete before it is recorded."""
    path = job.run_dir.with_suffix(".facts.json")
    kept = read_object(path) if path.exists() and job.run_dir.exists() and not job.of else {}
    if _is_complete(job) and kept.get("command") == _command_line(job):
        return kept
    facts = {
        "command": _command_line(job),
        "date": kept.get("date", datetime.date.today().isoformat()),
        "commit": _joined(kept.get("commit"), _commit()),
        "machine": _joined(kept.get("machine"), machine_name()),
    }
    write_atomically(path, json.dumps(facts, indent=2) + "\n")
    return facts


def _joined(before: str | None, now: str | None) -> str | None:
    """All that a run has had, in order: `a, then b`."""
    if before is None or now is None or now == before.split(_THEN)[-1]:
        return before or now
    return f"{before}{_THEN}{now}"


_THEN = ", then "


def _commit() -> str | None:
    """The checked-out commit, with a + if its code has changed since, or has new files; None if there is no git."""
    try:
        commit, changes = [
            subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=30).stdout.strip()  # noqa: S607
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *_CODE])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changes else "")


_CODE = ("train.py", "metalearn", "distributed", "conf")


def render(tables: Sequence[Table], places: Places) -> None:
    """Draws the page and the tables' pictures."""
    results = {row.name: read_results(places.results, row.name) for table in tables for row in table.rows}
    plots = {}
    for table in tables:
        path = places.results / f"{table.name}.png"
        if table.by_step and (panels := panels_of(table, results)):
            by_inner_step(panels, table.rows[0].metric, path)
        elif not table.by_step and (curves := curves_of(table, results)):
            comparison(curves, path)
        else:
            continue
        plots[table.name] = f"{places.results.name}/{table.name}.png"
    places.page.write_text(page(tables, results, plots))
    print(places.page)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
