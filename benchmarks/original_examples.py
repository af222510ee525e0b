"""Runs the original's two few-shot examples, unmodified, on our layer and on the original's, on two processes in turn.

    python benchmarks/remote_calls.py --install        first: puts the original from PyPI into .torchopt
    METALEARN_DATA=/path/to/data python benchmarks/original_examples.py FOLDER

FOLDER is `examples/distributed/few-shot` of the repository metaopt/torchopt. The examples read
/tmp/omniglot-data/omniglot.npy; it is made from the real Omniglot if it is missing. They train for ten epochs; a run is
ended after so many steps. A table shows the losses, the time of a step, and the largest memory of both processes.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.remote_calls import ORIGINAL  # noqa: E402 (the path comes first, here and below)
from metalearn.tasks.common.place import DataPlace  # noqa: E402
from metalearn.tasks.omniglot import decoded  # noqa: E402

PROGRAMS = ("maml_omniglot.py", "maml_omniglot_local_loader.py")
LAYERS = ("distributed", "torchopt.distributed")
DATA = Path("/tmp/omniglot-data/omniglot.npy")  # noqa: S108 (the examples' own path)
WORKERS = 2

_STEP = re.compile(r"Train Loss: (\S+) \| Acc: (\S+) \| Time: (\S+)")
_NAMES_OF_THEN = "import numpy\nnumpy.int, numpy.float = int, float\n"  # the examples use them


class Figures(NamedTuple):
    """Of each training step its loss, accuracy in per cent and seconds; of each rank its largest memory in bytes."""

    losses: list[float]
    accuracies: list[float]
    seconds: list[float]
    memory: list[int]

    def learnt(self) -> bool:
        """Whether the loss of the last ten steps is below that of the first ten."""
        return statistics.mean(self.losses[-10:]) < statistics.mean(self.losses[:10])


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the examples")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="only these")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS, help="only these")
    parser.add_argument("--tasks", nargs="+", type=int, default=[30, 32], help="tasks a step")
    parser.add_argument("--steps", type=int, default=50, help="training steps of a run")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a run may take")
    options = parser.parse_args()
    print("| program | tasks | layer | steps | loss, first and last ten | s a step | GB, rank by rank |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for program in options.programs:
        for tasks in options.tasks:
            for layer in options.layers:
                figures = run(options.folder / program, layer, tasks, options.steps, options.limit)
                print(f"| {program} | {tasks} | `{layer}` | {_row(figures)} |", flush=True)
    return 0


def _row(figures: Figures) -> str:
    memory = ", ".join(f"{size / 1e9:.2f}" for size in figures.memory)
    if not figures.losses:
        return f"none | | | {memory}"
    first, last = (statistics.mean(losses) for losses in (figures.losses[:10], figures.losses[-10:]))
    return f"{len(figures.losses)} | {first:.2f}, {last:.2f} | {statistics.median(figures.seconds):.2f} | {memory}"


def run(program: Path, layer: str, tasks: int, steps: int, limit: float) -> Figures:
    """Runs an example until it has made so many training steps, or the time is over."""
    make_data()
    (DATA.parent / "sitecustomize.py").write_text(_NAMES_OF_THEN)
    environment = os.environ | {
        "PYTHONPATH": f"{DATA.parent}:{ROOT}:{ORIGINAL}", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1", "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORKERS}", "--no-python"]
    ours = ["-m", "distributed.as_torchopt"] if layer == "distributed" else []
    command = [sys.executable, *launcher, sys.executable, *ours, str(program.resolve())]
    process = subprocess.Popen(
        [*command, f"--task_num={tasks}"], env=environment, cwd=DATA.parent, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return _watch(process, steps, time.monotonic() + limit)
    finally:
        workers = _children(process.pid)  # each in a session of its own
        process.kill()
        process.wait()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def _watch(process: subprocess.Popen[bytes], steps: int, deadline: float) -> Figures:
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    figures = Figures([], [], [], [0] * WORKERS)
    said = text = ""
    while len(figures.losses) < steps and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        new = (process.stdout.read() or b"").decode(errors="replace")
        said += new
        *lines, text = (text + new).split("\n")
        for match in filter(None, map(_STEP.search, lines)):
            for column, value in zip(figures[:3], match.groups(), strict=True):
                column.append(float(value))
        for rank, peak in enumerate(_peaks(process.pid)):
            figures.memory[rank] = max(figures.memory[rank], peak)
    if process.poll():
        print(said[-4000:], file=sys.stderr)
    return Figures(figures.losses[:steps], figures.accuracies[:steps], figures.seconds[:steps], figures.memory)


def _peaks(launcher: int) -> Sequence[int]:
    """The largest memory so far of each child of the launcher, in bytes, in the order in which they were started."""
    sizes = []
    for child in _children(launcher)[:WORKERS]:
        match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{child}/status").read_text())
        sizes.append(int(match.group(1)) * 1024 if match else 0)
    return sizes


def _children(launcher: int) -> list[int]:
    """The processes that the launcher has started, in this order; none if it has ended."""
    try:
        return [int(child) for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except FileNotFoundError:
        return []


def make_data() -> None:
    """The array that the examples read: [1623, 20, 1, 28, 28], white is 1, as their loader would decode it."""
    if DATA.exists():
        return
    ink = decoded(DataPlace(root=os.environ["METALEARN_DATA"], download=False), 28)
    DATA.parent.mkdir(exist_ok=True)
    np.save(DATA, (255 - ink[:, :, None]) / 255.0)


if __name__ == "__main__":
    sys.exit(main())
