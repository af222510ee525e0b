"""The way of a run through the product's files: up to its first step, and in one meta-step.

    python -m benchmarks.way
    python -m benchmarks.way experiment=maml_omniglot_fast

A profiler follows a real run, in one process, and rank zero of two under strategy=rpc, which torchrun starts here. Only
functions of the product count, no bodies of modules and classes. `depth` is the most of them that are active at once,
from the updater's `advance` on; `changes` counts calls from another file. `with the log`: until the next step begins.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = tuple(str(ROOT / package) + os.sep for package in ("distributed", "metalearn"))

STEP, WARM = "advance", 5
"""The method of an updater that takes a step, and the step that is followed: earlier ones import and compile."""

SHORT = ("trainer.steps=7", "trainer.val_tasks=2", "trainer.test_tasks=2", "logger.plots=false", "logger.report=false")
HEADS = ("run", "functions before step 1", "files", "functions of a step", "files", "with the log", "depth", "changes")


class Way:
    """Follows the calls of a run, as a function for `sys.setprofile`."""

    def __init__(self) -> None:
        self.steps = self.depth = self.changes = 0
        self.before, self.step, self.logged = set[CodeType](), set[CodeType](), set[CodeType]()
        self._active: list[str] = []
        self._base: int | None = None  # how many were active when the step began that is followed; None: not within it

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        # Bodies of modules and classes run as calls, too, but have no fast locals.
        if event not in ("call", "return") or not code.co_flags & CO_OPTIMIZED:
            return
        if not code.co_filename.startswith(PRODUCT):
            return
        if event == "return":
            if self._active:
                self._active.pop()
            if self._base is not None and len(self._active) <= self._base:
                self._base = None
            return
        if code.co_name == STEP:
            self.steps += 1
            self._base = len(self._active) if self.steps == WARM else self._base
        if self.steps in (0, WARM):
            (self.logged if self.steps else self.before).add(code)
        if self._base is not None:
            self.step.add(code)
            self.depth = max(self.depth, len(self._active) + 1 - self._base)
            self.changes += self._active[-1] != code.co_filename
        self._active.append(code.co_filename)

    def figures(self) -> list[int]:
        """What stands below `HEADS`."""
        before, step, logged = (len({one.co_filename for one in of}) for of in (self.before, self.step, self.logged))
        return [len(self.before), before, len(self.step), step, logged, self.depth, self.changes]


def follow(arguments: Sequence[str]) -> None:
    """Runs train.py in this process; rank zero prints the figures."""
    from metalearn.cli import run

    way = Way()
    sys.setprofile(way)
    code = run("metalearn.cli.train", arguments, ROOT / "train.py")
    sys.setprofile(None)
    if int(os.environ.get("RANK", 0)) == 0:
        print("way:", *way.figures(), flush=True)
    sys.exit(code)


def main(overrides: Sequence[str]) -> None:
    """Prints the table."""
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    print(f"| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    for name, starter, keys in (("local", [], ["workers=1"]), ("rpc", torchrun, ["strategy=rpc", "workers=2"])):
        with tempfile.TemporaryDirectory() as folder:
            words = [*starter, __file__, "follow", *SHORT, *keys, f"hydra.run.dir={folder}/run", *overrides]
            done = subprocess.run([sys.executable, *words], cwd=ROOT, text=True, capture_output=True)
        figures = next((line.split()[1:] for line in done.stdout.splitlines() if line.startswith("way: ")), None)
        if figures is None:
            sys.exit(done.stderr)
        print(f"| {' | '.join([name, *figures])} |", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    follow(sys.argv[2:]) if sys.argv[1:2] == ["follow"] else main(sys.argv[1:])
