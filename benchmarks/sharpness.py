"""How curved the support losses become in meta-training, beside what inner gradient descent bears.

    python benchmarks/sharpness.py experiment=imaml_sinusoid algorithm.inner_lr=0.005

On a quadratic loss, gradient descent at rate α grows without bound where the largest curvature is above 2/α. Any run of
train.py whose inner rate is one number can be named; it trains in this process. The *sharpness* is the largest
eigenvalue of the Hessian of a task's support loss at the meta-parameters, by power iteration, for the first validation
tasks.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.steps import run_of  # noqa: E402 (the path comes first, here and below)
from metalearn.algorithms.common.functional import leaves, per_task  # noqa: E402
from metalearn.algorithms.common.learners import SupportLoss  # noqa: E402
from metalearn.algorithms.imaml import hessian_product  # noqa: E402
from metalearn.app.job import script, to_job  # noqa: E402
from metalearn.app.parts import Parts, assemble, training_chunk  # noqa: E402
from metalearn.config.compose import compose_config  # noqa: E402
from metalearn.errors import DivergedError  # noqa: E402
from metalearn.training.loop import advance, tasks_in_chunks  # noqa: E402
from metalearn.types import Params  # noqa: E402

EVERY = 500
"""Steps between two lines."""
TASKS, ITERATIONS = 200, 30


def main(overrides: Sequence[str]) -> int:
    """Returns the exit code."""
    torch.set_num_threads(1)
    job = to_job(*compose_config(overrides), script(ROOT / "train.py"), overrides)
    parts, rate = assemble(job), float(job.config.algorithm.inner_lr)
    batch = parts.settings.meta_batch_size
    run, learner = run_of(parts.algorithm, parts.source, batch, training_chunk(parts), parts.device)
    learner = learner._replace(optimizer=parts.outer.start(learner.params))
    print(f"2/α = {2 / rate:.4g}\n| step | sharpness, median | 95% | tasks above 2/α |\n| --- | --- | --- | --- |")
    for step in range(parts.settings.steps + 1):
        if step % EVERY == 0:
            values = sharpness(parts, learner.params)
            middle, high = torch.quantile(values, torch.tensor([0.5, 0.95])).tolist()
            print(f"| {step} | {middle:.4g} | {high:.4g} | {(values > 2 / rate).float().mean():.0%} |", flush=True)
        tasks = tasks_in_chunks(step * batch, batch, run.training.chunk)
        try:
            advance(run, learner, tasks, step + 1, parts.outer.rate(step + 1, parts.settings.steps))
        except DivergedError as error:
            print(f"| {step + 1} | {error} | | |")
            break
    return 0


def sharpness(parts: Parts, params: Params) -> Tensor:
    """The largest eigenvalue of every task's Hessian, [tasks]."""
    support = parts.source.episodes("val", torch.arange(TASKS)).support
    product = hessian_product(SupportLoss(parts.model, support, 2), leaves(per_task(params, TASKS)))
    generator = torch.Generator().manual_seed(0)
    direction = {name: torch.randn(TASKS, *value.shape, generator=generator) for name, value in params.items()}
    for _ in range(ITERATIONS):
        image = product(direction)
        lengths = torch.stack([value.flatten(1).square().sum(dim=1) for value in image.values()]).sum(dim=0).sqrt()
        direction = {name: v / lengths.view(-1, *[1] * (v.dim() - 1)) for name, v in image.items()}
    return lengths


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
