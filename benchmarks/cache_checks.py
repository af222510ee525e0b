"""What the digests of the cache cost a start: the time to open decoded arrays of several sizes.

    python benchmarks/cache_checks.py

Makes arrays of random bytes, 1.5 GB in all, in a folder for the time of the measurement. Each line has the array, its
size, the time to open it, and the time after its file was touched; medians of seven.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from metalearn.tasks.common.cache import cached_array
from metalearn.tasks.common.episodes import Images

ARRAYS = {
    "omniglot-28": (1623, 20, 28, 28),
    "cifar100": (100, 600, 32, 32, 3),
    "mini_imagenet-84": (60_000, 84, 84, 3),
}
ROUNDS = 7


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["METALEARN_CACHE"] = folder
        for name, shape in ARRAYS.items():
            opening = partial(cached_array, name, shape, partial(random_bytes, shape), title=name)
            opening()
            touch = (Path(folder) / f"{name}.npy").touch
            print(
                f"{name:18} {np.prod(shape) / 1e6:7.1f} MB  opened in {milliseconds(opening):8.2f} ms,  "
                f"after a change in {milliseconds(opening, touch):8.2f} ms",
                flush=True,
            )


def random_bytes(shape: tuple[int, ...]) -> Images:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def milliseconds(measured: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The median time of `measured`, which comes after `before`."""
    times = []
    for _ in range(ROUNDS):
        before()
        start = time.perf_counter()
        measured()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
