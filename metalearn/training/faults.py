"""Finds the task at fault if a step gives numbers that are not finite."""

import torch
from torch import Tensor

from metalearn.nn.surroundings import PassSeeds, surrounded
from metalearn.types import Algorithm, Batch, Episode, Metrics, Params, Unit

FAULTS = ("", "its inputs are not finite", "its loss is not finite", "its gradient is not finite")
"""The faults that a task may have, by number; 0 is none."""

INPUTS, LOSS, GRADIENT = 1, 2, 3


def faults_of(algorithm: Algorithm, params: Params, episode: Episode, step: int, seeds: PassSeeds) -> Tensor:
    """The fault of each training task of an episode, or of each sample: [t] int64. It is computed with the same random
    numbers as in training."""
    if algorithm.trained_on == "tasks":
        faults = []
        for i in range(len(episode.query.x)):
            task = Episode(*(Batch(*(value[i : i + 1] for value in batch)) for batch in episode))
            if not all(torch.isfinite(value).all() for batch in task for value in batch):
                faults.append(INPUTS)
                continue
            with surrounded(seeds=seeds.of_task(i)):
                result = algorithm.meta_grad(params, task, step)
            finite = all(torch.isfinite(grad).all() for grad in result.grads.values())
            faults.append(LOSS if not torch.isfinite(result.metrics["loss"]) else 0 if finite else GRADIENT)
        return torch.tensor(faults)
    with surrounded(seeds=seeds.copy()):
        result = algorithm.meta_grad(params, episode, step)
    if algorithm.outcome is None:  # then a sample has no loss of its own either
        losses = result.metrics["loss"].expand(result.count)
    else:
        with surrounded(seeds=seeds.copy()):
            losses = algorithm.outcome(params, episode, step)["loss"].detach()
    inputs = torch.isfinite(episode.query.x[0]).flatten(1).all(dim=1)
    of_samples = torch.where(inputs, torch.where(torch.isfinite(losses), 0, LOSS), INPUTS)
    if not of_samples.any() and not all(torch.isfinite(grad).all() for grad in result.grads.values()):
        of_samples = torch.full_like(of_samples, GRADIENT)  # of the micro-batch: a sample has no gradient of its own
    return of_samples.cpu()


def explain(diagnosis: Metrics, numbers: Tensor, step: int, unit: Unit) -> str:
    """The error message for a diagnosis by `Strategy.diagnose` of the training tasks `numbers`."""
    faults = diagnosis["fault"]
    wrong = faults.nonzero().flatten()
    if not len(wrong):
        return f"step {step}: the meta-gradient is not finite, but the gradients of all its {unit} are"
    gravest = int(faults[wrong].min())  # inputs that are not finite spoil the loss of their whole micro-batch
    first = int((faults == gravest).nonzero()[0])
    what = f"{unit[:-1]} {int(numbers[first])}"
    if unit == "samples" and gravest != INPUTS:
        what = f"the micro-batch with {what}"
    others = f" (and {len(wrong) - 1} more of its {len(numbers)} {unit})" if len(wrong) > 1 else ""
    advice = "" if gravest == INPUTS else ". Lower rates may help: optimizer.lr, and algorithm.inner_lr if there is one"
    return f"step {step}: {what}, on worker{int(diagnosis['worker'][first])}: {FAULTS[gravest]}{others}{advice}"
