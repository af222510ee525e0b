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
    if algorithm.trained_on == "samples":
        return _of_samples(algorithm, params, episode, step, seeds)
    faults = []
    for i in range(len(episode.query.x)):
        task = Episode(*(Batch(*(value[i : i + 1] for value in batch)) for batch in episode))
        with surrounded(seeds=seeds.of_task(i)):
            faults.append(_of_task(algorithm, params, task, step))
    return torch.tensor(faults)


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


def _of_task(algorithm: Algorithm, params: Params, task: Episode, step: int) -> int:
    if not all(torch.isfinite(value).all() for batch in task for value in batch):
        return INPUTS
    result = algorithm.meta_grad(params, task, step)
    if not torch.isfinite(result.metrics["loss"]):
        return LOSS
    return 0 if all(torch.isfinite(grad).all() for grad in result.grads.values()) else GRADIENT


def _of_samples(algorithm: Algorithm, params: Params, episode: Episode, step: int, seeds: PassSeeds) -> Tensor:
    with surrounded(seeds=seeds.copy()):
        result = algorithm.meta_grad(params, episode, step)
    if algorithm.outcome is None:  # then a sample has no loss of its own either
        losses = result.metrics["loss"].expand(result.count)
    else:
        with surrounded(seeds=seeds.copy()):
            losses = algorithm.outcome(params, episode, step)["loss"].detach()
    inputs = torch.isfinite(episode.query.x[0]).flatten(1).all(dim=1)
    faults = torch.where(inputs, torch.where(torch.isfinite(losses), 0, LOSS), INPUTS)
    if not faults.any() and not all(torch.isfinite(grad).all() for grad in result.grads.values()):
        faults = torch.full_like(faults, GRADIENT)  # of the micro-batch: a sample has no gradient of its own
    return faults.cpu()
