"""Checks a GPU machine in less than thirteen and a half minutes: right results, speed, memory. Writes a table.

    metalearn gpu-check                          all parts on the GPU
    metalearn gpu-check --only layers gradients
    metalearn gpu-check --device cpu --short     checks the check: tiny sizes, no GPU

Parts:
    machine     what is measured on
    layers      outputs, first and second derivatives beside the CPU's, in float64 and float32
    gradients   meta-gradients of every network and algorithm beside the CPU's, in float64 and float32
    algorithms  5 steps of every algorithm; the float64 parameters beside the CPU's
    resident    whole steps that stay on the GPU: speed, equal bits in another run and in other chunks, no wait
    photographs steps of MAML on ResNet-12, 84×84 pixels, in each precision, with the fraction of the GPU's own rate
    speed       meta-gradients as in metalearn bench, with the fraction of the device's own limit
    recipe      500 steps of MAML as Finn et al. 2017 trained it, the hours of 60,000 of them, and memory that stays
    worlds      train.py with strategy rpc and ddp (NCCL): one worker and, where there are two GPUs, two; needs Hydra

Every part runs in a process of its own and has a time limit. What fails is a row with its error, and the others go on.
The results are gpu_check.json and gpu_check.md in the folder of --output.

Exit codes: 0 all passed, or left out with a reason; 1 something failed; 2 usage.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.ways import ROOT
from metalearn.cli.arguments import command_parser, make_output
from metalearn.nn.surroundings import compute_with

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"

ERROR_LINES = 20
"""The last lines of an error that a row keeps: one screen."""


class CheckRow(NamedTuple):
    """One item of a part: its state, its figures by name, and the error or the reason why it was left out."""

    part: str
    name: str
    state: str
    seconds: float
    figures: dict[str, Any]
    error: str = ""


class WrongError(Exception):
    """The computation has ended, and its result is wrong."""


class LeftOutError(Exception):
    """The item needs what this machine does not have."""


def row_of(part: str, name: str, work: Callable[[], dict[str, Any]]) -> CheckRow:
    """The row of an item whose `work` returns its figures. An exception ends in the row."""
    began = time.perf_counter()
    state, figures, error = FAILED, {}, ""
    try:
        state, figures = PASSED, work()
    except LeftOutError as reason:
        state, error = LEFT_OUT, str(reason)
    except WrongError as wrong:
        state, error = FAILED, str(wrong)
    except Exception:
        state, error = FAILED, last_lines(traceback.format_exc())
    return CheckRow(part, name, state, time.perf_counter() - began, figures, error)


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-ERROR_LINES:])


def at_most(what: str, value: float, allowed: float) -> float:
    """The value.

    Raises:
        WrongError: it is above what is allowed, or not a number.
    """
    if not value <= allowed:
        raise WrongError(f"{what}: {value:.2g}, and must be {allowed:.2g} at most")
    return value


class CheckPart(NamedTuple):
    """A part of the check: the module whose function of the part's name gives its rows, and its limit in seconds."""

    module: str
    limit: float


PARTS = {
    "machine": CheckPart("speed", 25),
    "layers": CheckPart("agreement", 40),
    "gradients": CheckPart("agreement", 80),
    "algorithms": CheckPart("training", 60),
    "resident": CheckPart("speed", 60),
    "photographs": CheckPart("speed", 150),
    "speed": CheckPart("speed", 150),
    "recipe": CheckPart("training", 40),
    "worlds": CheckPart("training", 180),
}
"""All limits together are less than thirteen and a half minutes."""

PACKAGES = {"hydra": "hydra-core"}
"""The packages of modules that have another name."""


def rows_in(part: str, device: str, *, short: bool) -> Iterator[CheckRow]:
    """The rows of a part, computed in this process. A missing package ends the part in a failed row."""
    compute_with("float32")
    try:
        module = importlib.import_module(f"benchmarks.gpu_check.{PARTS[part].module}")
    except ModuleNotFoundError as error:
        package = PACKAGES.get(error.name or "", error.name)
        missing = f"needs {error.name}, which is not installed; type pip install {package}"
        yield CheckRow(part, "the whole part", FAILED, 0.0, {}, missing)
    else:
        yield from getattr(module, part)(device, short=short)


def write_rows(part: str, device: str, path: Path, *, short: bool) -> None:
    """Writes the rows of a part to `path`, each as soon as it is there."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows_in(part, device, short=short):
            print(json.dumps(row._asdict()), file=file, flush=True)


def rows_of(part: str, command: Sequence[str], limit: float) -> list[CheckRow]:
    """The rows that a part writes to the path that is added to its command. A part that crashes, or takes longer than
    `limit` seconds, has a failed row at the end."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "rows.jsonl", Path(folder) / "output.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(path)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            error = f"exit code {code}" if (code := process.wait(limit)) else ""
        except subprocess.TimeoutExpired:
            error = f"took more than {limit:.0f} seconds"
        finally:
            _end(process)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [CheckRow(**json.loads(line)) for line in lines if line.endswith("\n")]
        if error:
            error = last_lines(f"{log.read_text().rstrip()}\n{error}")
            rows.append(CheckRow(part, "the whole part", FAILED, time.perf_counter() - began, {}, error))
    return rows


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and the runs of train.py that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def check(parts: Sequence[str], device: str, folder: Path, *, program: Path, short: bool) -> bool:
    """Runs the parts; writes gpu_check.json and gpu_check.md to the folder after each. Returns whether none failed."""
    rows: list[CheckRow] = []
    for part in parts:
        print(f"{part}: at most {PARTS[part].limit:.0f} s", file=sys.stderr, flush=True)
        command = [sys.executable, str(program), "--device", device, *["--short"] * short, "--only", part, "--child"]
        rows += rows_of(part, command, PARTS[part].limit)
        results = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device, "short": short,
            "parts": list(parts), "rows": [row._asdict() for row in rows],
        }  # fmt: skip
        (folder / "gpu_check.json").write_text(json.dumps(results, indent=2) + "\n")
        (folder / "gpu_check.md").write_text("\n".join(report(rows, device, short=short)) + "\n")
    return all(row.state != FAILED for row in rows)


# The table


def report(rows: Sequence[CheckRow], device: str, *, short: bool) -> list[str]:
    """The lines of the page: what failed, then a table for each part, in Markdown."""
    failed = [row for row in rows if row.state == FAILED]
    lines = [f"# Check of device {device}", "", f"{len(rows)} rows, {len(failed)} failed"]
    lines += ["", "Short mode: the times are no measurement."] * short
    for row in failed:
        lines += ["", f"Failed: {row.part}, {row.name}", "", "```", row.error, "```"]
    for part in dict.fromkeys(row.part for row in rows):
        lines += ["", f"## {part}", "", *_table([row for row in rows if row.part == part])]
    return lines


def _table(rows: Sequence[CheckRow]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    head = ["what", "result", "seconds", *names]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        figures = [_cell(row.figures[name]) if name in row.figures else "–" for name in names]
        reason = f"{row.state}: {row.error}" if row.error and row.state != FAILED else row.state
        lines.append(f"| {' | '.join([row.name, reason, f'{row.seconds:.1f}', *figures])} |")
    return lines


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The command


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    options = options_of(arguments)
    if options.child is not None:
        write_rows(options.only[0], options.device, options.child, short=options.short)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part under way is ended, too
    passed = check(
        options.only, options.device, options.output, program=ROOT / "scripts/gpu_check.py", short=options.short
    )
    print((options.output / "gpu_check.md").read_text(), end="")
    return 0 if passed else 1


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("gpu-check", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is checked (cuda)")
    parser.add_argument("--short", action="store_true", help="tiny sizes: checks that the check works")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="of the parts above"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/gpu_check", help="folder of the results")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch finds no GPU here; type --device cpu --short to try the check itself")
    if options.child is None:
        make_output(parser, options.output)
    return options
