"""Memory and time of a meta-gradient by its inner steps: with their graph kept, with checkpoints, and with nested ones.

    python benchmarks/inner_steps.py

The meta-gradient is MAML's, of 8 tasks of 5 ways on Conv4 with 64 filters, in a process of its own for each figure.
*Tensors* are the most bytes of tensors that are alive at once. *Resident* is what the largest resident size of the
process (ru_maxrss) has grown by in the meta-gradients: it has the holes of the heap too. Milliseconds are those of the
processor, which other processes disturb little.
"""

import os
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CHOICES = {"kept": False, "checkpoints": True, "nested": "nested"}
"""Of `checkpoint_steps`."""

CASES = (("sgd", 1, (1, 5, 20, 100)), ("adam", 1, (1, 5, 20, 100)), ("sgd", 5, (1, 5, 20)))
"""Inner optimisers, the shots, and the inner steps."""
TASKS, WAYS, REPEATS = 8, 5, 3


def main(arguments: Sequence[str]) -> None:
    """Measures; or, with `--child`, is one of the processes."""
    if arguments:
        child(arguments[1], int(arguments[2]), int(arguments[3]), arguments[4])
        return
    print("inner  shots  steps  choice       tensors (MB)  resident (MB)      ms")
    for name, shots, counts in CASES:
        for steps in counts:
            for choice in CHOICES:
                tensors, resident, time_taken = measured(name, shots, steps, choice)
                columns = f"{tensors:12.0f} {resident:14.0f} {time_taken:7.0f}"
                print(f"{name:5}  {shots:5}  {steps:5}  {choice:11}  {columns}", flush=True)


def measured(name: str, shots: int, steps: int, choice: str) -> list[float]:
    """Megabytes of tensors, resident megabytes, and milliseconds."""
    command = [sys.executable, __file__, "--child", name, str(shots), str(steps), choice]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(value) for value in run.stdout.split()]


def child(name: str, shots: int, steps: int, choice: str) -> None:
    """Prints the megabytes of some meta-gradients, and the milliseconds of the fastest."""
    meta_gradient = problem(name, shots, CHOICES[choice])
    # One task: makes the kernels, and imports what torch imports late.
    meta_gradient(1, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        meta_gradient(steps, TASKS)
        seconds.append(time.process_time() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    with LivePeak() as live:
        meta_gradient(steps, TASKS)
    print(live.peak / 1e6, grown / 1000, 1000 * min(seconds))


def problem(name: str, shots: int, checkpoint: Any) -> Callable[[int, int], object]:
    """The meta-gradient of a number of steps and tasks."""
    from metalearn.algorithms.common import inner
    from metalearn.algorithms.maml import maml
    from metalearn.app.process import keep_freed_memory
    from metalearn.models.conv4 import conv4
    from metalearn.types import Batch, Episode

    keep_freed_memory()
    torch.set_num_threads(1)
    optimizer, rate = {"sgd": (inner.SGD, 0.4), "adam": (inner.adam(beta1=0.9, beta2=0.999, eps=1e-3), 0.001)}[name]
    model = conv4(ways=WAYS, channels=1, image_size=28)
    generator = torch.Generator().manual_seed(0)

    def batch(shots: int) -> Batch:
        x = torch.rand(TASKS, WAYS * shots, 1, 28, 28, generator=generator)
        return Batch(x, torch.arange(WAYS).repeat(TASKS, shots))

    params, (support, query) = model.init(generator), (batch(shots), batch(1))

    def meta_gradient(steps: int, tasks: int) -> object:
        learner = maml(
            model=model, inner=optimizer, inner_lr=rate, inner_steps=steps, eval_steps=1, checkpoint_steps=checkpoint
        )
        return learner.meta_grad(params, Episode(*(Batch(x[:tasks], y[:tasks]) for x, y in (support, query))), 1)

    return meta_gradient


class LivePeak(TorchDispatchMode):
    """The most bytes of tensors, made inside, that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor) and result.untyped_storage() not in self._known:
                storage = result.untyped_storage()
                self._known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return results

    def _freed(self, count: int) -> None:
        self.now -= count


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
