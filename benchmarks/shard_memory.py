"""The memory that Omniglot's pictures take in a worker, without shards and with them.

    python scripts/shard.py dataset=omniglot --out shards/omniglot
    python benchmarks/shard_memory.py shards/omniglot

Two workers make the batches of their parts of the first steps. Then all of them wait, and /proc/PID/smaps_rollup of the
first one is read: what it has grown by since before its first batch. RSS counts every page of a worker; PSS counts
a page that two workers map as half a page in each; private pages are those that no other process has.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WORKERS = 2
CASES = {"omniglot": (1, 50), "omniglot_characters": (1, 50)}
"""Dataset → the numbers of steps after which the memory is read. A step is a batch of tasks, or of samples."""
BATCH = 32


def main(arguments: Sequence[str]) -> None:
    """Measures; or, with `--worker`, is one of the workers."""
    if arguments[0] == "--worker":
        work(int(arguments[1]), int(arguments[2]), arguments[3:])
        return
    shards = Path(arguments[0]).resolve()
    print("dataset              steps  pictures from      RSS      PSS  private   (MB)")
    for dataset, numbers in CASES.items():
        for steps in numbers:
            for name, place in (("the cache", "null"), ("shards", shards)):
                grown = measured(steps, [f"dataset={dataset}", f"dataset.shards={place}"])
                print(f"{dataset:19} {steps:6}  {name:13}", *(f"{value:8.1f}" for value in grown), flush=True)


def measured(steps: int, keys: Sequence[str]) -> list[float]:
    """What the first worker has grown by, in MB."""
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(rank), str(steps), *keys],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(WORKERS)
    ]  # fmt: skip
    before, after = read(workers), read(workers)
    for worker in workers:
        worker.wait()
    return [late - early for early, late in zip(before, after, strict=True)]


def read(workers: Sequence[subprocess.Popen[str]]) -> list[float]:
    """The memory of the first worker when all of them have come to a stop; then they go on."""
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    result = memory(workers[0].pid)
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    return result


def work(rank: int, steps: int, keys: Sequence[str]) -> None:
    """Makes this worker's batches between two lines from the parent."""
    import torch

    from metalearn.config.build import build
    from metalearn.config.compose import compose_config

    source = build(compose_config(keys).config, "dataset")
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(steps):
        numbers = torch.arange(step * BATCH, (step + 1) * BATCH)
        source.episodes("train", numbers.chunk(WORKERS)[rank])
    print("ready", flush=True)
    sys.stdin.readline()


def memory(pid: int) -> list[float]:
    """RSS, PSS and the private pages of a process, in MB."""
    kilobytes = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    private = int(kilobytes["Private_Clean"]) + int(kilobytes["Private_Dirty"])
    return [int(kilobytes["Rss"]) / 1000, int(kilobytes["Pss"]) / 1000, private / 1000]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
