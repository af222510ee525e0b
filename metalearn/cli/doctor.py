"""Checks the world that it is started in: operations, latency, bandwidth, listeners, versions, threads, GPUs.

    metalearn doctor                                              a world of one
    metalearn doctor --workers 2                                  two workers, as `metalearn train workers=2` has them
    torchrun --nproc_per_node=2 -m metalearn doctor               the world that torchrun makes

Exit code 0 if all is well, 1 if anything is wrong.
"""

import json
import os
import sys
from collections.abc import Sequence

from metalearn.app.job import Program, installed
from metalearn.app.process import BAD_CONFIG, end_with_starter, print_all, report_error
from metalearn.cli.arguments import command_parser, real, whole
from metalearn.config.check import check_rank_variables
from metalearn.errors import ConfigError, printable


def main(arguments: Sequence[str], program: Program | None = None) -> int:
    """Runs the command line of `program`, by default that of the installed package; returns the exit code."""
    parser = command_parser("doctor", __doc__)
    parser.add_argument("--workers", type=whole(1), default=1, help="ranks to start on this host")
    parser.add_argument("--timeout", type=real, default=30.0, help="seconds that one operation may take")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    try:
        check_rank_variables()
    except ConfigError as error:
        return report_error(error, BAD_CONFIG)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from distributed.doctor import diagnose  # imports torch, after the lines above
    from distributed.launch.elastic import LaunchConfig, launch

    if "RANK" not in os.environ and options.workers > 1:
        command = [sys.executable, *(program or installed("doctor")).arguments, *arguments]
        return launch(command, LaunchConfig(options.workers), say=lambda text: print(text, file=sys.stderr))
    end_with_starter()
    try:
        report = diagnose(timeout=options.timeout)
    except (RuntimeError, ConnectionError) as error:
        print(printable(f"error: rank {os.environ.get('RANK', 0)}: {error}"), file=sys.stderr)
        return 1
    if report is None:
        return 0
    if options.json:
        checks = [check._asdict() for check in report.checks]
        shown = {"ok": report.ok, "checks": checks, "workers": report.workers, "listening": report.listening}
        code = print_all(json.dumps(shown, indent=2))
        return code if report.ok else 1
    lines = [f"{'operation':24} {'':8} {'latency':>10} {'bandwidth':>12}"]
    for check in report.checks:
        state = {True: "ok", False: "WRONG", None: "-"}[check.ok]
        latency = f"{check.latency * 1e6:.0f} µs" if check.latency is not None else ""
        bandwidth = f"{check.bandwidth / 1e6:.0f} MB/s" if check.bandwidth is not None else ""
        lines.append(f"{check.name:24} {state:8} {latency:>10} {bandwidth:>12}  {check.note}".rstrip())
    lines.append("")
    for name, worker in report.workers.items():
        gpus = ", ".join(worker["gpus"]) or "no GPU"
        lines.append(
            f"{name}: {worker['host']}, process {worker['pid']}, Python {worker['python']}, torch {worker['torch']}, "
            f"{worker['threads']} threads of {worker['cores']} cores, {gpus}"
        )
    lines += [report.listening, "all is well" if report.ok else "something is wrong"]
    code = print_all("\n".join(lines))
    return code if report.ok else 1
