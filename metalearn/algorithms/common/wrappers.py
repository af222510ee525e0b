"""Algorithms made of another algorithm: an ensemble of its trainings, and one whose network has fixed parameters."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.inner import evaluated_once, part, prefixed, without
from metalearn.algorithms.common.losses import objective
from metalearn.errors import ConfigError
from metalearn.nn.surroundings import surrounded, surroundings
from metalearn.types import (
    FIXED,
    Algorithm,
    Batch,
    ChunkResult,
    Episode,
    Metrics,
    Model,
    Params,
    TaskSource,
    ways_differ,
)


def ensemble(algorithm: Algorithm, members: int) -> Algorithm:
    """The learner whose parameters are those of `members` trainings, as `joined` gives them. It only evaluates: each
    member adapts to a task by itself, and the prediction is the mean of their probabilities after the last inner step,
    as in the figures of MAML++ (Antoniou et al. 2019, arXiv 1810.09502), or the mean of their real numbers. Raises
    ConfigError if the algorithm is evaluated on plain samples."""
    if algorithm.evaluated_on != "tasks":
        raise ConfigError("ensemble: this algorithm is evaluated on plain samples, and an ensemble needs tasks")

    of_labels = algorithm.computes is not None and "labels" in algorithm.computes.allows

    def mean(outputs: Sequence[Tensor], y: Tensor) -> Tensor:
        if not y.is_floating_point():  # the logarithm of the mean of the probabilities, which are logits, too
            logs = torch.stack([logits.log_softmax(dim=2) for logits in outputs])
            return logs.logsumexp(dim=0) - math.log(len(outputs))
        stacked = torch.stack(list(outputs))
        if not of_labels:
            return stacked.mean(dim=0)
        yes, no = (F.logsigmoid(sign * stacked).logsumexp(dim=0) for sign in (1, -1))
        return yes - no  # the logits of the mean of each label's probabilities

    def init(generator: Generator) -> Params:
        return joined([algorithm.init(generator) for _ in range(members)])

    def meta_grad(params: Params, episode: Episode, step: int) -> ChunkResult:
        raise NotImplementedError("an ensemble is not trained")

    def outcome(params: Params, episode: Episode, step: int) -> Metrics:
        (support, query) = episode
        tasks = zip(support.x.split(1), support.y.split(1), query.x.split(1), strict=True)
        outputs = torch.cat([adapt(params, Batch(support_x, y))(x) for support_x, y, x in tasks])
        return objective(outputs, query.y, algorithm.computes)

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        adapted = [algorithm.adapt(part(f"{number}.", params), support, steps) for number in range(members)]

        def predict(x: Tensor) -> Tensor:
            return mean([member(x) for member in adapted], support.y)

        return predict

    evaluated = (evaluated_once(outcome), adapt)
    return Algorithm(
        init, meta_grad, *evaluated, loss=None, transductive=algorithm.transductive, computes=algorithm.computes
    )


def joined(members: Sequence[Params]) -> Params:
    """The parameters of all members under names of their own."""
    parts = (prefixed(f"{number}.", params) for number, params in enumerate(members))
    return functools.reduce(dict.__or__, parts, {})


def of_present_classes(model: Model, source: TaskSource) -> Model:
    """The model, whose outputs are those of the classes that a task has, if the tasks of the source differ in them."""
    if not ways_differ(source):
        return model

    def cut(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: apply(*args)[..., : surroundings().present]

    head = None if model.head is None else model.head._replace(apply=cut(model.head.apply))
    return model._replace(apply=cut(model.apply), head=head)


def with_present_classes(algorithm: Algorithm, source: TaskSource) -> Algorithm:
    """The algorithm on a model `of_present_classes`. A task's classes are those of its support set."""
    if not ways_differ(source) or algorithm.evaluated_on != "tasks":
        return algorithm

    def present(support: Batch) -> AbstractContextManager[None]:
        most = surroundings().present  # a caller may want all
        return surrounded(present=int(support.y.max()) + 1 if most is None else most)

    def surrounding(compute: Callable[..., Any] | None) -> Any:
        def computed(params: Params, episode: Episode, *args: Any) -> Any:
            with present(episode.support):
                return compute(params, episode, *args)  # type: ignore[misc]

        return None if compute is None else computed

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        with present(support):
            predict = algorithm.adapt(params, support, steps)

        def predicted(x: Tensor) -> Tensor:
            with present(support):
                return predict(x)

        return predicted

    changed = algorithm._replace(evaluate=surrounding(algorithm.evaluate), adapt=adapt)
    if algorithm.trained_on != "tasks":
        return changed
    return changed._replace(
        meta_grad=surrounding(algorithm.meta_grad), loss=surrounding(algorithm.loss),
        outcome=surrounding(algorithm.outcome),
    )  # fmt: skip


def with_fixed(algorithm: Algorithm, model: Model) -> Algorithm:
    """The algorithm, with the model's fixed parameters among its own, as `state.fixed.…`. They have no gradient."""
    draw = model.fixed
    if draw is None:
        return algorithm

    def init(generator: Generator) -> Params:
        same = Generator().set_state(generator.get_state())  # the network is drawn from the same seed again
        drawn = algorithm.init(generator)
        return drawn | prefixed(FIXED, draw(same)) if drawn else drawn  # without the others, there is nothing to learn

    def surrounding(compute: Callable[..., Any] | None) -> Any:
        def computed(params: Params, *args: Any) -> Any:
            fixed = {name: value.detach() for name, value in part(FIXED, params).items()}
            with surrounded(fixed=fixed):
                return compute(without(FIXED, params), *args)  # type: ignore[misc]

        return None if compute is None else computed

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        fixed = part(FIXED, params)
        with surrounded(fixed=fixed):
            predict = algorithm.adapt(without(FIXED, params), support, steps)

        def predicted(x: Tensor) -> Tensor:
            with surrounded(fixed=fixed):  # the predictor is called later, where they are no longer set
                return predict(x)

        return predicted

    def classify(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """Of per-task parameters, which all have the same fixed ones."""
        fixed = {name: value[0] for name, value in part(FIXED, params).items()}
        with surrounded(fixed=fixed):
            return (algorithm.classify or model.apply)(without(FIXED, params), x, support_x)

    return algorithm._replace(
        init=init,
        meta_grad=surrounding(algorithm.meta_grad),
        evaluate=surrounding(algorithm.evaluate),
        adapt=adapt,
        loss=surrounding(algorithm.loss),
        outcome=surrounding(algorithm.outcome),
        classify=classify,
    )
