"""Memory and time of a meta-gradient by its inner steps, with their graph kept and with checkpoints.

    python benchmarks/inner_steps.py

The meta-gradient is MAML's, of 8 tasks of 5 ways on Conv4 with 64 filters, in a process of its own for each figure.
Memory is what the largest resident size of the process (ru_maxrss) has grown by in the meta-gradients.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STEPS = (1, 5, 10, 20)
CASES = (("sgd", 1), ("adam", 1), ("sgd", 5))
"""Inner optimisers, and the shots."""
TASKS, WAYS, REPEATS = 8, 5, 3


def main(arguments: Sequence[str]) -> None:
    """Measures; or, with `--child`, is one of the processes."""
    if arguments:
        child(arguments[1], int(arguments[2]), int(arguments[3]), checkpoint=arguments[4] == "True")
        return
    print("inner  shots  steps   kept: MB      ms   checkpoints: MB      ms")
    for name, shots in CASES:
        for steps in STEPS:
            (kept, kept_ms), (less, less_ms) = (measured(name, shots, steps, which) for which in (False, True))
            print(
                f"{name:5}  {shots:5}  {steps:5}   {kept:8.0f} {kept_ms:7.0f}   {less:15.0f} {less_ms:7.0f}", flush=True
            )


def measured(name: str, shots: int, steps: int, checkpoint: bool) -> list[float]:
    """Megabytes and milliseconds."""
    command = [sys.executable, __file__, "--child", name, str(shots), str(steps), str(checkpoint)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(value) for value in run.stdout.split()]


def child(name: str, shots: int, steps: int, *, checkpoint: bool) -> None:
    """Prints the megabytes of some meta-gradients, and the milliseconds of the fastest."""
    import torch

    from metalearn.algorithms.common import inner
    from metalearn.algorithms.maml import maml
    from metalearn.models.conv4 import conv4
    from metalearn.program.process import keep_freed_memory
    from metalearn.types import Batch, Episode

    keep_freed_memory()
    torch.set_num_threads(1)
    optimizer, rate = {"sgd": (inner.SGD, 0.4), "adam": (inner.adam(beta1=0.9, beta2=0.999, eps=1e-3), 0.001)}[name]
    model = conv4(ways=WAYS, channels=1, image_size=28)
    generator = torch.Generator().manual_seed(0)

    def batch(shots: int) -> Batch:
        x = torch.rand(TASKS, WAYS * shots, 1, 28, 28, generator=generator)
        return Batch(x, torch.arange(WAYS).repeat(TASKS, shots))

    params, episode = model.init(generator), Episode(batch(shots), batch(1))

    def meta_gradient(steps: int, episode: Episode) -> float:
        learner = maml(
            model=model, inner=optimizer, inner_lr=rate, inner_steps=steps, eval_steps=1, checkpoint_steps=checkpoint
        )
        start = time.perf_counter()
        learner.meta_grad(params, episode, 1)
        return time.perf_counter() - start

    # One task: makes the kernels, and imports what torch imports late.
    meta_gradient(1, Episode(*(Batch(x[:1], y[:1]) for x, y in episode)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = min(meta_gradient(steps, episode) for _ in range(REPEATS))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000, 1000 * seconds)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
