"""The original's two few-shot examples, unmodified, with their default of 32 tasks a step on two processes.

They need the original for its optimisers, in a folder that only these processes see:

    pip install --no-deps --target=.torchopt torchopt optree graphviz pandas python-dateutil six setproctitle
"""

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from metalearn.tasks.common.stored import DataPlace
from metalearn.tasks.omniglot import decoded
from tests.runs import ROOT, children_of

FOLDER = os.environ.get("TORCHOPT_EXAMPLES", "")
ORIGINAL = ROOT / ".torchopt"
DATA = Path("/tmp/omniglot-data/omniglot.npy")
"""The path that the examples read."""

TASKS, STEPS, LIMIT = 32, 50, 1500.0
STEP = re.compile(r"Train Loss: (\S+) \| Acc: \S+ \| Time: \S+")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="set TORCHOPT_EXAMPLES to examples/distributed/few-shot of metaopt/torchopt")
@pytest.mark.skipif(not (ORIGINAL / "torchopt").is_dir(), reason="type the pip install at the top of this file")
@pytest.mark.skipif("METALEARN_DATA" not in os.environ, reason="set METALEARN_DATA to a folder with Omniglot")
@pytest.mark.parametrize("program", ["maml_omniglot.py", "maml_omniglot_local_loader.py"])
def test_it_makes_fifty_steps_learns_and_stays_small(program: str) -> None:
    learned = run(Path(FOLDER) / program)
    assert len(learned.losses) == STEPS
    assert statistics.mean(learned.losses[-10:]) < statistics.mean(learned.losses[:10])
    assert max(learned.memory) < 5e9, learned.memory


class Learned(NamedTuple):
    """The loss of every step, and the largest memory of each rank in bytes."""

    losses: list[float]
    memory: list[int]


def run(program: Path) -> Learned:
    """Runs an example, which would train for ten epochs, until it has made `STEPS` steps or the time is over."""
    make_data()
    # The examples use names that numpy no longer has.
    (DATA.parent / "sitecustomize.py").write_text("import numpy\nnumpy.int, numpy.float = int, float\n")
    environment = os.environ | {
        "PYTHONPATH": f"{DATA.parent}:{ROOT}:{ORIGINAL}", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1", "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    example = [sys.executable, "-m", "distributed.as_torchopt", str(program.resolve()), f"--task_num={TASKS}"]
    process = subprocess.Popen(
        [sys.executable, *launcher, *example], env=environment, cwd=DATA.parent, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        return watch(process, time.monotonic() + LIMIT)
    finally:
        workers = children_of(process.pid) if process.poll() is None else []  # each in a session of its own
        process.kill()
        process.communicate()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def watch(process: subprocess.Popen[bytes], deadline: float) -> Learned:
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    said, losses, memory = "", list[float](), [0, 0]
    while len(losses) < STEPS and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        said += (process.stdout.read() or b"").decode(errors="replace")
        losses = [float(loss) for loss in STEP.findall(said)]
        with contextlib.suppress(FileNotFoundError):  # they are ending
            for rank, child in enumerate(children_of(process.pid)[:2]):
                peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{child}/status").read_text())
                memory[rank] = max(memory[rank], int(peak[1]) * 1024 if peak else 0)
    if process.poll():
        print(said[-4000:], file=sys.stderr)
    return Learned(losses[:STEPS], memory)


def make_data() -> None:
    """The array that the examples read: [1623, 20, 1, 28, 28], white is 1, as their loader would decode it."""
    if DATA.exists():
        return
    ink = decoded(DataPlace(root=os.environ["METALEARN_DATA"], download=False), 28)
    DATA.parent.mkdir(exist_ok=True)
    np.save(DATA, (255 - ink[:, :, None]) / 255.0)
