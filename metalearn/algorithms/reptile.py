"""Reptile, Nichol et al. 2018 (arXiv 1803.02999).

Algorithm 2: φᵢ = k inner steps on task i from θ, then θ ← θ + ε (1/n) Σᵢ (φᵢ − θ). Here the sum of θ − φᵢ takes the
place of the gradient; `optimizer=sgd` with rate ε then does that step. There is no graph of the inner steps.

The authors carry one inner optimiser through all tasks of a run and into every test task. With `inner_state=carried`
its state s (Adam's v) and its number of steps T are meta-parameters, too. All n tasks of a meta-step start from the
same s and T, so that they can be computed side by side. If a step multiplies s by β, task i ends with sᵢ, and has added
Sᵢ = sᵢ − βᵏ s. Then s ← βⁿᵏ s + (1 − βⁿᵏ) / (1 − βᵏ) · mean Sᵢ and T ← T + n k, as if the n tasks had come one after
the other and each had added that mean. For n = 1 it is what the authors do.

Differences from the authors' code:

- A training task has no queries: the inner steps learn from both sets, so the logged training accuracy is that of
  samples the task has learned from.
- Their tasks come one after the other. TensorFlow adds ε to √v, torch and we to √v after its correction by T.
- Their mini-batches are shuffled again in every pass. If ours can have every class equally often, they take the first
  drawing of each class, then the second, and so on; else the order is drawn for every pass, by a seed that follows from
  the inputs. Real numbers and several labels of a sample are taken in the order of the task, in every pass.
- Without their transductive flag, each test sample is normalised together with the support set;
  `model.transductive=false` here uses the statistics of the support set alone.
- Their network flattens the last 2×2 map; ours averages it. They test on characters that are not rotated.
"""

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import State, part, without
from metalearn.algorithms.common.inner import (
    SGD,
    InnerOptimizer,
    by_tensor,
    check_descent,
    descent,
    evaluated_by_descent,
    last,
)
from metalearn.errors import counts, one_of, whole_number
from metalearn.types import STATE, Algorithm, Batch, ChunkResult, Episode, Model, Params, summed

DONE = f"{STATE}steps"  # T, the number of steps of the carried optimiser


def reptile(
    *, model: Model, inner: InnerOptimizer = SGD, inner_lr: float, inner_steps: int, eval_steps: int,
    inner_batch: int | None, eval_batch: int | None, inner_state: str = "fresh", meta_batch: int = 1,
) -> Algorithm:  # fmt: skip
    """Learns a start that is near to the ends of many trainings. Raises ValueError for a rate that is not above 0, a
    number of steps or tasks out of range, or an empty mini-batch.

    A training task has no queries: its support and query samples are one set.

    Args:
        model, inner, eval_steps: as for `maml`.
        inner_lr: the rate of the inner steps, on the mean loss of a mini-batch.
        inner_steps: inner steps in meta-training, one mini-batch each.
        inner_batch: most samples of a mini-batch in meta-training; None: all.
        eval_batch: most samples of a mini-batch in validation and test; None: all.
        inner_state: `fresh`: every task begins with a new state of `inner`; `carried`: with the state of the run.
        meta_batch: n, the tasks of a meta-step, for `carried`.
    """
    check_descent(inner_lr=inner_lr, inner_steps=inner_steps, eval_steps=eval_steps)
    batches = {"inner_batch": inner_batch, "eval_batch": eval_batch}
    counts(meta_batch=meta_batch, **{name: size for name, size in batches.items() if size is not None})
    one_of("inner_state", inner_state, ("fresh", "carried"))
    inner, carries = by_tensor(inner, model), inner_state == "carried"
    whole_number("inner_steps", inner_steps, at_least=1 if carries else 0)

    def init(generator: Generator) -> Params:
        weights = model.init(generator)
        if not carries:
            return weights
        # What a step forgets altogether is not carried.
        states = {f"{STATE}{key}": state for key, state in inner.start(weights).items() if inner.decays[key]}
        first = {f"{key}.{name}": value for key, state in states.items() for name, value in state.items()}
        return weights | {DONE: torch.zeros(1)} | first

    def path(
        start: Params, samples: Batch, size: int | None, steps: int, optimizer: InnerOptimizer
    ) -> Iterator[Params]:
        batch_of = mini_batches(samples, size)

        def loss(params: Params, step: int) -> Tensor:
            return model.metrics(params, batch_of(step))["loss"]

        return descent(loss, start, optimizer=optimizer, rate=inner_lr, steps=steps, order=0)

    def eval_path(params: Params, support: Batch, steps: int, order: int) -> Iterator[Params]:
        optimizer = continued(inner, model, params, len(support.x))[0] if carries else inner
        return path(model.start(without(STATE, params), len(support.x)), support, eval_batch, steps, optimizer)

    @torch.no_grad()
    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        (support, query) = episode
        tasks = support.x.shape[0]
        samples = Batch(*(torch.cat([shown, asked], dim=1) for shown, asked in zip(support, query, strict=True)))
        optimizer, latest = continued(inner, model, params, tasks) if carries else (inner, dict)
        start = model.start(without(STATE, params), tasks)
        end = last(path(start, samples, inner_batch, inner_steps, optimizer))
        grads = model.sums({name: start[name] - end[name] for name in start})
        if carries:
            ends = {key: model.sums(values) for key, values in latest().items()}
            grads |= change_of_state(params, ends, inner.decays, tasks, inner_steps, meta_batch)
        return ChunkResult(grads, summed(model.metrics(end, query, support.x)), tasks)

    evaluated = evaluated_by_descent(model, eval_path, eval_steps)
    # The change of a carried state follows from the sums of a chunk, so chunks of other sizes round otherwise.
    return Algorithm(init, meta_grad, *evaluated, loss=None, adds_in_pairs=not carries, computes=model.loss)


# The carried state


def continued(
    inner: InnerOptimizer, model: Model, params: Params, tasks: int
) -> tuple[InnerOptimizer, Callable[[], State]]:
    """The inner optimiser that goes on from the state in `params` in every task, and a function that gives its state
    after its latest step."""
    done = int(params[DONE])
    states: list[State] = []

    def start(weights: Params) -> State:
        carried = {key: part(f"{STATE}{key}.", params) for key in inner.decays}
        return inner.start(weights) | {key: model.start(values, tasks) for key, values in carried.items() if values}

    def direct(grads: Params, state: State, step: int) -> tuple[Params, State]:
        directions, new = inner.direct(grads, state, done + step)
        states[:] = [new]
        return directions, new

    return InnerOptimizer(start, direct, inner.decays, elementwise=True), lambda: states[0]


def change_of_state(
    params: Params, ends: State, decays: Mapping[str, float], tasks: int, steps: int, meta_batch: int
) -> Params:
    """The old state minus the new one, summed over the tasks, from the sums `ends` of the states after their steps."""
    change = {DONE: torch.full_like(params[DONE], -tasks * meta_batch * steps)}
    for key, decay in decays.items():
        forgotten, once = 1 - decay ** (meta_batch * steps), 1 - decay**steps
        for name, old in part(f"{STATE}{key}.", params).items():
            added = ends[key][name] - decay**steps * tasks * old
            change[f"{STATE}{key}.{name}"] = forgotten * (tasks * old - added / once)
    return change


# Mini-batches


def mini_batches(samples: Batch, size: int | None) -> Callable[[int], Batch]:
    """The mini-batch of an inner step: at most `size` samples, without replacement, as even as possible in each pass.

    The classes take turns. A task whose mini-batches cannot have all classes equally often draws a new order for each
    pass: in a fixed one, the same labels would always be learned last.
    """
    if size is None:
        return lambda step: samples
    count = -(-samples.y.shape[1] // size)
    turns = None if samples.y.is_floating_point() else by_turn(samples.y)
    in_turn = samples if turns is None else ordered(samples, turns)
    uneven = [] if turns is None or count == 1 else [task for task, y in enumerate(samples.y) if not _evenly(y, count)]
    seeds = contents(samples.x) if uneven else []

    @functools.lru_cache(maxsize=1)
    def one_pass(number: int) -> list[Batch]:
        x, y = in_turn
        if turns is not None and uneven:
            order = turns.clone()
            for task in uneven:
                order[task] = drawn_order(samples.y[task], count, np.random.default_rng((seeds[task], number)))
            x, y = ordered(samples, order)
        return list(map(Batch, x.tensor_split(count, dim=1), y.tensor_split(count, dim=1)))

    return lambda step: one_pass(step // count)[step % count]


def _evenly(labels: Tensor, count: int) -> bool:
    """Whether `count` equal mini-batches have each of the labels [n] equally often if the classes take turns."""
    sizes = torch.unique(labels, return_counts=True)[1]
    return bool((sizes == sizes[0]).all()) and len(labels) % (count * len(sizes)) == 0


def drawn_order(labels: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """A random order of a task's samples, by their labels [n]. In it the classes take turns, too, if they are equally
    large and each of the `count` mini-batches can have them all."""
    order = torch.from_numpy(rng.permutation(len(labels))).to(labels.device)
    classes, places, sizes = torch.unique(labels[order], return_inverse=True, return_counts=True)
    if len(labels) // count < len(classes) or (sizes != sizes[0]).any():
        return order
    ranks = torch.from_numpy(rng.permutation(len(classes))).to(labels.device)
    return order[by_turn(ranks[places].unsqueeze(0))[0]]


def ordered(samples: Batch, order: Tensor) -> Batch:
    """The samples of each task in the order [t, n]."""
    rows = torch.arange(len(order), device=order.device).unsqueeze(1)
    return Batch(samples.x[rows, order], samples.y[rows, order])


def by_turn(y: Tensor) -> Tensor:
    """The order in which the classes take turns. Support and query samples each come sorted by class; so they are put
    in the order of how often their class has come before."""
    earlier = (y.unsqueeze(2) == y.unsqueeze(1)).tril(-1).sum(dim=2)
    return (earlier * (y.max() + 1) + y).argsort(dim=1)


def contents(x: Tensor) -> list[int]:
    """A number for each task, the same wherever it is computed: the sum of its inputs' bits. Like its inputs it follows
    from the task's number in the run; a task of a user's own has no other."""
    bits = x.flatten(1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return [total & (2**63 - 1) for total in bits.sum(dim=1).tolist()]
