"""How far a run of experiment=pfn_gp is from the exact posterior of its Gaussian process, in nats a point.

    python -m benchmarks.pfn_gap outputs/pfn_gp/seed0

For each number of known points: the mean negative log-likelihood of asked points by the network, less that by the exact
posterior. With model.head=bars also less that of the exact posterior in the same bars, which no network can pass.
"""

import argparse
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metalearn.api.load import load
from metalearn.errors import ConfigError
from metalearn.models.common.heads import bars, gaussian
from metalearn.tasks.priors.gp import posterior
from metalearn.types import Batch

KNOWN = (1, 2, 5, 10, 20, 40)


def gaps(path: str, tasks: int) -> dict[str, Any]:
    """The gaps by the number of known points, and their means.

    Raises:
        ValueError: no run of a Gaussian process whose kernel, length and noise are fixed.
    """
    learner = load(path)
    config, source, model, *_ = learner.taught
    settings = {name: config.dataset.get(name) for name in ("kernel", "length", "noise")}
    reads, numbers = model.in_context, all(isinstance(settings[name], float) for name in ("length", "noise"))
    if reads is None or reads.loss is None or not isinstance(settings["kernel"], str) or not numbers:
        raise ConfigError(f"{path}: is no run of experiment=pfn_gp with one kernel, length and noise; type another one")
    support, query = zip(
        *(source.episodes("test", torch.tensor([number * 64])) for number in range(tasks)), strict=True
    )
    x, y = (
        torch.cat([torch.cat([a[part], b[part]], dim=1) for a, b in zip(support, query, strict=True)])
        for part in (0, 1)
    )
    head = bars(config.model.bins) if reads.loss.name == "bars" else gaussian()
    found: dict[str, dict[int, float]] = {"exact": {}, "network": {}}
    for known in KNOWN:
        each = [
            posterior(a[:known].numpy(), b[:known, 0].numpy(), a[known:].numpy(), **settings)
            for a, b in zip(x.double(), y.double(), strict=True)
        ]
        mean, sd = (torch.from_numpy(np.stack(values)).unsqueeze(2) for values in zip(*each, strict=True))
        asked = y[:, known:].double()
        with torch.no_grad(), learner.computing():
            outputs = reads.outputs(learner.params, Batch(x[:, :known], y[:, :known]), x[:, known:])
        found["network"][known] = _mean_loss(reads.loss, outputs.double(), asked)
        found["exact"][known] = _mean_loss(gaussian().loss, torch.cat([mean, sd.log()], dim=2), asked)
        if reads.loss.name == "bars":
            found.setdefault("exact in bars", {})[known] = _mean_loss(
                head.loss, _in_bars(mean, sd, config.model.bins), asked
            )
    means = {name: float(np.mean(list(values.values()))) for name, values in found.items()}
    best = {name: means["network"] - value for name, value in means.items() if name != "network"}
    by_known = {known: round(found["network"][known] - found["exact"][known], 5) for known in KNOWN}
    return {"tasks": tasks, "gap": {name: round(value, 5) for name, value in best.items()}, "by_known": by_known}


def _mean_loss(loss: Any, outputs: Tensor, y: Tensor) -> float:
    return float(loss.of_tasks(outputs, y)["loss"].mean())


def _in_bars(mean: Tensor, sd: Tensor, count: int) -> Tensor:
    """The outputs of a head of bars that has the probabilities of a normal distribution."""
    borders = torch.special.ndtri(torch.arange(1, count, dtype=torch.float64) / count)
    below = torch.special.ndtr((borders - mean) / sd)
    probabilities = torch.nn.functional.pad(below, (0, 1), value=1.0).diff(dim=2, prepend=torch.zeros_like(mean))
    return torch.cat([probabilities.clamp(min=1e-12).log(), torch.zeros(*mean.shape[:2], 2)], dim=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the folder of the run")
    parser.add_argument("--tasks", type=int, default=400, help="test tasks (default: 400)")
    arguments = parser.parse_args()
    print(json.dumps(gaps(arguments.path, arguments.tasks)))


if __name__ == "__main__":
    main()
