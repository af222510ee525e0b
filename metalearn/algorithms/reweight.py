"""Weights of training examples, learned through a whole training: a metagradient run.

MGD, Engstrom et al. 2025 (arXiv 2503.13751), and DataRater, Calian et al. 2025 (arXiv 2505.17895). A task is a
replicate: one training from a start of its own, in an order of its own. With weights wᵢ = σ(λᵢ) an inner step is

    θ ← θ − α ∇θ Σ_{i in batch} wᵢ ℓᵢ(θ) / Σ_{i in batch} wᵢ

and the meta-gradient is the exact derivative of the loss of held-out examples after the last step by all λᵢ. Each step
is computed a second time for it, as in `metalearn.bilevel.descent`.

Differences from the papers:

- MGD moves metaparameters by the sign of the metagradient; any `optimizer` does here. It recomputes by a tree
  (`memory=log`); `memory=points` keeps the parameters after every step, and is faster.
- DataRater's weights are those of a network of the example, so that they hold for further data. Ours are numbers.

Evaluation trains with other weights beside the learned ones, on the same starts and orders: equal ones; those of the
best threshold rule, which drops the examples of the largest losses (`DROPPED`) under a network that was trained with
equal weights, for all steps or a quarter of them; and on the clean examples alone. Of the thresholds, that with the
least loss on the clean examples counts, which the learned weights know, too.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.inner import SGD, InnerOptimizer, from_outcome
from metalearn.algorithms.common.losses import by_sample, objective
from metalearn.bilevel import descent
from metalearn.errors import ConfigError, counts, one_of, positive
from metalearn.types import EXAMPLES, Algorithm, Batch, Episode, Metrics, Model, Params

DROPPED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)  # the shares of the examples that threshold rules drop


def reweight(
    *, model: Model, inner: InnerOptimizer = SGD, examples: int, inner_lr: float, inner_steps: int, batch: int,
    memory: str = "points",
) -> Algorithm:  # fmt: skip
    """Learns one weight for each training example. Raises ValueError for a number out of range, or another `memory`.

    Args:
        model: the network that is trained, from a new start for every task.
        inner: the optimiser of the training.
        examples: training examples: the first of every support set, the same in all tasks. The others are clean.
        inner_lr: the rate of the training.
        inner_steps: steps of the training.
        batch: examples of a step; each pass has them in a new order.
        memory: `points`, `log` or `all`, as for `metalearn.bilevel.descent`.
    """
    counts(examples=examples, inner_steps=inner_steps, batch=batch)
    positive(inner_lr=inner_lr)
    one_of("memory", memory, ("points", "log", "all"))

    def init(generator: Generator) -> Params:
        return {EXAMPLES: torch.zeros(examples)}

    def parted(support: Batch) -> tuple[Batch, Batch]:
        """The training examples of a support set, and the clean ones."""
        if support.y.shape[1] <= examples:
            reason = f"has {support.y.shape[1]} examples, and needs clean ones behind those that are weighted"
            advice = "type dataset=noisy_digits, or fewer"
            raise ConfigError(f"algorithm.examples={examples}: a support set {reason}; {advice}")
        return Batch(*(v[:, :examples] for v in support)), Batch(*(v[:, examples:] for v in support))

    def trained(seeds: list[int], samples: Batch, weights: Tensor, steps: int = inner_steps) -> Params:
        """The parameters of each task after training on weighted samples, by weights [t, n]."""
        (x, y), (tasks, n) = samples, weights.shape
        rows = torch.arange(tasks, device=x.device).unsqueeze(1)
        drawn = [model.init(torch.Generator().manual_seed(seed)) for seed in seeds]
        start = {name: torch.stack([one[name] for one in drawn]).to(weights) for name in drawn[0]}
        passes, generators = range(steps * batch // n + 1), map(np.random.default_rng, seeds)
        orders = [np.concatenate([rng.permutation(n) for _ in passes]) for rng in generators]
        order = torch.from_numpy(np.stack(orders)).to(x.device)

        def loss(theta: Params, weights: Tensor, step: int) -> Tensor:
            at = order[:, step * batch : (step + 1) * batch]
            losses = by_sample(model.apply(theta, x[rows, at]), y[rows, at], model.loss)["loss"]
            shares = weights[rows, at]
            return ((shares * losses).sum(dim=1) / shares.sum(dim=1).clamp_min(1e-12)).sum()

        end: Params = descent(loss, start, weights, steps=steps, rate=inner_lr, optimizer=inner, memory=memory)
        return end

    def learned(params: Params, support: Batch, steps: int = inner_steps) -> Params:
        weights = params[EXAMPLES].sigmoid().expand(len(support.x), -1)
        return trained(seeds_of(support), parted(support)[0], weights, steps)

    def measured(theta: Params, support: Batch, samples: Batch) -> Metrics:
        return objective(model.apply(theta, samples.x, parted(support)[0].x), samples.y, model.loss)

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        return measured(learned(params, support), support, query)

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query), seeds = episode, seeds_of(episode.support)
        noisy, clean = parted(support)
        equal = torch.ones_like(noisy.y, dtype=params[EXAMPLES].dtype)
        rules = [equal]
        for steps in (-(-inner_steps // 4), inner_steps):
            theta = trained(seeds, noisy, equal, steps)
            losses = by_sample(model.apply(theta, noisy.x), noisy.y, model.loss)["loss"]
            rules += [(losses <= losses.quantile(1 - part, dim=1, keepdim=True)).to(equal) for part in DROPPED]
        count = len(rules)
        many, many_clean, many_query = (repeated(samples, count) for samples in (support, clean, query))
        ends = trained(seeds * count, parted(many)[0], torch.cat(rules))
        best = measured(ends, many, many_clean)["loss"].view(count, -1).argmin(dim=0)
        of_rules = {name: v.view(count, -1) for name, v in measured(ends, many, many_query).items()}
        alone = trained(seeds, clean, torch.ones_like(clean.y, dtype=equal.dtype))
        of_clean = objective(model.apply(alone, query.x, clean.x), query.y, model.loss)
        values = outcome(params, episode, 0)
        values |= {f"equal_{name}": v[0] for name, v in of_rules.items()}
        values |= {f"threshold_{name}": v.gather(0, best.unsqueeze(0))[0] for name, v in of_rules.items()}
        values |= {f"clean_{name}": v for name, v in of_clean.items()}
        return {name: v.unsqueeze(1) for name, v in values.items()}

    @torch.no_grad()
    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        theta = learned(params, support, inner_steps if steps is None else steps)
        return lambda x: model.apply(theta, x, parted(support)[0].x)

    return from_outcome(model, outcome, adapt, evaluate=evaluate, init=init)


def seeds_of(support: Batch) -> list[int]:
    """The seed of each task's start and order of batches, by the order of its examples: a task has no other number."""
    each = support.x.float().cpu()
    # Not by `reptile.contents`, a sum, which is the same in any order.
    digests = (hashlib.blake2b(x.contiguous().numpy().tobytes(), digest_size=8) for x in each)
    return [int.from_bytes(digest.digest()) for digest in digests]


def repeated(samples: Batch, count: int) -> Batch:
    """The samples of all tasks, this number of times one after the other."""
    return Batch(*(value.repeat(count, *[1] * (value.dim() - 1)) for value in samples))
