"""Checks that a learner and a dataset fit, on one task, before anything is started."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from metalearn.errors import ConfigError
from metalearn.nn.layers import per_task
from metalearn.nn.surroundings import surrounded
from metalearn.training.chunks import episodes_of, placing
from metalearn.types import (
    Algorithm,
    Apply,
    Batch,
    ComesInGroups,
    Episode,
    Loss,
    Metrics,
    Model,
    Params,
    TaskSource,
    Unit,
    ways_differ,
)


def check_compatible(algorithm: Algorithm, model: Model, params: Params, source: TaskSource, first: Episode) -> None:
    """Tries the learner on `first`, the first training task or samples, and on the first test task. Raises ConfigError
    if the dataset gives tasks and the algorithm needs samples, or the reverse; the model cannot take the inputs; or its
    outputs do not fit the targets."""
    _check_unit(source.unit("train"), algorithm.trained_on, algorithm, "learns from")
    if algorithm.trained_on == "samples":
        _try_samples(algorithm.classify or model.apply, params, source, first, algorithm.computes)
    else:
        _try_task(algorithm, params, source, first, "train")
    for split in ("val", "test"):
        _check_unit(source.unit(split), algorithm.evaluated_on, algorithm, "is evaluated on")
    if algorithm.evaluated_on == "tasks":
        check_evaluation(algorithm, model, params, source, "test")


def check_evaluation(algorithm: Algorithm, model: Model, params: Params, source: TaskSource, split: str) -> None:
    """Tries the learner on the first task, or the first two samples, of a split that it is evaluated on. Raises
    ConfigError as `check_compatible`."""
    _check_unit(source.unit(split), algorithm.evaluated_on, algorithm, "is evaluated on")
    loss = algorithm.computes
    if algorithm.evaluated_on == "samples":
        two = episodes_of(source, split, torch.arange(2), loss)
        _try_samples(algorithm.classify or model.apply, params, source, two, loss)
    else:
        _try_task(algorithm, params, source, episodes_of(source, split, torch.tensor([0]), loss), split)


def _check_unit(unit: Unit, expected: Unit, algorithm: Algorithm, verb: str) -> None:
    if unit == expected:
        return
    if expected == "tasks":
        raise ConfigError(
            f"dataset: it gives plain samples, and this algorithm {verb} tasks; type algorithm=supervised, or a "
            "dataset of tasks, such as dataset=omniglot"
        )
    example = "omniglot" if algorithm.evaluated_on == "tasks" else "omniglot_characters"
    raise ConfigError(
        f"dataset: it gives tasks, and this algorithm {verb} plain samples; type dataset={example}, for example, or "
        "dataset=image_folder for pictures of your own"
    )


def _try_samples(classify: Apply, params: Params, source: TaskSource, first: Episode, loss: Loss | None) -> None:
    advice = (
        " in micro-batches of one sample; type a trainer.task_chunk that leaves none over, or a larger "
        "trainer.meta_batch_size (or other val_tasks and test_tasks)"
    )
    (support, query) = _placed(params, first)
    x, support_x = query.x, support.x if support.x.shape[1] else None
    outputs = _outputs(lambda: classify(per_task(params, 1), x, support_x), x, advice if x.shape[1] == 1 else "")
    _check_outputs(outputs, source.classes("train"), first.query)
    _try_loss(loss and loss.of_samples, outputs, query.y)


def _try_task(algorithm: Algorithm, params: Params, source: TaskSource, task: Episode, split: str) -> None:
    (support, query) = _placed(params, task)
    with surrounded(present=sys.maxsize):  # all outputs of a head, for classes that this task does not have, too
        outputs = _outputs(lambda: algorithm.adapt(params, support, 0)(query.x), query.x)
    of_training, of_test = source.classes("train"), source.classes("test")
    if split == "train" and of_training != of_test and outputs.shape[2] != of_training:
        raise ConfigError(
            f"dataset.train_ways={of_training}: this algorithm's head has {outputs.shape[2]} outputs, in training and "
            "test alike; type dataset.train_ways=null, or algorithm=protonet, which has no head"
        )
    # Of tasks that differ, each may have fewer classes than the source; of others, all of them.
    differ = isinstance(source, ComesInGroups) or ways_differ(source)
    _check_outputs(outputs, source.classes(split), task.query, support, differ=differ)
    _try_loss(algorithm.computes and algorithm.computes.of_tasks, outputs, query.y)
    loss = algorithm.computes
    if split == "train" and loss is not None:
        # Some losses of torch have no second derivative, which not every algorithm needs.
        with torch.enable_grad():
            at = outputs.detach().requires_grad_()
            try:
                (slope,) = torch.autograd.grad(loss.of_tasks(at, query.y)["loss"].sum(), at, create_graph=True)
                if slope.requires_grad:
                    torch.autograd.grad(slope.sum(), at)
            except RuntimeError as error:
                try:
                    algorithm.meta_grad(params, Episode(support, query), 1)
                except RuntimeError:
                    raise ConfigError(
                        f"loss={loss.name}: has no second derivative ({error}), and this algorithm needs it; type "
                        "algorithm.first_order=true where there is such a key, algorithm=reptile, or another loss"
                    ) from error


def _try_loss(measure: Callable[[Tensor, Tensor], Metrics] | None, outputs: Tensor, y: Tensor) -> None:
    """Raises ConfigError for a loss, which may be code of the user's own, that fails."""
    try:
        if measure is not None:
            measure(outputs, y)
    except ConfigError:
        raise
    except Exception as error:  # whatever it is
        shapes = f"outputs {list(outputs.shape[1:])} and targets {list(y.shape[1:])} of {y.dtype}"
        raise ConfigError(f"loss: fails for {shapes} ({type(error).__name__}: {error}); type loss=auto") from error


def _placed(params: Params, episode: Episode) -> Episode:
    """The episode as the chunks have it, for parameters of this type."""
    return placing(episode.query.x.device, next(iter(params.values())).dtype)(episode)


def _outputs(compute: Callable[[], Tensor], x: Tensor, why: str = "") -> Tensor:
    try:
        with torch.no_grad():
            return compute()
    except ConfigError:
        raise
    except (RuntimeError, IndexError, ValueError) as error:
        reason, advice = str(error).splitlines()[0], why or "; type another dataset, or a model for such inputs"
        raise ConfigError(
            f"model: it cannot take this dataset's inputs of shape {tuple(x.shape[2:])} ({reason}){advice}"
        ) from error


def _check_outputs(
    outputs: Tensor, classes: int | None, query: Batch, support: Batch | None = None, differ: bool = False
) -> None:
    """Raises ConfigError unless there is an output for each class of the source, or, if tasks `differ`, of this task,
    whose `support` set may have fewer, or for each number."""
    if classes is None and query.y.dim() != 3:
        raise ConfigError(
            f"dataset: its targets have the shape {list(query.y.shape)}, and real numbers need [tasks, samples, "
            "numbers]; give y.unsqueeze(2)"
        )
    expected = query.y.shape[2] if classes is None else classes
    ways = (
        None
        if classes is None or support is None or support.y.dim() != 2 or not support.y.numel()
        else int(support.y.max()) + 1
    )
    few = ways is not None and ways < expected and outputs.shape[2] == ways
    if outputs.shape[2] != expected and not (few and differ):
        reason = f" (the first support set has no sample of class {ways}: type more dataset.shots)" if few else ""
        raise ConfigError(
            f"model: it has {outputs.shape[2]} outputs, and this dataset's tasks need {expected}{reason}; "
            f"type model.ways={expected}, or model.outputs={expected} for an mlp"
        )
