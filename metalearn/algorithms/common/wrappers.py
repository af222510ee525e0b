"""Algorithms made of another algorithm: an ensemble of its trainings, and one whose network has fixed parameters."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from metalearn.algorithms.common.arithmetic import part, prefixed, without
from metalearn.algorithms.common.losses import objective
from metalearn.errors import ConfigError
from metalearn.nn.surroundings import surrounded, surroundings
from metalearn.types import FIXED, Algorithm, Batch, Episode, Metrics, Model, Params, TaskSource, ways_differ


def ensemble(algorithm: Algorithm, members: int) -> Algorithm:
    """The learner whose parameters are those of `members` trainings, as `joined` gives them. It only evaluates: each
    member adapts to a task by itself, and the prediction is the mean of their probabilities after the last inner step,
    as in the figures of MAML++ (Antoniou et al. 2019, arXiv 1810.09502), or the mean of their real numbers. Raises
    ConfigError if the algorithm is evaluated on plain samples."""
    if algorithm.evaluated_on != "tasks":
        raise ConfigError("ensemble: this algorithm is evaluated on plain samples, and an ensemble needs tasks")
    measured = algorithm.computes
    of_labels = measured is not None and "labels" in measured.allows

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

    def meta_grad(params: Params, episode: Episode, step: int) -> NoReturn:
        raise NotImplementedError("an ensemble is not trained")

    @torch.no_grad()
    def evaluate(params: Params, episode: Episode) -> Metrics:
        (support, query) = episode
        tasks = zip(support.x.split(1), support.y.split(1), query.x.split(1), strict=True)
        outputs = torch.cat([adapt(params, Batch(support_x, y))(x) for support_x, y, x in tasks])
        return {name: v.unsqueeze(1) for name, v in objective(outputs, query.y, measured).items()}

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        adapted = [algorithm.adapt(part(f"{number}.", params), support, steps) for number in range(members)]
        return lambda x: mean([member(x) for member in adapted], support.y)

    transductive = algorithm.transductive
    return Algorithm(init, meta_grad, evaluate, adapt, loss=None, transductive=transductive, computes=measured)


def joined(members: Sequence[Params]) -> Params:
    """The parameters of all members under names of their own."""
    return {f"{number}.{name}": value for number, params in enumerate(members) for name, value in params.items()}


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

    def present(params: Params, support: Batch) -> AbstractContextManager[None]:
        most = surroundings().present  # a caller may want all
        return surrounded(present=int(support.y.max()) + 1 if most is None else most)

    changed = _within(algorithm, present)
    if algorithm.trained_on == "tasks":
        return changed
    return changed._replace(meta_grad=algorithm.meta_grad, loss=algorithm.loss, outcome=algorithm.outcome)


def with_fixed(algorithm: Algorithm, model: Model) -> Algorithm:
    """The algorithm, with the model's fixed parameters among its own, as `state.fixed.…`. They have no gradient."""
    draw = model.fixed
    if draw is None:
        return algorithm

    def init(generator: Generator) -> Params:
        same = Generator().set_state(generator.get_state())  # the network is drawn from the same seed again
        drawn = algorithm.init(generator)
        return drawn | prefixed(FIXED, draw(same)) if drawn else drawn  # without the others, there is nothing to learn

    def fixed(params: Params, support: Batch) -> AbstractContextManager[None]:
        return surrounded(fixed={name: value.detach() for name, value in part(FIXED, params).items()})

    def classify(params: Params, x: Tensor, support_x: Tensor | None = None) -> Tensor:
        """Of per-task parameters, which all have the same fixed ones."""
        with surrounded(fixed={name: value[0] for name, value in part(FIXED, params).items()}):
            return (algorithm.classify or model.apply)(without(FIXED, params), x, support_x)

    return _within(algorithm, fixed)._replace(init=init, classify=classify)


def _within(algorithm: Algorithm, around: Callable[[Params, Batch], AbstractContextManager[None]]) -> Algorithm:
    """The algorithm, which computes within `around(params, support)`, and does not see fixed parameters."""

    def surrounding(compute: Callable[..., Any] | None) -> Any:
        def computed(params: Params, episode: Episode, *args: Any) -> Any:
            with around(params, episode.support):
                return compute(without(FIXED, params), episode, *args)  # type: ignore[misc]

        return None if compute is None else computed

    def adapt(params: Params, support: Batch, steps: int | None = None) -> Callable[[Tensor], Tensor]:
        with around(params, support):
            predict = algorithm.adapt(without(FIXED, params), support, steps)

        def predicted(x: Tensor) -> Tensor:
            with around(params, support):  # the predictor is called later, when the others are no longer set
                return predict(x)

        return predicted

    (meta_grad, evaluate, loss, outcome) = map(
        surrounding, (algorithm.meta_grad, algorithm.evaluate, algorithm.loss, algorithm.outcome)
    )
    return algorithm._replace(meta_grad=meta_grad, evaluate=evaluate, adapt=adapt, loss=loss, outcome=outcome)
