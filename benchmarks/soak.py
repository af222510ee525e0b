"""Long runs of short steps: does a rank grow? Prints what every rank holds at 10% and at 100% of the steps.

    python benchmarks/soak.py --steps 20000

Every way to run is a run of train.py in a folder of its own: sine waves (or, on samples, small drawn characters) and a
small network, with a validation every tenth and a checkpoint every twentieth of the steps. Memory is what is resident
(VmRSS), without and with the pages of files (libraries, most of them shared). Linux only. The ranks are looked at when
a line is logged, so the last look is at a line before the end.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

TASKS = (
    "experiment=maml_sinusoid", "model.hidden=[8]", "dataset.shots=2", "dataset.queries=2", "dataset.eval_queries=2",
    "trainer.meta_batch_size=2", "trainer.task_chunk=1",
)  # fmt: skip
SAMPLES = (
    "experiment=supervised_glyphs", "model.filters=2", "trainer.meta_batch_size=4",
    "trainer.task_chunk=2",
)  # fmt: skip
ALL = ("trainer.val_tasks=4", "trainer.test_tasks=4", "logger.plots=false", "hydra.run.dir=run")

LOOK_SECONDS = 0.1
"""Between two looks at the log."""

LAST_LINES = 6
"""Lines of the output of a run that has failed."""


class SoakWay(NamedTuple):
    """A way to run it: its overrides, and the number of ranks."""

    name: str
    overrides: tuple[str, ...]
    ranks: int


WAYS = (
    SoakWay("local", (*TASKS, "strategy=local"), 1),
    SoakWay("rpc", (*TASKS, "strategy=rpc"), 2),
    SoakWay("rpc, dynamic", (*TASKS, "strategy=rpc", "partitioner=dynamic"), 2),
    SoakWay("rpc_autograd", (*TASKS, "strategy=rpc_autograd"), 2),
    SoakWay("ddp", (*TASKS, "strategy=ddp"), 2),
    SoakWay("ddp, samples", (*SAMPLES, "strategy=ddp"), 2),
    SoakWay("split", (*SAMPLES, "strategy=split"), 2),
)


class Held(NamedTuple):
    """What a rank holds: bytes without and with the pages of files, descriptors, threads."""

    anonymous: int
    resident: int
    descriptors: int
    threads: int


class Look(NamedTuple):
    """What every rank holds after a step, and the bytes of metrics.jsonl and of TensorBoard's events."""

    step: int
    ranks: tuple[Held, ...]
    metrics: int
    events: int


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way is ended, too
    parser.add_argument("--steps", type=int, default=20_000, help="of every run; 200 or more")
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="only these")
    options = parser.parse_args()
    if options.steps < 200:
        parser.error(f"--steps {options.steps}: must be 200 or more")
    print("| strategy | rank | step | MiB of its own | MiB resident | descriptors | threads |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    files, failed = [], False
    for way in WAYS:
        if options.ways is None or way.name in options.ways:
            try:
                first, last, lines = run(way, options.steps)
            except RuntimeError as error:
                failed = True
                print(f"error: {way.name}: {error}", file=sys.stderr)
                continue
            for rank, (early, late) in enumerate(zip(first.ranks, last.ranks, strict=True)):
                print(row(way.name, rank, first.step, last.step, early, late), flush=True)
            files.append(
                f"| {way.name} | {lines} | {first.metrics:,} → {last.metrics:,} | {first.events:,} → {last.events:,} |"
            )
    print("\n| strategy | logged steps | bytes of metrics.jsonl | bytes of events |\n| --- | --- | --- | --- |")
    print("\n".join(files))
    return int(failed)


def run(way: SoakWay, steps: int) -> tuple[Look, Look, int]:
    """Runs it. Returns the looks at 10% and at the end, and how many of its steps were logged.

    Raises:
        RuntimeError: the run has failed; the message has its last lines.
    """
    cadence = [f"trainer.steps={steps}", f"logger.every={steps // 200}", f"trainer.val_every={steps // 10}",
               f"checkpoint.every={steps // 20}"]  # fmt: skip
    command = [sys.executable, str(ROOT / "train.py"), *way.overrides, *ALL, *cadence, f"workers={way.ranks}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            looks = follow(process, folder / "run", way.ranks, steps)
        finally:
            process.terminate()
            process.wait()
        if process.returncode != 0:
            said = (folder / "output.txt").read_text().splitlines()
            raise RuntimeError("\n".join(["it has failed:", *said[-LAST_LINES:]]))
        first = next(look for look in looks if look.step >= steps // 10)
        metrics, events = sizes(folder / "run")
        return first, looks[-1]._replace(metrics=metrics, events=events), len(logged_steps(folder / "run"))


def follow(process: subprocess.Popen[bytes], run_dir: Path, ranks: int, steps: int) -> list[Look]:
    """Looks at the ranks at every new line of the log but the last one: then they are ending."""
    looks: list[Look] = []
    while process.poll() is None:
        time.sleep(LOOK_SECONDS)
        step = max(logged_steps(run_dir), default=0)
        if (looks[-1].step if looks else 0) < step < steps:
            try:
                held = tuple(held_by(pid) for pid in ranks_of(process.pid, ranks))
            except (FileNotFoundError, ProcessLookupError):  # they are ending
                break
            if len(held) == ranks:
                looks.append(Look(step, held, *sizes(run_dir)))
    process.wait()
    return looks


def ranks_of(launcher: int, ranks: int) -> Sequence[int]:
    """The processes of the ranks; a single one runs in the program itself."""
    if ranks == 1:
        return [launcher]
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="utf-8").split()]


def held_by(pid: int) -> Held:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    if "VmRSS" not in status:
        raise ProcessLookupError(pid)
    anonymous, resident = (int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))
    return Held(anonymous, resident, len(list((process / "fd").iterdir())), int(status["Threads"]))


def sizes(run_dir: Path) -> tuple[int, int]:
    """The bytes of metrics.jsonl, and of TensorBoard's events."""
    events = sum(path.stat().st_size for path in run_dir.glob("events.out.tfevents.*"))
    return (run_dir / "metrics.jsonl").stat().st_size, events


def logged_steps(run_dir: Path) -> list[int]:
    """The training steps in the whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["step"] for row in rows if row["split"] == "train"]


def row(name: str, rank: int, first: int, last: int, early: Held, late: Held) -> str:
    """A line of the table."""
    memory = [f"{a / 2**20:.1f} → {b / 2**20:.1f}" for a, b in zip(early[:2], late[:2], strict=True)]
    counts = [f"{a} → {b}" for a, b in zip(early[2:], late[2:], strict=True)]
    return f"| {name} | {rank} | {first:,} → {last:,} | {' | '.join([*memory, *counts])} |"


if __name__ == "__main__":
    sys.exit(main())
